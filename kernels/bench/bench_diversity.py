"""Times kv_diversity, and all that the scorer `hybrid` does to one layer, against PyTorch.

    HF_SPARSEKV_KERNELS=$(python kernels/build.py) python kernels/bench/bench_diversity.py --json diversity.json

K 8 unless it says otherwise, D 128, bf16 keys and values, dense. The alternative is the definition, op by op on the
GPU. `MB` counts what must move: keys and values once (hybrid: and the rows that stay, read and written). kv_diversity
reads both twice, the second time from the L2 what that holds: where it holds little, 50 % of the copy bandwidth is the
most that there can be. `peak MB` is what a call allocates, its result included.

The last rows are all of one layer, from the LSE of the last 32 rows on: scores, diversity, two lists, compaction.
`kernels` are the compiled ops alone; `ops` is the same through `hf_sparsekv.ops`, one call after the other from Python,
as `generate` and the engine do it, with their choice of a kernel or the definition. Of these rows the alternative is
timed cold, and the ratio is that of the cold times. See `timing` for the other columns.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from timing import COLD_BYTES, Machine, Row, cold_us, in_graph_us, load_ops, measure, new_parser, start
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from hf_sparsekv import ops
from hf_sparsekv.ops import kernels, reference

HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
NUM_ROWS, SINKS, RECENT = 32, 4, 32
PROBLEMS = [(1, 1000, 8), (1, 4000, 1), (1, 4000, 8), (1, 32768, 8), (1, 131072, 8), (8, 4000, 8)]
"""(B, N, K)."""
LAYERS = [(4000, 512), (32768, 2048)]
"""(N, C)."""
TARGET_US = {(1, 4000, 8): 10.0}
"""For one H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Keys and values of one layer, and what scoring it writes."""

    keys: Tensor
    values: Tensor
    lengths: Tensor
    inv_freq: Tensor
    result: Tensor
    workspace: Tensor

    def kernel(self) -> None:
        load_ops().kv_diversity(self.result, self.workspace, self.keys, self.values, self.lengths, self.inv_freq, None)

    def definition(self) -> Tensor:
        return reference.kv_diversity(self.keys, self.values, self.lengths, self.inv_freq)


def make_inputs(batch: int, num_keys: int, kv_heads: int) -> Inputs:
    # Views of a packed projection [B, N, K, D], as a prompt's keys and values are.
    keys, values = (
        torch.randn(batch, num_keys, kv_heads, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(2)
    )
    splits = min(64, -(-num_keys // 128))
    return Inputs(
        keys=keys,
        values=values,
        lengths=torch.full((batch,), num_keys, dtype=torch.int32, device="cuda"),
        inv_freq=1.0 / 500000.0 ** (torch.arange(0, DIM, 2, device="cuda") / DIM),
        result=torch.empty(batch, kv_heads, num_keys, device="cuda"),
        workspace=torch.empty(batch * kv_heads * (2 * splits * (DIM + 2) + num_keys), device="cuda"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """All that scoring one layer takes."""

    inputs: Inputs
    q: Tensor
    lse: Tensor
    score: Tensor
    budgets: Tensor
    index: Tensor
    count: Tensor
    retained: Tensor
    k_out: Tensor
    v_out: Tensor

    def kernels(self) -> None:
        """As the scorer `hybrid` by default: maxima over rows, means over heads, half of the budget each."""
        given, num_keys = self.inputs, self.score.shape[2]
        tensors = (self.score, None, self.q, given.keys, self.lse, given.lengths, None, None, None)
        load_ops().score(*tensors, SCALE, num_keys, 1, 0)
        given.kernel()
        outputs, rule = (self.index, self.count, self.retained), (SINKS, RECENT, 1, 21)
        load_ops().select(*outputs, self.score, given.lengths, self.budgets, *rule, given.result, 1, 7, 0.5)
        load_ops().compact(self.k_out, self.v_out, given.keys, given.values, self.index, None)

    def through(self, room: ModuleType) -> tuple[Tensor, Tensor]:
        """The same by `hf_sparsekv.ops`, or by the definitions of `hf_sparsekv.ops.reference`."""
        given, num_keys = self.inputs, self.score.shape[2]
        score, _ = room.window_score(self.q, given.keys, self.lse, given.lengths, SCALE, num_keys, "max", "mean")
        second = room.kv_diversity(given.keys, given.values, given.lengths, given.inv_freq)
        rule = (self.index.shape[2], SINKS, RECENT, "avg", 21, second, "avg", 7, 0.5)
        index, _, _ = room.select(score, given.lengths, self.budgets, *rule)
        kept: tuple[Tensor, Tensor] = room.compact(given.keys, given.values, index)
        return kept


def make_layer(num_keys: int, capacity: int) -> Layer:
    inputs = make_inputs(1, num_keys, KV_HEADS)
    q = torch.randn(1, NUM_ROWS, HEADS, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    shape = (1, KV_HEADS, capacity)
    return Layer(
        inputs=inputs,
        q=q,
        lse=reference.window_lse(q, inputs.keys, inputs.lengths, SCALE, num_keys),
        score=torch.empty_like(inputs.result),
        budgets=torch.full((1,), capacity, dtype=torch.int32, device="cuda"),
        index=torch.empty(shape, dtype=torch.int64, device="cuda"),
        count=torch.empty(1, dtype=torch.int32, device="cuda"),
        retained=torch.empty(shape, device="cuda"),
        k_out=torch.empty(*shape, DIM, device="cuda", dtype=torch.bfloat16),
        v_out=torch.empty(*shape, DIM, device="cuda", dtype=torch.bfloat16),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A row of the table, and what the two sides allocate."""

    row: Row
    peak_bytes: int | None
    alternative_peak_bytes: int
    is_cold: bool = False
    """Whether the ratio is that of the cold times."""

    @property
    def ratio(self) -> float | None:
        """How many times as long the alternative takes."""
        own = self.row.us if self.is_cold else self.row.graph_us
        return None if self.row.alternative_us is None else self.row.alternative_us / own


