"""`hf-sparsekv eval`: what a model loses with a sparse cache, on offline tasks and on lm-eval's.

What brings torch is imported inside the command: `--help` does without those seconds.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_sparsekv.cli.eval_options import (
    DEFAULT_OUT,
    BatchSizeOption,
    CompressionOption,
    ConfigsOption,
    EssayOption,
    FewshotOption,
    HalfOption,
    IncludePathOption,
    JsonOption,
    LengthsOption,
    LimitOption,
    MethodsOption,
    ModesOption,
    OutOption,
    SeedsOption,
    SuiteOption,
    TasksOption,
    check_files,
    parse_half,
    split,
)
from hf_sparsekv.cli.interrupt import Terminated, importing
from hf_sparsekv.cli.options import (
    DEFAULT_MODEL,
    BackendOption,
    BudgetOption,
    DeviceOption,
    DtypeOption,
    FullLayersOption,
    ModelOption,
    NumFullLayersOption,
    PresetOption,
    ReplicasPerGpuOption,
    ScorerOption,
    SetOption,
    TpOption,
    TrustRemoteCodeOption,
    option_values,
)
from hf_sparsekv.errors import InputError

PACKAGE_FOLDER = Path(__file__).parents[1]
PIPE_WIDTH = 150


def eval(
    tasks: TasksOption,
    model: ModelOption = DEFAULT_MODEL,
    suite: SuiteOption = None,
    config: ConfigsOption = None,
    method: MethodsOption = None,
    compression: CompressionOption = None,
    preset: PresetOption = None,
    budget: BudgetOption = None,
    num_full_layers: NumFullLayersOption = None,
    full_layers: FullLayersOption = None,
    scorer: ScorerOption = None,
    set_: SetOption = None,
    lengths: LengthsOption = None,
    seeds: SeedsOption = None,
    modes: ModesOption = "aware,agnostic",
    half: HalfOption = "report",
    limit: LimitOption = None,
    essay: EssayOption = "auto",
    num_fewshot: FewshotOption = None,
    batch_size: BatchSizeOption = 1,
    include_path: IncludePathOption = None,
    out: OutOption = DEFAULT_OUT,
    json_file: JsonOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    tp: TpOption = 1,
    replicas_per_gpu: ReplicasPerGpuOption = 1,
    backend: BackendOption = None,
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Measure what a model loses with a sparse cache, on offline tasks or lm-eval's, paired with the dense one.

    Method options (--budget, --scorer, --set, ...) make one configuration; with --method they apply to every method.
    """
    check_files(out, json_file)
    with importing():
        session = evals_module("session")
    request = session.EvalRequest(
        tasks=tuple(split("--tasks", tasks, str)),
        suite=suite,
        configs=tuple(config or ()),
        methods=tuple(split("--method", method, str)),
        ratios=tuple(split("--compression", compression, float)),
        options=option_values({}, preset, budget, num_full_layers, full_layers, scorer, set_),
        lengths=tuple(split("--lengths", lengths, int)) or None,
        seeds=tuple(split("--seeds", seeds, int)) or None,
        modes=tuple(split("--modes", modes, str)),
        half=parse_half(half),
        limit=limit,
        essay=essay,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        include_path=include_path,
        out=out,
        backend=backend,
    )
    loading = {"dtype": dtype, "device": device, "replicas_per_gpu": replicas_per_gpu}
    _show(_measured(session, request, model, loading, tp=tp, trust_remote_code=trust_remote_code), json_file)


def _measured(
    session: ModuleType, request: Any, model: str, loading: dict[str, Any], *, tp: int, trust_remote_code: bool
) -> dict[str, Any] | None:
    """What came of it; None in a process that others of its launch measure with, and that does not lead."""
    place = import_module("hf_sparsekv.parallel.place").Place.of_environment(tp)
    console = Console(stderr=True, quiet=place.rank > 0)
    with _saying_what_stays(request.out, console):
        prepared = session.prepare(request, model, trust_remote_code=trust_remote_code, place=place, console=console)
        report: dict[str, Any] | None = prepared.run(**loading, place=place, console=console)
    import_module("hf_sparsekv.parallel.group").leave_replica()
    return report


@contextmanager
def _saying_what_stays(out: Path, console: Console) -> Iterator[None]:
    """Where a signal ends what is inside."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        console.print(_what_stays(out), highlight=False, markup=False, soft_wrap=True)
        raise


def _what_stays(out: Path) -> str:
    """Of a run that was stopped; in several processes, what each finished is in a part of its own."""
    parts_of = import_module("hf_sparsekv.engine.part_files").parts_of
    if parts_of(out):
        parts = f"{out.name}.part-*"
        return (
            f"stopped: what is finished stays in {out} and its parts, {parts}; the same command merges them and goes on"
        )
    return f"stopped: what is finished stays in {out}, the same command goes on"


def evals_module(name: str) -> ModuleType:
    """A module of `evals`, which lies beside the package in a checkout and inside it where it was installed.

    Raises:
        InputError: neither is there.
    """
    for folder in (PACKAGE_FOLDER / "bundled", PACKAGE_FOLDER.parent):
        if (folder / "evals" / "session.py").is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))  # before another package of that name
            return import_module(f"evals.{name}")
    raise InputError(f"the evaluation's files are not beside {PACKAGE_FOLDER}: install hf-sparsekv again")


def _show(report: dict[str, Any] | None, json_file: Path | None) -> None:
    """Write the summary where it was asked for, and print the tables; nothing in a process that does not lead."""
    if report is None:
        return
    if json_file is not None:
        json_file.write_text(json.dumps(report | {"command": sys.argv[1:]}, indent=2) + "\n", encoding="utf-8")
    row_text = evals_module("row_text")
    stdout = Console()
    console = stdout if stdout.is_terminal else Console(width=PIPE_WIDTH)
    for rows in row_text.groups_of(report["rows"]):
        heads = row_text.columns(rows)
        table = Table(title=row_text.caption(rows), title_justify="left")
        for head in heads:
            table.add_column(head, overflow="fold")
        for row in rows:
            table.add_row(*[Text(cell) for cell in row_text.cells(row, rows, heads)])
        console.print(table)
    console.print(row_text.origin(report), highlight=False, markup=False, soft_wrap=True)
