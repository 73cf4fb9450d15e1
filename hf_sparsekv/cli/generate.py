"""`hf-sparsekv generate`: one prompt, the text as it comes, and what the cache held.

What brings torch is imported inside the command: `--help` does without those seconds.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_sparsekv.cli.interrupt import importing
from hf_sparsekv.cli.options import (
    DEFAULT_MODEL,
    BackendOption,
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

_GENERATION = "Generation"
MAX_SEED = 2**63 - 1
TEMPERATURES = (0.001, 100.0)
"""Below, logits over the temperature are no numbers in half precision; above, every token is as likely."""

TemperatureOption = Annotated[
    float, typer.Option(min=0.0, rich_help_panel=_GENERATION, help="0 = greedy, otherwise sampling.")
]
SeedOption = Annotated[
    int, typer.Option(min=0, max=MAX_SEED, rich_help_panel=_GENERATION, help="Seed of the sampling.")
]
CudaGraphsOption = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        rich_help_panel=_GENERATION,
        help="Replay decode steps as CUDA graphs. Default: on a GPU, where that is possible and pays.",
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        rich_help_panel=_GENERATION,
        help="Let CUDA graphs hold compiled layers: steps are faster, the start takes some tens of seconds longer.",
    ),
]


def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The question or instruction.")] = "",
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A document that goes before the prompt.")] = None,
    model: ModelOption = DEFAULT_MODEL,
    config: ConfigOption = None,
    preset: PresetOption = None,
    budget: BudgetOption = None,
    num_full_layers: NumFullLayersOption = None,
    full_layers: FullLayersOption = None,
    scorer: ScorerOption = None,
    set_: SetOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, rich_help_panel=_GENERATION, help="Tokens at most.")
    ] = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", rich_help_panel=_GENERATION, help="Use the model's chat template.")
    ] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Answer with the dense cache too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of text.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = None,
    cuda_graphs: CudaGraphsOption = None,
    use_compile: CompileOption = False,
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Generate text with a sparse KV cache: stream it, then report what the cache held."""
    check_temperature(temperature)
    with importing():
        from hf_sparsekv.cli.loading import check_backend, load_weights, open_model
        from hf_sparsekv.cli.session import answer_each, comparison_table, encode_prompt, report_lines
        from hf_sparsekv.hf.graph_choice import GraphWish
        from hf_sparsekv.hf.models import model_shape
        from hf_sparsekv.plan import LayerPlan

    console = Console(stderr=True)
    wish = GraphWish(cuda_graphs, use_compile)
    method = build_config(config, preset, budget, num_full_layers, full_layers, scorer, set_)
    document = None if file is None else read_text(file)
    source = open_model(model, trust_remote_code=trust_remote_code, console=console)
    ids = encode_prompt(source.tokenizer, prompt, document, use_chat=chat)
    LayerPlan.build(method, model_shape(source.config))
    check_fits(source.config, ids.shape[1], max_new_tokens)
    check_backend(backend, source.config, dtype=dtype, device=device, is_whole=method.chunk_tokens is None)
    network = load_weights(source, dtype=dtype, device=device, console=console)
    options = generation_options(source.tokenizer.pad_token_id, network, max_new_tokens, temperature)
    options |= {"backend": backend, "wish": wish, "seed": seed, "with_dense": compare, "is_silent": as_json or compare}
    answers = answer_each(network, source.tokenizer, ids, method, console, **options)
    if as_json:
        runs = [answer.as_dict() for answer in answers]
        typer.echo(json.dumps({"model": model, "prompt_tokens": ids.shape[1], "runs": runs}, indent=2))
        return
    if compare:
        Console().print(comparison_table(answers))
    report = answers[-1].report
    assert report is not None
    console.print(report_lines(report), highlight=False, soft_wrap=True)


def max_tokens_of(config: Any) -> int | None:
    """Positions that a model was made for, if its configuration says."""
    limit: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit


def check_fits(config: Any, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a prompt that the model cannot take, before its weights are loaded."""
    limit = max_tokens_of(config)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise InputError(
            f"the prompt has {prompt_tokens:,} tokens and --max-new-tokens is {max_new_tokens:,}, but the model takes "
            f"{limit:,} in all: shorten the prompt or the file, or lower --max-new-tokens"
        )


def check_temperature(temperature: float) -> None:
    """Refuse what only looks like a temperature, before anything is loaded."""
    low, high = TEMPERATURES
    if temperature != 0 and not low <= temperature <= high:
        raise ConfigError(f"--temperature must be 0 (greedy) or from {low:g} to {high:g}: got {temperature:g}")


def generation_options(pad_token_id: int | None, model: Any, max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """Arguments of `model.generate` for one prompt."""
    eos = model.generation_config.eos_token_id
    if pad_token_id is None:
        pad_token_id = eos[0] if isinstance(eos, list) else eos
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "pad_token_id": pad_token_id}
    if temperature == 0:
        return {**options, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {**options, "do_sample": True, "temperature": temperature}
