"""Options of `hf-sparsekv eval` alone, and what their texts mean."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, TypeVar

import typer

from hf_sparsekv.errors import ConfigError, InputError, shown

Value = TypeVar("Value")
_SAMPLES, _METHOD = "Samples", "Method"
OFFLINE, LM_EVAL = "offline", "lm-eval"
SUITES = (OFFLINE, LM_EVAL)
BOTH = "both"
HALVES = ("report", "tune", BOTH)
DEFAULT_OUT = Path("eval.jsonl")

TasksOption = Annotated[
    str,
    typer.Option(
        "--tasks", "-t", help="Names with commas: needle, perplexity, ... (all = every offline task), or lm-eval's own."
    ),
]
SuiteOption = Annotated[
    str | None,
    typer.Option("--suite", help="offline or lm-eval, for a name that both have (mmlu). Default: offline."),
]
ConfigsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        help="name:option=value,... or a JSON file with options; may be given again.",
        rich_help_panel=_METHOD,
    ),
]
MethodsOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Methods with commas: snapkv, tova, ...; all = every one; original = the preset published; "
        "published-layers = nine published pairs of full layers and budgets, scored as by default.",
        rich_help_panel=_METHOD,
    ),
]
CompressionOption = Annotated[
    str | None,
    typer.Option(
        "--compression",
        help="Dense over sparse bytes, with commas: 2,4,10. The budget is chosen so that the measured bytes meet it.",
        rich_help_panel=_METHOD,
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option("--lengths", help="Tokens of the offline samples, with commas.", rich_help_panel=_SAMPLES),
]
SeedsOption = Annotated[
    str | None,
    typer.Option(
        "--seeds", help="Of the offline samples, with commas; odd ones are the report half.", rich_help_panel=_SAMPLES
    ),
]
ModesOption = Annotated[
    str,
    typer.Option("--modes", help="Protocols: aware (question compressed too), agnostic.", rich_help_panel=_SAMPLES),
]
HalfOption = Annotated[
    str, typer.Option("--half", help="report, tune (for choosing options), or both.", rich_help_panel=_SAMPLES)
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit",
        min=1,
        help="The first samples of each task, length and half (of a seed, depths in turn).",
        rich_help_panel=_SAMPLES,
    ),
]
EssayOption = Annotated[
    str, typer.Option("--essay", help="Text of the documents: auto, novels or pydoc.", rich_help_panel=_SAMPLES)
]
FewshotOption = Annotated[
    int | None,
    typer.Option("--num-fewshot", min=0, help="Examples, lm-eval only. Default: the task's.", rich_help_panel=_SAMPLES),
]
BatchSizeOption = Annotated[
    int, typer.Option("--batch-size", min=1, help="Contexts at once, lm-eval only.", rich_help_panel=_SAMPLES)
]
IncludePathOption = Annotated[
    Path | None,
    typer.Option("--include-path", help="Folder with lm-eval tasks of your own.", rich_help_panel=_SAMPLES),
]
OutOption = Annotated[
    Path, typer.Option("--out", "-o", help="Results, a line each; the same command goes on where it stopped.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the summary here, for evals.tables.")]


def split(option: str, text: str | None, kind: Callable[[str], Value]) -> list[Value]:
    """The values of a list with commas; none where the option was not given.

    Raises:
        ConfigError: one is of another kind, or missing.
    """
    if text is None:
        return []
    values = []
    for part in text.split(","):
        try:
            values.append(kind(part.strip()))
        except ValueError as error:
            raise ConfigError(f"{option}: {shown(part)} is not a number") from error
        if not part.strip():
            raise ConfigError(f"{option}: {shown(text)} has an empty name")
    return values


def parse_half(text: str) -> str | None:
    """The half of the samples; None = both.

    Raises:
        ConfigError: there is no such half.
    """
    if text not in HALVES:
        raise ConfigError(f"--half is {', '.join(HALVES[:-1])} or {BOTH}: got {shown(text)}")
    return None if text == BOTH else text


def check_files(out: Path, json_file: Path | None) -> None:
    """Refuse what cannot be written, before any work; nothing is left behind.

    Raises:
        InputError: a folder that is not there, a file that nobody may write, or one file for both.
    """
    for path in (out, json_file):
        if path is None:
            continue
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise InputError(
                f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder; make it first'}"
            )
        try:
            if path.exists():
                path.open("ab").close()
            else:
                TemporaryFile(dir=path.resolve().parent).close()
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}; give another file") from error
    if json_file is not None and json_file.resolve() == out.resolve():
        raise InputError(f"--out and --json are one file, {out}: give two")
