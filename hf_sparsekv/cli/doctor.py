"""`hf-sparsekv doctor`: what this machine has, and what each op runs on."""

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from hf_sparsekv import __version__
from hf_sparsekv.hf.compat import FIRST_UNTESTED_VERSION, MINIMUM_VERSION
from hf_sparsekv.models_store import builtin_path, is_fetched
from hf_sparsekv.ops.kernels import KERNELS, find_library
from hf_sparsekv.ops.library import SCHEMAS

_OPTIONAL = ("flash-attn", "flash_attn_3", "accelerate", "lm-eval", "triton")


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
            table.add_row(name, str(value))
        console.print(table)
    table = Table(title="ops", title_justify="left")
    table.add_column("op")
    for device in facts["ops"]:
        table.add_column(device)
    for op in SCHEMAS:
        table.add_row(op, *[facts["ops"][device][op] for device in facts["ops"]])
    console.print(table)


def machine_facts() -> dict[str, Any]:
    """JSON-able facts; see `doctor`."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ["cpu", *(["cuda"] if gpus else [])]
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
            "compiled kernels": str(find_library() or "none: the PyTorch definitions run (see kernels/README.md)"),
        },
        "built-in model": {
            "folder": str(builtin_path()),
            "state": "fetched" if is_fetched() else "not fetched: run `hf-sparsekv fetch`",
        },
        "ops": {device: {op: _implementation(op, device) for op in SCHEMAS} for device in devices},
    }


def _implementation(op: str, device: str) -> str:
    has_kernel = device == "cuda" and op in KERNELS and find_library() is not None
    return "CUDA kernel (bf16, fp16)" if has_kernel else "PyTorch definition"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
