"""Prefill attention with its LSE: the ops `attention` and `attention_varlen`, by the best backend at hand.

Which one takes a call is decided in `prefill_choice`. Whatever is used, the definition in `reference.attention` says
what is computed; only the LSE of a backend that hides it, which has to be named, is NaN (`prefill_choice.gives_lse`).

Shapes: B request, T query row, N key, H query head, K KV head, D head dim.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hf_sparsekv.errors import InputError
from hf_sparsekv.ops import reference
from hf_sparsekv.ops.prefill_backends import Packed
from hf_sparsekv.ops.prefill_choice import choose
from hf_sparsekv.ops.prefill_table import Problem


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """See `reference.attention`; without a mask, the best backend computes it.

    Raises:
        InputError: shapes or devices do not fit one another.
        ConfigError: see `prefill_choice.choose`.
    """
    num_rows, num_keys = q.shape[2], k.shape[2]
    backend = choose(_problem(q, k, v, is_causal, num_rows == num_keys, mask is not None, q.shape[0] == 1))
    if backend.is_definition:
        return reference.attention(q, k, v, scale, mask, is_causal)
    batch, num_heads, _, dim = q.shape
    counts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    packed = Packed(
        q=q.transpose(1, 2).flatten(0, 1),
        k=k.transpose(1, 2).flatten(0, 1),
        v=v.transpose(1, 2).flatten(0, 1),
        cu_seqlens_q=counts * num_rows,
        cu_seqlens_k=counts * num_keys,
        max_rows=num_rows,
        max_keys=num_keys,
        scale=scale,
        is_causal=is_causal,
    )
    output, lse = backend.run(packed)
    return (
        output.reshape(batch, num_rows, num_heads, dim).transpose(1, 2).contiguous(),
        lse.reshape(num_heads, batch, num_rows).transpose(0, 1).contiguous(),
    )


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """See `reference.attention_varlen`; the best backend computes it.

    `max_seqlen_q` and `max_seqlen_k` are the lengths of the longest request: backends size their launches by them.

    Raises:
        InputError: shapes, dtypes or devices do not fit one another.
        ConfigError: see `prefill_choice.choose`.
    """
    _check_bounds(q, cu_seqlens_q, cu_seqlens_k)
    # As many rows as keys in all, and no request with more rows than keys: no request has a past.
    is_whole = q.shape[0] == k.shape[0] and max_seqlen_q == max_seqlen_k
    backend = choose(_problem(q, k, v, is_causal, is_whole, False, cu_seqlens_q.shape[0] == 2))
    packed = Packed(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_rows=max_seqlen_q,
        max_keys=max_seqlen_k,
        scale=scale,
        is_causal=is_causal,
    )
    output, lse = backend.run(packed)
    return _laid_out_like(q, output), lse.contiguous()


PREFILL: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "attention": attention,
    "attention_varlen": attention_varlen,
}
"""Ops that are dispatched here, on every device."""


def _problem(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, is_whole: bool, has_mask: bool, is_single: bool
) -> Problem:
    """The facts about a call, dense or packed: heads are the second dimension in both."""
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    if k.shape != v.shape:
        raise InputError(f"k has shape {list(k.shape)}, v {list(v.shape)}: they must be equal")
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"q has head dimension {q.shape[-1]}, k {k.shape[-1]}: they must be equal")
    if num_kv_heads == 0 or num_heads % num_kv_heads != 0:
        raise InputError(f"q has {num_heads} heads, not a multiple of the {num_kv_heads} of k and v")
    if not q.device == k.device == v.device:
        raise InputError(f"q is on {q.device}, k on {k.device}, v on {v.device}: move them to one device")
    return Problem(
        device=q.device.type,
        compute_capability=_capability(q.device) if q.is_cuda else None,
        dtype=q.dtype if q.dtype == k.dtype == v.dtype else None,
        head_dim=q.shape[-1],
        is_causal=is_causal,
        is_whole=is_whole,
        has_mask=has_mask,
        is_empty=q.numel() == 0 or k.numel() == 0,
        is_single=is_single,
    )


@functools.cache
def _capability(device: torch.device) -> int:
    """Major number of a GPU's compute capability."""
    return torch.cuda.get_device_capability(device)[0]


def _check_bounds(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if bounds.dtype != torch.int32 or bounds.dim() != 1 or bounds.shape[0] < 1:
            raise InputError(f"{name} is {bounds.dtype} {list(bounds.shape)}: it must be int32 [B + 1]")
        if bounds.device != q.device:
            raise InputError(f"{name} is on {bounds.device}, q on {q.device}: move them to one device")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        lengths = cu_seqlens_q.shape[0], cu_seqlens_k.shape[0]
        raise InputError(f"cu_seqlens_q has {lengths[0]} entries, cu_seqlens_k {lengths[1]}: they must be equally many")


def _laid_out_like(q: Tensor, output: Tensor) -> Tensor:
    """The output with the strides that the op's fake promises: those of `torch.empty_like(q)`."""
    if q.is_contiguous() and output.is_contiguous():
        return output  # without asking, once a layer
    strides = torch.empty_like(q, device="meta").stride()
    return output if output.stride() == strides else torch.empty_like(q).copy_(output)
