"""`hf-sparsekv plan`: which layer keeps what, and the bytes, before anything is loaded; or measured on a text.

What brings torch is imported inside the command: `--help` does without those seconds.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hf_sparsekv.cli.generate import max_tokens_of
from hf_sparsekv.cli.interrupt import importing
from hf_sparsekv.cli.options import (
    DEFAULT_MODEL,
    BudgetOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    FullLayersOption,
    ModelOption,
    NumFullLayersOption,
    PresetOption,
    ScorerOption,
    SetOption,
    TrustRemoteCodeOption,
    build_config,
    read_text,
)
from hf_sparsekv.errors import ConfigError, InputError

if TYPE_CHECKING:
    from hf_sparsekv.cli.loading import ModelSource
    from hf_sparsekv.config import SparseKVConfig

MAX_LENGTH = 2**31 - 1
_CALIBRATION = "Calibration"

CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        help="A text: measure on it which layers need what, and plan for the bytes that --budget (with its full "
        "layers) or --compression gives at --length tokens.",
        rich_help_panel=_CALIBRATION,
    ),
]
CompressionOption = Annotated[
    float | None,
    typer.Option("--compression", help="How many times smaller than dense.", rich_help_panel=_CALIBRATION),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="The measured plan, for --set budget_shape=calibrated --set plan=FILE.",
        rich_help_panel=_CALIBRATION,
    ),
]
PiecesOption = Annotated[
    int, typer.Option("--pieces", min=1, help="Pieces of the text to measure.", rich_help_panel=_CALIBRATION)
]


def plan(
    length: Annotated[int, typer.Option("--length", "-l", min=1, max=MAX_LENGTH, help="Tokens of the prompt.")] = 4096,
    model: ModelOption = DEFAULT_MODEL,
    config: ConfigOption = None,
    preset: PresetOption = None,
    budget: BudgetOption = None,
    num_full_layers: NumFullLayersOption = None,
    full_layers: FullLayersOption = None,
    scorer: ScorerOption = None,
    set_: SetOption = None,
    calibrate: CalibrateOption = None,
    compression: CompressionOption = None,
    output: OutputOption = None,
    pieces: PiecesOption = 4,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan and the configuration as JSON.")] = False,
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Show the layer plan of a model: kind, tokens and bytes per layer, and the total against dense."""
    with importing():
        from hf_sparsekv.cli.loading import dtype_name, open_config, open_model, pick_device, pick_dtype
        from hf_sparsekv.hf.models import model_shape
        from hf_sparsekv.plan import LayerPlan

    console = Console(stderr=True)
    kind = pick_dtype(dtype, pick_device(device))
    text = _calibration_text(calibrate, compression, output, budget)
    method = build_config(config, preset, budget, num_full_layers, full_layers, scorer, set_)
    lines: list[str] = []
    if text is None or output is None:
        shown_config = open_config(model, trust_remote_code=trust_remote_code, console=console)
        _warn_of_length(length, shown_config, console)
    else:
        source = open_model(model, trust_remote_code=trust_remote_code, console=console)
        shown_config = source.config
        LayerPlan.build(method, model_shape(shown_config))
        _check_length(length, shown_config)
        method, lines = _measured(text, source, method, length, compression, pieces, kind, device, output, console)
    layers = LayerPlan.build(method, model_shape(shown_config))
    if as_json:
        facts = {"model": model, "dtype": dtype_name(kind), "config": method.to_dict()}
        typer.echo(json.dumps(facts | json.loads(layers.to_json()), indent=2))
        return
    budget_text = "per layer" if isinstance(method.budget, tuple) else f"{method.budget}"
    typer.echo(
        f"model {model}, dtype {dtype_name(kind)}{' (as generate would load it here)' * (dtype == 'auto')}, "
        f"scorer {method.scorer_object.name}, budget {budget_text}"
    )
    typer.echo("\n".join([layers.describe(length, element_bytes=kind.itemsize), *lines]))


