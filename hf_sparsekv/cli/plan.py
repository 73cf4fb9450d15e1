"""`hf-sparsekv plan`: which layer keeps what, and the bytes, before anything is loaded."""

from typing import Annotated

import typer
from rich.console import Console

from hf_sparsekv.cli.loading import open_model
from hf_sparsekv.cli.options import (
    DEFAULT_MODEL,
    BudgetOption,
    ConfigOption,
    FullLayersOption,
    ModelOption,
    NumFullLayersOption,
    ScorerOption,
    SetOption,
    build_config,
)
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.plan import LayerPlan

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan(
    length: Annotated[int, typer.Option("--length", "-l", min=1, help="Tokens of the prompt.")] = 4096,
    model: ModelOption = DEFAULT_MODEL,
    config: ConfigOption = None,
    budget: BudgetOption = None,
    num_full_layers: NumFullLayersOption = None,
    full_layers: FullLayersOption = None,
    scorer: ScorerOption = None,
    set_: SetOption = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan and the configuration as JSON.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's code.")] = False,
) -> None:
    """Show the layer plan of a model: kind, tokens and bytes per layer, and the total against dense."""
    if dtype not in _ELEMENT_BYTES:
        raise ConfigError(f"unknown dtype {dtype!r}: choose one of {', '.join(_ELEMENT_BYTES)}")
    method = build_config(config, budget, num_full_layers, full_layers, scorer, set_)
    source = open_model(model, trust_remote_code=trust_remote_code, console=Console(stderr=True))
    layers = LayerPlan.build(method, model_shape(source.config))
    typer.echo(layers.to_json() if as_json else layers.describe(length, element_bytes=_ELEMENT_BYTES[dtype]))
