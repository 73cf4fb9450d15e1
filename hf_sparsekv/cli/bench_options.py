"""Options of `hf-sparsekv bench`, and what their texts amount to."""

import os
from pathlib import Path
from typing import Annotated

import typer

from hf_sparsekv.bench.cases import DEFAULT_CYCLES, KINDS
from hf_sparsekv.bench.shapes import SHAPES
from hf_sparsekv.cli.engine_options import parse_size
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.errors import ConfigError, InputError

MAXIMUM = "max"
_LOAD = "Load"
_ENGINE = "Engine"

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help=f"A shape ({', '.join(SHAPES)}), the built-in alias, a folder or an id.")
]
DummyWeightsOption = Annotated[
    bool, typer.Option("--dummy-weights", help="Random weights in place of the model's own; shapes have no others.")
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option("--engine", help=f"{', '.join(KINDS)}; several: dense,sparse. Default: those two."),
]
InputLenOption = Annotated[
    int, typer.Option("--input-len", min=1, rich_help_panel=_LOAD, help="Tokens of each prompt.")
]
OutputLenOption = Annotated[
    int, typer.Option("--output-len", min=1, rich_help_panel=_LOAD, help="Tokens generated for each.")
]
PrefillOption = Annotated[
    str | None,
    typer.Option(
        "--prefill",
        rich_help_panel="Method",
        help="exact, or bounded: window layers select chunk by chunk (--set prefill_chunk_tokens=2048).",
    ),
]
ConcurrencyOption = Annotated[
    str,
    typer.Option(
        "--concurrency",
        rich_help_panel=_LOAD,
        help="Requests live at any time; max: as many as the memory admits; several: 10,20,max.",
    ),
]
SharedPrefixLenOption = Annotated[
    int,
    typer.Option(
        "--shared-prefix-len",
        min=0,
        rich_help_panel=_LOAD,
        help="Of --input-len, tokens in common at the beginning; our engine runs with a prefix cache and without.",
    ),
]
NumQuestionsOption = Annotated[
    int | None,
    typer.Option(
        "--num-questions",
        min=1,
        rich_help_panel=_LOAD,
        help="Requests in a row that share a prefix, and requests of a case. Default: all share one.",
    ),
]
NumRequestsOption = Annotated[
    int | None,
    typer.Option(
        "--num-requests",
        min=1,
        rich_help_panel=_LOAD,
        help=f"Requests of each case. Default: {DEFAULT_CYCLES} x concurrency.",
    ),
]
WarmupOption = Annotated[
    int | None,
    typer.Option(
        "--warmup", min=0, rich_help_panel=_LOAD, help="Uncounted requests before each case. Default: concurrency."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, rich_help_panel=_LOAD, help="Of prompts and dummy weights.")]
KvMemoriesOption = Annotated[
    str,
    typer.Option(
        "--kv-memory",
        rich_help_panel=_ENGINE,
        help="Cache size: 5GB (10^9), 5GiB (2^30), none (--memory-fraction decides); several: 5GB,none.",
    ),
]
MemoryFractionOption = Annotated[
    float,
    typer.Option("--memory-fraction", rich_help_panel=_ENGINE, help="Part of the GPU to fill, model included."),
]
NoPrefixCachingOption = Annotated[
    bool, typer.Option("--no-prefix-caching", rich_help_panel=_ENGINE, help="No prefix cache.")
]
NoCompileOption = Annotated[bool, typer.Option("--no-compile", rich_help_panel=_ENGINE, help="No torch.compile.")]
NoCudaGraphsOption = Annotated[bool, typer.Option("--no-cuda-graphs", rich_help_panel=_ENGINE, help="No CUDA graphs.")]
ProfileStepsOption = Annotated[
    int,
    typer.Option("--profile-steps", min=0, help="Decode steps to profile after each case, for the GPU's busy share."),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write every figure to this file, after each case; - prints them.")
]


def engine_config(
    memory_fraction: float,
    max_batch_tokens: int,
    max_num_seqs: int,
    backend: str | None,
    no_compile: bool,
    no_cuda_graphs: bool,
) -> EngineConfig:
    """The engine's options; memory and length are set for each case.

    Raises:
        ConfigError: a number out of range.
    """
    return EngineConfig(
        memory_fraction=memory_fraction,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        compile=False if no_compile else None,
        cuda_graphs=False if no_cuda_graphs else None,
        backend=backend,
    )


def parse_kinds(texts: list[str] | None) -> tuple[str, ...]:
    """The engines of "dense,sparse", none of them twice; dense and sparse if there are none."""
    parts = [part.strip() for text in texts or ("dense", "sparse") for part in text.split(",")]
    return tuple(dict.fromkeys(parts))


def parse_counts(text: str) -> tuple[int | None, ...]:
    """The numbers of "10,20,max", where max is None; none of them twice.

    Raises:
        ConfigError: a part is no number.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() and part.lower() != MAXIMUM]
    if wrong:
        raise ConfigError(f"--concurrency: {wrong[0]!r} is not a number of requests: give 10, or several: 10,20,max")
    return tuple(dict.fromkeys(None if part.lower() == MAXIMUM else int(part) for part in parts))


def parse_sizes(text: str) -> tuple[int | None, ...]:
    """The bytes of "5GB,none", where none is None; none of them twice.

    Raises:
        ConfigError: a part is no size.
    """
    parts = [part.strip() for part in text.split(",")]
    sizes = [None if part.lower() == "none" else parse_size("--kv-memory", part) for part in parts]
    return tuple(dict.fromkeys(sizes))


def check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        InputError: its folder is not there, or not ours to write in.
    """
    if path is None or str(path) == "-":
        return
    folder = path.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise InputError(f"cannot write --json {path}: give a file in a folder that exists and can be written")
