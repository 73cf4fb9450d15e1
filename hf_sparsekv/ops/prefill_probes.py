"""Whether a prefill backend can be had on this machine: one probe each, which gives the reason when it cannot.

What a backend can do once it is there is written in `prefill_table`. Operators of torch are probed by their schema
and, where a schema cannot tell, by a tiny problem; never by torch's version.
"""

import functools
import importlib
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hf_sparsekv.ops import reference

FLASH_ATTN_3 = "flash_attn_interface"
FLASH_ATTN_2 = "flash_attn"
FLASHINFER = "flashinfer"
FUNCTIONS = {
    FLASH_ATTN_3: "flash_attn_varlen_func",
    FLASH_ATTN_2: "flash_attn_varlen_func",
    FLASHINFER: "single_prefill_with_kv_cache",
}
"""What is called of each module."""
MINIMUM_FLASH_ATTN_2 = (2, 8)
"""The oldest flash-attn whose packed LSE is [H, T] in every case; it also aligns the causal mask bottom-right."""
KNOWN_FLASHINFER = ((0, 6), (0, 8))
"""From, and below: the versions of FlashInfer whose function is known to take our arguments."""
NVCC_FOLDERS = ("CUDA_HOME", "CUDA_PATH")
"""Variables that name the CUDA toolkit, in the order in which FlashInfer asks for them."""
LSE_NAMES = ("softmax_logsumexp", "logsumexp")


def flash_attn_3_missing() -> str | None:
    """Why FlashAttention-3 cannot be called, or None."""
    return import_module(FLASH_ATTN_3)[1]


def flash_attn_2_missing() -> str | None:
    """Why FlashAttention-2, the package, cannot be called, or None."""
    module, reason = import_module(FLASH_ATTN_2)
    if module is None:
        return reason
    found = str(getattr(module, "__version__", "unknown"))
    if (_numbers(found) or (0, 0)) < MINIMUM_FLASH_ATTN_2:
        return f"flash-attn {found} is too old: install flash-attn>={_dotted(MINIMUM_FLASH_ATTN_2)}"
    return None


def flashinfer_missing() -> str | None:
    """Why FlashInfer cannot be called, or None.

    It compiles its kernels when they are first called, so what that takes is part of it.
    """
    module, reason = import_module(FLASHINFER)
    if module is None:
        return reason
    found = str(getattr(module, "__version__", "unknown"))
    oldest, beyond = KNOWN_FLASHINFER
    if not oldest <= (_numbers(found) or (0, 0)) < beyond:
        known = f">={_dotted(oldest)},<{_dotted(beyond)}"
        return f"flashinfer-python {found} is not a version that is known: install flashinfer-python{known}"
    if find_spec("flashinfer_jit_cache") is not None:
        return None
    missing = [name for name, path in (("nvcc", _nvcc()), ("ninja", shutil.which("ninja"))) if path is None]
    if missing:
        return f"FlashInfer compiles its kernels and finds no {missing[0]}: put it on the PATH"
    return None


@functools.cache
def cudnn_missing() -> str | None:
    """Why cuDNN's attention cannot be called, or None."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if not torch.backends.cudnn.is_available():
        return "torch finds no cuDNN"
    positional = "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask"
    return _operator_missing("_scaled_dot_product_cudnn_attention", positional)


@functools.cache
def torch_flash_missing() -> str | None:
    """Why torch's own FlashAttention-2 cannot be called, or None."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if not torch.backends.cuda.is_flash_attention_available():
        return "torch was built without FlashAttention"
    positional = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    return _operator_missing("_flash_attention_forward", positional)


@functools.cache
def torch_cpu_missing() -> str | None:
    """Why torch's flash attention for the CPU cannot be used, or None."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    reason = _operator_missing(name, "query key value dropout_p is_causal")
    if reason is not None:
        return reason
    # No schema says whether query heads may share KV heads, nor what the LSE is the logarithm of. The answer is
    # remembered, so it must not depend on defaults and autocasts that happen to be in force at the first call.
    with torch.autocast("cpu", enabled=False):
        q = torch.linspace(-1.0, 1.0, 4 * 3 * 32, dtype=torch.float32, device="cpu").reshape(1, 4, 3, 32)
        k = q[:, ::2].flip(-1).contiguous()
        output, lse = getattr(torch.ops.aten, name)(q, k, k, 0.0, True, scale=0.5)
        expected, expected_lse = reference.attention(q, k, k, 0.5, None, True)
    is_right = torch.allclose(output, expected, atol=1e-5) and torch.allclose(lse, expected_lse, atol=1e-5)
    return None if is_right else f"torch {torch.__version__} does not group the heads in aten::{name}"


def nothing_missing() -> None:
    """The definition is always there."""
    return


@functools.cache
def import_module(name: str) -> tuple[ModuleType | None, str | None]:
    """The module and None, or None and why it is of no use.

    An extension built for another torch fails while it is imported: that is a reason too, not an error.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return None, "not installed" if error.name == name else f"cannot be imported: {error}"
    except (ImportError, OSError, RuntimeError) as error:  # FlashInfer compares the versions of its parts
        return None, f"cannot be imported: {error}"
    if not hasattr(module, FUNCTIONS[name]):
        return None, f"{name} has no {FUNCTIONS[name]}"
    return module, None


def attention_function(name: str) -> Any:
    """What is called of a module whose probe found nothing missing."""
    module, reason = import_module(name)
    assert module is not None, reason
    return getattr(module, FUNCTIONS[name])


def _numbers(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(number) for number in version)


def _nvcc() -> str | None:
    """The CUDA compiler that FlashInfer would call: it asks the variables first, and nobody else if one is set."""
    for variable in NVCC_FOLDERS:
        if (folder := os.environ.get(variable)) is not None:
            return shutil.which("nvcc", path=str(Path(folder, "bin")))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _operator_missing(name: str, positional: str) -> str | None:
    """Whether aten has the operator with the arguments and the results that we call it by."""
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        return f"torch {torch.__version__} has no aten::{name}"
    schema = operator.default._schema
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    keywords = [argument.name for argument in schema.arguments if argument.kwarg_only]
    is_known = names == positional.split() and "scale" in keywords and schema.returns[1].name in LSE_NAMES
    return None if is_known else f"torch {torch.__version__} changed the arguments of aten::{name}"
