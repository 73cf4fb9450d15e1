"""`hf-sparsekv doctor`: what this machine has, and what each op runs on."""

import json
import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_sparsekv import __version__
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf.compat import FIRST_UNTESTED_VERSION, MINIMUM_VERSION
from hf_sparsekv.models_store import builtin_path, is_fetched
from hf_sparsekv.ops import debug
from hf_sparsekv.ops.kernels import KERNELS, LIBRARY_VARIABLE, OFF, find_library, load
from hf_sparsekv.ops.library import SCHEMAS
from hf_sparsekv.ops.prefill import PREFILL
from hf_sparsekv.ops.prefill_choice import BACKEND_VARIABLE, choose, obstacles, prompt_problem
from hf_sparsekv.ops.prefill_table import BACKENDS, Backend

_OPTIONAL = ("flash-attn", "flash_attn_3", "flashinfer-python", "accelerate", "lm-eval", "triton")


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Tell what this machine has and which implementation each op uses."""
    facts = machine_facts()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console()
    for title in ("software", "hardware", "built-in model"):
        table = Table(title=title, show_header=False, title_justify="left")
        for name, value in facts[title].items():
            table.add_row(name, Text(str(value)))  # a folder may be called [bold]
        console.print(table)
    _print_attention(console, facts["attention"])
    table = Table(title="other ops", title_justify="left")
    table.add_column("op")
    for device in facts["ops"]:
        table.add_column(device)
    table.add_column("compiled kernel")
    for op, kernel in facts["kernels"].items():
        table.add_row(op, *[facts["ops"][device][op] for device in facts["ops"]], Text(kernel))
    console.print(table)


def machine_facts() -> dict[str, Any]:
    """JSON-able facts; see `doctor`."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ["cpu", *(["cuda"] if gpus else [])]
    ops = [op for op in SCHEMAS if op not in PREFILL]
    kernels, unusable = _find_kernels(), obstacles()
    return {
        "software": {
            "hf_sparsekv": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": f"{transformers.__version__} (supported: >={MINIMUM_VERSION},<{FIRST_UNTESTED_VERSION})",
            **{name: _installed(name) for name in _OPTIONAL},
        },
        "hardware": {
            "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "gpu": ", ".join(gpus) or "none that torch sees",
            "nvcc": shutil.which("nvcc") or "not on the PATH",
            "compiled kernels": kernels.state,
            LIBRARY_VARIABLE: os.environ.get(LIBRARY_VARIABLE) or "not set",
            debug.DEBUG_VARIABLE: "on: every launch is checked first" if debug.IS_ON else "off",
        },
        "built-in model": {
            "folder": str(builtin_path()),
            "state": "fetched" if is_fetched() else "not fetched: run `hf-sparsekv fetch`",
        },
        "attention": {
            BACKEND_VARIABLE: os.environ.get(BACKEND_VARIABLE) or "not set",
            "backends": {backend.name: _backend_facts(backend, unusable[backend.name]) for backend in BACKENDS},
            "chosen": {device: _chosen(device) for device in devices},
        },
        "ops": {device: {op: _implementation(op, device, kernels) for op in ops} for device in devices},
        "kernels": {op: _kernel(op, kernels) for op in ops},
    }


def _print_attention(console: Console, facts: dict[str, Any]) -> None:
    table = Table(
        title="prefill attention: the first that can", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.show_edge = table.pad_edge = False  # with the lines that the others have it is wider than 80 characters
    columns = ("here", "status", "lse", "dtypes", "head dims", "past")
    table.add_column("backend", no_wrap=True)
    for column in columns:
        width = len("(2026-11-30)") if column == "status" else None
        table.add_column(column, min_width=9 if column == "here" else None, width=width)
    for name, backend in facts["backends"].items():
        table.add_row(name, *[backend[column] for column in columns])
    console.print(table)
    for device, cases in facts["chosen"].items():
        for case, name in cases.items():
            console.print(f"{device}, {case}: [bold]{escape(name)}[/bold]", highlight=False)
    console.print(f"{BACKEND_VARIABLE}: {facts[BACKEND_VARIABLE]}", highlight=False, markup=False)


def _backend_facts(backend: Backend, obstacle: str | None) -> dict[str, Any]:
    """One row of the table of prefill backends, and whether it can be had here."""
    return {
        "title": backend.title,
        "package": backend.package,
        "here": obstacle or ("yes, by name" if backend.is_on_request else "yes"),
        "status": backend.status,
        "lse": backend.lse_text,
        "dtypes": backend.dtypes_text,
        "head dims": backend.dims_text,
        "packed": "yes" if backend.is_varlen else "one by one",
        "past": "yes" if backend.allows_past else "no",
    }


def _chosen(device: str) -> dict[str, str]:
    """Who takes what a model asks for, in the dtype that models run in on this device."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cases = {
        "whole prompts": prompt_problem(device, dtype, 128),
        "prompts after a past": prompt_problem(device, dtype, 128, is_whole=False),
        "with a mask": prompt_problem(device, dtype, 128, is_whole=False, has_mask=True),
    }
    chosen = {}
    for case, problem in cases.items():
        try:
            chosen[case] = choose(problem).name
        except ConfigError as error:  # what the environment asks for cannot be had: that is what a doctor is for
            chosen[case] = str(error)
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kernels:
    """What the ops find when they look for their compiled kernels."""

    path: Path | None
    state: str
    is_broken: bool = False


def _find_kernels() -> _Kernels:
    """Found and loaded as the ops do it, so that the two agree."""
    try:
        path = find_library()
        load()
    except ConfigError as error:  # every op with a kernel says the same: that is what a doctor is for
        return _Kernels(path=None, state=str(error), is_broken=True)
    if path is not None:
        return _Kernels(path=path, state=str(path))
    is_off = os.environ.get(LIBRARY_VARIABLE) == OFF
    reason = f"switched off by {LIBRARY_VARIABLE}" if is_off else "none (see kernels/README.md)"
    return _Kernels(path=None, state=f"{reason}: the PyTorch definitions run")


def _implementation(op: str, device: str, kernels: _Kernels) -> str:
    if device != "cuda" or op not in KERNELS:
        return "PyTorch definition"
    if kernels.is_broken:
        return "error, see compiled kernels"
    return "PyTorch definition" if kernels.path is None else "CUDA kernel (bf16, fp16)"


def _kernel(op: str, kernels: _Kernels) -> str:
    """Where the op's compiled kernel is."""
    return str(kernels.path or "not found") if op in KERNELS else "none is written"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
