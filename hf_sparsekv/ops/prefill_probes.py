"""Whether a prefill backend can be had on this machine: one probe each, which gives the reason when it cannot.

What a backend can do once it is there is written in `prefill_table`. Operators of torch are probed by their schema
and, where a schema cannot tell, by a tiny problem; never by torch's version.
"""

import functools
import importlib
import re
from types import ModuleType
from typing import Any

import torch

from hf_sparsekv.ops import reference

FLASH_ATTN_3 = "flash_attn_interface"
FLASH_ATTN_2 = "flash_attn"
VARLEN_FUNCTION = "flash_attn_varlen_func"
MINIMUM_FLASH_ATTN_2 = (2, 8)
"""The oldest flash-attn whose packed LSE is [H, T] in every case; it also aligns the causal mask bottom-right."""
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
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MINIMUM_FLASH_ATTN_2:
        needed = ".".join(str(number) for number in MINIMUM_FLASH_ATTN_2)
        return f"flash-attn {found} is too old: install flash-attn>={needed}"
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
    except (ImportError, OSError) as error:
        return None, f"cannot be imported: {error}"
    if not hasattr(module, VARLEN_FUNCTION):
        return None, f"{name} has no {VARLEN_FUNCTION}"
    return module, None


def varlen_function(name: str) -> Any:
    """`flash_attn_varlen_func` of a module whose probe found nothing missing."""
    module, reason = import_module(name)
    assert module is not None, reason
    return getattr(module, VARLEN_FUNCTION)


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