def peak_bytes(launch: Callable[[], object]) -> int:
    """What a call allocates at most, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    launch()
    return torch.cuda.max_memory_allocated() - before


def num_sets(num_bytes: int) -> int:
    """Copies of the inputs that the L2 does not hold."""
    return max(2, min(16, -(-COLD_BYTES // num_bytes)))


def diversity_line(batch: int, num_keys: int, kv_heads: int) -> Line:
    key_bytes = 4 * batch * kv_heads * num_keys * DIM
    sets = [make_inputs(batch, num_keys, kv_heads) for _ in range(num_sets(key_bytes))]
    row = measure(
        "kv_diversity",
        f"B {batch}, N {num_keys}, K {kv_heads}",
        [s.kernel for s in sets],
        key_bytes + sets[0].result.nbytes,
        target_us=TARGET_US.get((batch, num_keys, kv_heads)),
    )
    # Fewer replays than the kernels get: the definition takes milliseconds.
    row = replace(row, alternative_us=in_graph_us([s.definition for s in sets], replays=2))
    own = sets[0].result.nbytes + sets[0].workspace.nbytes
    return Line(row=row, peak_bytes=own, alternative_peak_bytes=peak_bytes(sets[0].definition))


def layer_lines(num_keys: int, capacity: int) -> list[Line]:
    key_bytes = 4 * KV_HEADS * num_keys * DIM
    layers = [make_layer(num_keys, capacity) for _ in range(num_sets(key_bytes))]
    moved = key_bytes + 8 * KV_HEADS * capacity * DIM
    problem = f"N {num_keys} -> {capacity}"
    definition = functools.partial(layers[0].through, reference)
    row = measure("hybrid, kernels", problem, [layer.kernels for layer in layers], moved)
    row = replace(row, alternative_us=cold_us(definition, repeats=10))
    through = functools.partial(layers[0].through, ops)
    through_us = cold_us(through)
    through_row = replace(row, op="hybrid, ops", us=through_us, graph_us=through_us)
    peak = peak_bytes(definition)
    return [
        Line(row=row, peak_bytes=None, alternative_peak_bytes=peak, is_cold=True),
        Line(row=through_row, peak_bytes=peak_bytes(through), alternative_peak_bytes=peak, is_cold=True),
    ]


def print_lines(lines: Sequence[Line], machine: Machine) -> None:
    columns = f"{'us':>9}{'graph us':>10}{'target':>8}{'MB':>9}{'copy %':>8}{'torch us':>10}{'ratio':>7}"
    print(f"{'op':16}{'problem':24}{columns}{'peak MB':>9}{'torch MB':>10}")
    for line in lines:
        row = line.row
        target = "-" if row.target_us is None else f"{row.target_us:.0f}"
        percent = machine.copy_percent(row.num_bytes, row.graph_us)
        peak = "-" if line.peak_bytes is None else f"{line.peak_bytes / 1e6:.1f}"
        assert row.alternative_us is not None and line.ratio is not None
        print(
            f"{row.op:16}{row.problem:24}{row.us:>9.1f}{row.graph_us:>10.1f}{target:>8}{row.num_bytes / 1e6:>9.2f}"
            f"{percent:>8.1f}{row.alternative_us:>10.1f}{line.ratio:>7.1f}"
            f"{peak:>9}{line.alternative_peak_bytes / 1e6:>10.1f}"
        )


def main() -> None:
    """Command line, see this module's docstring."""
    options = new_parser("Benchmark kv_diversity and the hybrid scorer.").parse_args()
    machine = start()
    load_ops()
    if kernels.load() is None:
        raise SystemExit("set HF_SPARSEKV_KERNELS=$(python kernels/build.py --archs 90a), with this GPU's architecture")
    lines = []
    for problem in PROBLEMS:
        lines.append(diversity_line(*problem))
        torch.cuda.empty_cache()
    for problem_of_layer in LAYERS:
        lines += layer_lines(*problem_of_layer)
        torch.cuda.empty_cache()
    print_lines(lines, machine)
    if options.json is not None:
        machine.write_json(options.json, [asdict(line) | {"ratio": line.ratio} for line in lines])


if __name__ == "__main__":
    main()
