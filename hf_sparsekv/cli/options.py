"""Command-line options that several subcommands share, and the configuration they amount to.

What brings torch is imported inside the functions that need it: `--help` does without those seconds.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hf_sparsekv.errors import ConfigError, InputError, shown
from hf_sparsekv.models_store import BUILTIN_ALIAS
from hf_sparsekv.presets import without_preset_options

if TYPE_CHECKING:
    from hf_sparsekv.budget_values import Budget
    from hf_sparsekv.config import SparseKVConfig

DEFAULT_MODEL = BUILTIN_ALIAS
Number = TypeVar("Number", int, float)
_METHOD = "Method"

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help=f"{BUILTIN_ALIAS} (built in), a local folder, or a Hugging Face id.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="JSON file with options; those given beside it win.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Tokens a window layer keeps: 512, a fraction of the prompt: 0.1, or a list: 256,512,...",
        rich_help_panel=_METHOD,
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="balanced (the default), question-in-window or published: options that are not given take its values.",
        rich_help_panel=_METHOD,
    ),
]
NumFullLayersOption = Annotated[
    int | None,
    typer.Option("--num-full-layers", help="Layers from the bottom that keep everything.", rich_help_panel=_METHOD),
]
FullLayersOption = Annotated[
    str | None,
    typer.Option("--full-layers", help="Layers that keep everything, by index: 0,1,12.", rich_help_panel=_METHOD),
]
ScorerOption = Annotated[
    str | None, typer.Option("--scorer", help="How tokens are scored: snapkv, tova, ...", rich_help_panel=_METHOD)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other option of SparseKVConfig: --set num_recent_tokens=64 --set pooling=max.",
        rich_help_panel=_METHOD,
    ),
]

DtypeOption = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, float16, or auto: bfloat16 on a GPU, float32 on a CPU.")
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend", help="What reads prompts: a name from `hf-sparsekv doctor`. Default: the first there that can."
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
TpOption = Annotated[
    int, typer.Option("--tp", help="Processes that share one model; the others of the launch are replicas of it.")
]
ReplicasPerGpuOption = Annotated[
    int,
    typer.Option("--replicas-per-gpu", min=1, help="Processes of a launch that may share a GPU, for a small model."),
]
TrustRemoteCodeOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


def build_config(
    path: Path | None,
    preset: str | None,
    budget: str | None,
    num_full_layers: int | None,
    full_layers: str | None,
    scorer: str | None,
    settings: list[str] | None,
) -> "SparseKVConfig":
    """One configuration from a file and the options given beside it.

    Raises:
        ConfigError: an option is unknown or out of range.
        InputError: the file cannot be read.
    """
    from hf_sparsekv.config import SparseKVConfig

    base = {} if path is None else SparseKVConfig.from_json(read_text(path)).to_dict()
    return SparseKVConfig.from_dict(option_values(base, preset, budget, num_full_layers, full_layers, scorer, settings))


def option_values(
    base: Mapping[str, Any],
    preset: str | None,
    budget: str | None,
    num_full_layers: int | None,
    full_layers: str | None,
    scorer: str | None,
    settings: list[str] | None,
) -> dict[str, Any]:
    """Options of SparseKVConfig by name: those of `base`, and over them what the command line gives."""
    values = dict(base)
    if preset is not None:
        values = without_preset_options(values) | {"preset": preset}
    if budget is not None:
        values["budget"] = parse_budget(budget)
    if full_layers is not None:
        values["full_layers"] = [_number("--full-layers", part, int) for part in full_layers.split(",")]
        values.pop("num_full_layers", None)
    if num_full_layers is not None:
        values["num_full_layers"] = num_full_layers
        if full_layers is None:
            values.pop("full_layers", None)
    if scorer is not None:
        values["scorer"] = scorer
        values.pop("scorer_options", None)
    for setting in settings or []:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {shown(setting)}: give name=value")
        if name == "preset":
            values = without_preset_options(values)
        values[name] = _json_or_text(text)
    return values


def parse_budget(text: str) -> "Budget":
    """512 -> int, 0.1 -> float, "256,0.1" -> list."""
    parts = [_one_budget(part.strip()) for part in text.split(",")]
    return parts[0] if len(parts) == 1 else tuple(parts)


def read_text(path: Path) -> str:
    """The text of a file, or an error that says what is wrong with it."""
    try:
        return path.read_text(encoding="utf-8-sig")  # a byte order mark is no part of the text
    except FileNotFoundError as error:
        raise InputError(f"no such file: {path}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _one_budget(text: str) -> int | float:
    return _number("--budget", text, int) if text.lstrip("+-").isdigit() else _number("--budget", text, float)


def _number(option: str, text: str, kind: type[Number]) -> Number:
    try:
        return kind(text)
    except ValueError as error:
        hint = ": give tokens (512), a fraction of the prompt (0.1) or a list (256,512)" if option == "--budget" else ""
        raise ConfigError(f"{option}: {shown(text)} is not a number{hint}") from error


def _json_or_text(text: str) -> Any:
    """JSON, a float that JSON cannot write (nan, inf), or the text itself."""
    if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # an endless number and endless brackets are no JSON either
        return text
