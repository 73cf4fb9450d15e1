"""The mask function behind the name "sparsekv", and the 4D masks of the dense model, built only where needed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask


def sparsekv_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask handed to the attention function.

    Plain causal attention needs no [T, N] mask: the 2D padding mask bool [B, N] goes through, or None. Everything
    else (packed sequences, sliding windows, static caches) gets what sdpa would get.
    """
    is_plain = (
        mask_function is causal_mask_function
        and local_size is None
        and allow_is_causal_skip
        and isinstance(q_offset, int)
        and isinstance(kv_offset, int)
        and kv_offset == 0
        and kv_length == q_offset + q_length
        and (attention_mask is None or attention_mask.shape[-1] == kv_length)
    )
    if is_plain:
        # A view of our own: `dense_mask` remembers on it what it built for this forward pass.
        return None if attention_mask is None else attention_mask.view_as(attention_mask)
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]  # a tensor for static caches
        kv_offset=kv_offset,  # type: ignore[arg-type]
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def step_mask(device: torch.device) -> Tensor:
    """The mask of a forward pass whose attention is a `Step` that the thread has running, see `hf.paged`.

    A mask of four dimensions goes through transformers untouched, and no other one has no columns. A compiled layer
    sees its shape, which is the same in every step.
    """
    return torch.zeros(1, 1, 1, 0, dtype=torch.bool, device=device)


def is_step_mask(mask: Tensor | None) -> bool:
    """Whether a mask is what `step_mask` makes."""
    return mask is not None and mask.dim() == 4 and mask.shape[3] == 0


def dense_mask(mask: Tensor | None, query: Tensor, num_columns: int, *, allow_none: bool) -> Tensor | None:
    """The mask that transformers' own sdpa or eager attention would get for a plain causal forward pass.

    Args:
        mask: bool [B, N] as `sparsekv_mask` gave it, or a finished 4D mask, or None.
        query: [B, H, T, D], the last T columns.
        num_columns: N.
        allow_none: leave the mask out where causality alone decides (T is 1 or N, nothing is padding), as sdpa does.
    Returns:
        bool [B, 1, T, N], or None.
    """
    if mask is not None and mask.dim() == 4:
        return mask
    num_rows = query.shape[2]
    if mask is None and allow_none and num_rows in (1, num_columns):
        return None
    key = (num_rows, num_columns, allow_none)
    remembered: dict[tuple[int, int, bool], Tensor | None] = getattr(mask, "_sparsekv_built", {})
    if key not in remembered:
        remembered[key] = sdpa_mask(
            batch_size=query.shape[0],
            q_length=num_rows,
            kv_length=num_columns,
            q_offset=num_columns - num_rows,
            attention_mask=mask,
            allow_is_causal_skip=allow_none,
            device=query.device,
        )
        if mask is not None:  # the same for every layer of this forward pass, and gone with it
            mask._sparsekv_built = remembered  # type: ignore[attr-defined]
    return remembered[key]
