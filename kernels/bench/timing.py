"""How the benchmarks time a launch and print what they found.

`cold` is the median of single launches behind an L2 flush, between two events, which adds their overhead. `in_graph`
is the mean inside one CUDA graph that walks over enough copies of the inputs to keep the L2 cold: what a launch costs
where the host does not matter.
"""

import argparse
import functools
import importlib.util
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

COLD_BYTES = 256 * 2**20
"""More than any L2: written between launches, or spread over the inputs of a graph."""

MIN_GRAPH_LAUNCHES = 40
"""In one graph, of launches so short that starting it would count."""
GRAPH_US = 100_000
"""Launches that take this long together are enough for a graph."""
TIMED_US = 500_000
"""About as long as one figure is measured: a launch of milliseconds says as much in fewer repeats."""
MIN_REPEATS = 5
"""But for who asks for fewer."""

cuda: Any = torch.cuda
"""torch leaves its events and streams without types."""


@functools.cache
def load_ops() -> Any:
    """The kernels, through `kernels/build.py`; `kernels` is a folder of sources, not a package."""
    spec = importlib.util.spec_from_file_location("kernels_build", Path(__file__).parents[1] / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()


def warm_us(launch: Callable[[], object], num_warm_ups: int = 2) -> float:
    """Microseconds of a launch after others, the host's part included: enough to choose repeats by."""
    for _ in range(num_warm_ups):
        launch()
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def repeats_within(us: float, most: int) -> int:
    """How many times something that takes `us` is timed: as often as is asked for, or fewer where it is long."""
    return min(most, max(MIN_REPEATS, int(TIMED_US / max(us, 1.0))))


def cold_us(launch: Callable[[], object], repeats: int = 50) -> float:
    """Median microseconds of single launches, of `repeats` or, where they are long, of fewer."""
    flush = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    num_timed = repeats_within(warm_us(launch), repeats)
    pairs = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_timed)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        launch()
        end.record()
    cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) * 1e3 for start, end in pairs)


def in_graph_us(launches: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Mean microseconds of one of the launches, whose inputs together should exceed the L2.

    In up to `replays` of a graph of 40 launches or more; fewer of both where the launches are long.
    """
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        us = warm_us(launches[0], num_warm_ups=1)
    wanted = min(MIN_GRAPH_LAUNCHES, int(GRAPH_US / max(us, 1.0)))
    rounds = max(1, wanted // len(launches))
    cuda.current_stream().wait_stream(stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for launch in [*launches] * rounds:
            launch()
    num_timed = repeats_within(warm_us(graph.replay, num_warm_ups=1), replays)
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_timed):
        graph.replay()
    end.record()
    cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / (num_timed * rounds * len(launches))


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read plus written."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    seconds = cold_us(lambda: target.copy_(source), repeats=10) / 1e6
    return 2 * source.numel() * source.element_size() / seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table; times in microseconds."""

    op: str
    problem: str
    us: float
    graph_us: float
    num_bytes: int
    """What must move: each input once, each output once."""
    target_us: float | None
    alternative_us: float | None
    """PyTorch, timed the same way as `graph_us`."""


def measure(
    op: str,
    problem: str,
    launches: Sequence[Callable[[], object]],
    num_bytes: int,
    alternatives: Sequence[Callable[[], object]] = (),
    target_us: float | None = None,
) -> Row:
    """Time one op; `launches` and `alternatives` hold one call per copy of the inputs."""
    return Row(
        op=op,
        problem=problem,
        us=cold_us(launches[0]),
        graph_us=in_graph_us(launches),
        num_bytes=num_bytes,
        target_us=target_us,
        alternative_us=in_graph_us(alternatives) if alternatives else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the figures of a run relate to."""

    gpu: str
    torch: str
    copy_bytes_per_s: float
    empty_us: float
    """Two events with nothing between them."""

    def copy_percent(self, num_bytes: int, us: float) -> float:
        """Bandwidth of a launch, in percent of a large device copy's."""
        return 100 * num_bytes / (us * 1e-6) / self.copy_bytes_per_s

    def write_json(self, path: Path, rows: Sequence[dict[str, Any]]) -> None:
        """The whole run."""
        path.write_text(json.dumps({**asdict(self), "rows": rows}, indent=2) + "\n")


def new_parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def start() -> Machine:
    """Seed, measure the machine, and print the first line; ends the program where there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("the kernels run on a CUDA GPU only")
    torch.manual_seed(0)
    machine = Machine(
        gpu=torch.cuda.get_device_name(),
        torch=str(torch.__version__),
        copy_bytes_per_s=copy_bandwidth(),
        empty_us=cold_us(lambda: None),
    )
    copy, empty = machine.copy_bytes_per_s / 1e12, machine.empty_us
    print(f"{machine.gpu}, torch {machine.torch}: copy {copy:.2f} TB/s, empty {empty:.1f} us")
    return machine


def run(description: str, rows_of: Callable[[], list[Row]]) -> None:
    """A benchmark's command line: measure, print the table, write it as JSON when asked."""
    options = new_parser(description).parse_args()
    machine = start()
    rows = rows_of()
    print_rows(rows, machine)
    if options.json is not None:
        machine.write_json(options.json, [asdict(row) for row in rows])


def print_rows(rows: Sequence[Row], machine: Machine) -> None:
    """The table; `copy %` relates bytes / graph us to a large device copy."""
    times = f"{'us':>9}{'graph us':>10}{'target':>8}"
    print(f"{'op':18}{'problem':34}{times}{'MB':>9}{'copy %':>8}{'torch us':>10}{'ratio':>7}")
    for row in rows:
        percent = machine.copy_percent(row.num_bytes, row.graph_us)
        target = "-" if row.target_us is None else f"{row.target_us:.0f}"
        line = f"{row.op:18}{row.problem:34}{row.us:>9.1f}{row.graph_us:>10.1f}{target:>8}{row.num_bytes / 1e6:>9.2f}"
        line += f"{percent:>8.1f}"
        if row.alternative_us is not None:
            line += f"{row.alternative_us:>10.1f}{row.alternative_us / row.graph_us:>7.1f}"
        print(line)
