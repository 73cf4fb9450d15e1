"""Command-line options of an engine and of sampling, and the objects they amount to."""

import re
from typing import Annotated, Any

import typer

from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.errors import ConfigError

_ENGINE, _GENERATION = "Engine", "Generation"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

KvMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        help="Memory of the cache: 5GB (10^9), 5GiB (2^30), bytes. Default: what the GPU has left, 1GiB on a CPU.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqsOption = Annotated[
    int, typer.Option("--max-num-seqs", min=1, help="Requests that run at once.", rich_help_panel=_ENGINE)
]
MaxBatchTokensOption = Annotated[
    int, typer.Option("--max-batch-tokens", min=1, help="Tokens of one forward pass.", rich_help_panel=_ENGINE)
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=1,
        help="Longest request, prompt and output. Default: what the model was made for.",
        rich_help_panel=_ENGINE,
    ),
]
CompileOption = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the layers (on a GPU).", rich_help_panel=_ENGINE)
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, help="Output tokens at most.", rich_help_panel=_GENERATION)
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 = greedy.", rich_help_panel=_GENERATION)
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Sample from this many tokens.", rich_help_panel=_GENERATION)
]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Sample from this probability mass.", rich_help_panel=_GENERATION)
]
MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", help="Sample from tokens this likely, against the likeliest.", rich_help_panel=_GENERATION),
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option("--repetition-penalty", help="1 = none.", rich_help_panel=_GENERATION)
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Default: derived from each id.", rich_help_panel=_GENERATION)
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Generate up to --max-tokens always.", rich_help_panel=_GENERATION)
]


def parse_size(option: str, text: str) -> int:
    """Bytes of "5GB", "5GiB", "1.5g" or "4096"; without the i, units are powers of 1000.

    Raises:
        ConfigError: no such size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{option}: {text!r} is no size: give one such as 5GB, 5GiB or 800MB")
    num_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()])
    if num_bytes < 1:
        raise ConfigError(f"{option}: {text!r} is no memory at all: give a size such as 5GB")
    return num_bytes


def build_engine_config(
    kv_memory: str | None,
    max_num_seqs: int,
    max_batch_tokens: int,
    max_model_len: int | None,
    backend: str | None,
    *,
    use_compile: bool,
) -> EngineConfig:
    """The engine's configuration.

    Raises:
        ConfigError: an option is out of range.
    """
    return EngineConfig(
        kv_memory_bytes=None if kv_memory is None else parse_size("--kv-memory", kv_memory),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_model_len=max_model_len,
        compile=None if use_compile else False,
        backend=backend,
    )


def sampling_fields(temperature: float, **others: Any) -> dict[str, Any]:
    """Fields of SamplingParams; those that were not given are left out, temperature 0 is greedy."""
    values = {name: value for name, value in others.items() if value is not None}
    return values | ({"do_sample": True, "temperature": temperature} if temperature > 0 else {})
