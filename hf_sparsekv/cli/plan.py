"""`hf-sparsekv plan`: which layer keeps what, and the bytes, before anything is loaded.

What brings torch is imported inside the command: `--help` does without those seconds.
"""

import json
from typing import Annotated

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
    ScorerOption,
    SetOption,
    TrustRemoteCodeOption,
    build_config,
)

MAX_LENGTH = 2**31 - 1


def plan(
    length: Annotated[int, typer.Option("--length", "-l", min=1, max=MAX_LENGTH, help="Tokens of the prompt.")] = 4096,
    model: ModelOption = DEFAULT_MODEL,
    config: ConfigOption = None,
    budget: BudgetOption = None,
    num_full_layers: NumFullLayersOption = None,
    full_layers: FullLayersOption = None,
    scorer: ScorerOption = None,
    set_: SetOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan and the configuration as JSON.")] = False,
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Show the layer plan of a model: kind, tokens and bytes per layer, and the total against dense."""
    with importing():
        from hf_sparsekv.cli.loading import dtype_name, open_model, pick_device, pick_dtype
        from hf_sparsekv.hf.models import model_shape
        from hf_sparsekv.plan import LayerPlan

    console = Console(stderr=True)
    kind = pick_dtype(dtype, pick_device(device))
    method = build_config(config, budget, num_full_layers, full_layers, scorer, set_)
    source = open_model(model, trust_remote_code=trust_remote_code, console=console)
    layers = LayerPlan.build(method, model_shape(source.config))
    limit = max_tokens_of(source.config)
    if limit is not None and length > limit:
        console.print(
            f"[yellow]warning:[/] --length {length:,} is more than the {limit:,} positions that the model was made for",
            highlight=False,
            soft_wrap=True,
        )
    if as_json:
        facts = {"model": model, "dtype": dtype_name(kind), "config": method.to_dict()}
        typer.echo(json.dumps(facts | json.loads(layers.to_json()), indent=2))
        return
    budget_text = "per layer" if isinstance(method.budget, tuple) else f"{method.budget}"
    typer.echo(
        f"model {model}, dtype {dtype_name(kind)}{' (as generate would load it here)' * (dtype == 'auto')}, "
        f"scorer {method.scorer_object.name}, budget {budget_text}"
    )
    typer.echo(layers.describe(length, element_bytes=kind.itemsize))