def _calibration_text(
    path: Path | None, compression: float | None, output: Path | None, budget: str | None
) -> str | None:
    """The text to measure on, if there is one; mistakes show before a model is opened."""
    if path is None:
        for name, value in (("--compression", compression), ("--output", output)):
            if value is not None:
                raise ConfigError(f"{name} has no effect without --calibrate: give a text to measure on")
        return None
    if output is None:
        raise ConfigError("--calibrate needs --output, a file for the plan")
    if compression is not None and budget is not None:
        raise ConfigError("give --budget or --compression, not both: each says how many bytes there are")
    if compression is not None and not 1.0 < compression <= MAX_LENGTH:
        raise ConfigError(f"--compression must be more than 1: got {compression}")
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise InputError(f"cannot write {output}: give a file in a folder that is there and may be written to")
    text = read_text(path)
    if not text.strip():
        raise InputError(f"{path} is empty: measuring needs a text")
    return text


def _warn_of_length(length: int, config: Any, console: Console) -> None:
    """Planning for more than a model was made for is allowed."""
    limit = max_tokens_of(config)
    if limit is not None and length > limit:
        reason = f"--length {length:,} is more than the {limit:,} positions that the model was made for"
        console.print(f"[yellow]warning:[/] {reason}", highlight=False, soft_wrap=True)


def _check_length(length: int, config: Any) -> None:
    """Refuse to read more than a model was made for."""
    with importing():
        from hf_sparsekv.profile import DEFAULT_HELD_OUT
    limit = max_tokens_of(config)
    if limit is not None and length + DEFAULT_HELD_OUT > limit:
        raise ConfigError(
            f"--length {length:,} and the {DEFAULT_HELD_OUT} tokens that follow it are more than the {limit:,} "
            f"positions that the model was made for: measure with --length {max(1, limit - DEFAULT_HELD_OUT)} or less"
        )


def _measured(
    text: str,
    source: "ModelSource",
    method: "SparseKVConfig",
    length: int,
    compression: float | None,
    pieces: int,
    dtype: Any,
    device: str,
    output: Path,
    console: Console,
) -> tuple["SparseKVConfig", list[str]]:
    """Measure, plan, and write the plan; returns the configuration that uses it, and what to say below its table."""
    with importing():
        import torch

        from hf_sparsekv import profile as room
        from hf_sparsekv.cli.loading import dtype_name, load_weights
        from hf_sparsekv.hf.models import model_shape, text_config
        from hf_sparsekv.plan import LayerPlan

    shape, rows = model_shape(source.config), room.DEFAULT_HELD_OUT
    uniform = LayerPlan.build(method, shape)
    target = uniform.total_bytes(length, element_bytes=dtype.itemsize)
    unit = "fraction" if compression is not None or isinstance(method.budget, float) else "tokens"
    if compression is not None:
        target = int(uniform.dense_bytes(length, element_bytes=dtype.itemsize) / compression)
    least = room.ladder_of(None, length, method)[0]
    room.check_target(target, shape, length=length, least=least, element_bytes=dtype.itemsize)
    vocab_size = text_config(source.config).vocab_size
    texts = room.prompts_of(
        text, tokenizer=source.tokenizer, vocab_size=vocab_size, length=length + rows, max_texts=pieces
    )
    recited = room.recall_texts(texts, num_held_out=rows, lead=method.observation_window)
    network = load_weights(source, dtype=dtype_name(dtype), device=device, console=console)
    both = torch.cat([texts, recited])
    profile = room.measure(network, both, config=method, num_held_out=rows, max_texts=len(both))
    found = room.make_plan(profile, target_bytes=target, element_bytes=dtype.itemsize, unit=unit)
    try:
        output.write_text(found.to_json(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}") from error
    measured = found.measured
    return method.with_(budget_shape="calibrated", plan=found, pyramid_beta=None), [
        f"measured on {len(texts)} piece{'s' * (len(texts) > 1)} of {length:,} tokens, each continued and recited for "
        f"{rows} rows: summed "
        f"{measured['objective']} {measured['summed_error']:.3f} in {measured['cache_bytes']:,} of {target:,} bytes",
        f"written to {output}; use it with --set budget_shape=calibrated --set plan={output}, and with the scorer "
        f"that it was measured with, {method.scorer_object.name}",
    ]
