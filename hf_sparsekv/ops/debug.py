"""What only the device knows, checked before it is launched on: table entries, lengths, slots. Off by default.

With HF_SPARSEKV_DEBUG=1 every op that a compiled kernel can take over reads these values first, waiting for the
device, and refuses with an InputError what would make a kernel read or write outside its tensors. The variable is
read once, when the ops are registered: without it nothing of this runs. Launches that a CUDA graph captures cannot
wait and go unchecked.

Shapes: B request, K KV head, P page, S slots per page, M pages in a block table, C slots per request.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv.errors import InputError

DEBUG_VARIABLE = "HF_SPARSEKV_DEBUG"
IS_ON = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def guarded(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of an op; in debug mode behind its check."""
    return checked(name, implementation) if IS_ON and name in CHECKS else implementation


def checked(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation behind the check of the op, whose argument names it must use."""
    check, signature = CHECKS[name], inspect.signature(implementation)

    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            check(**given.arguments)
        return implementation(*args, **kwargs)

    return run


def check_stored(k_pool: Tensor, lengths: Tensor, max_length: int, block_table: Tensor | None = None, **_: Any) -> None:
    """Ops that read the first `lengths` slots of every request."""
    room = _room(k_pool, block_table)
    reason = "`max_length`" if max_length <= room else "the slots that a request can have"
    _check_range("lengths", lengths, 0, min(max_length, room), reason)
    _check_first_pages(k_pool, lengths, block_table)


def check_select(scores: Tensor, lengths: Tensor, budgets: Tensor, **_: Any) -> None:
    """Lengths within the scores, budgets that are no debts."""
    _check_range("lengths", lengths, 0, scores.shape[2], "the keys that `scores` has")
    _check_range("budgets", budgets, 0, torch.iinfo(torch.int32).max, "a number of tokens")


def check_diversity(keys: Tensor, lengths: Tensor, **_: Any) -> None:
    """Lengths within the keys and values."""
    _check_batch("keys", keys, lengths)
    _check_range("lengths", lengths, 0, keys.shape[2], "the tokens that `keys` has")


def check_compact(k_pool: Tensor, index: Tensor, block_table: Tensor | None = None, **_: Any) -> None:
    """Every kept position is a slot, and its page exists."""
    _check_range("index", index, -1, _room(k_pool, block_table) - 1, "the slots that a request can have, -1 for none")
    _check_pages(k_pool, index, block_table)


def check_compact_into(k_pool: Tensor, k: Tensor, index: Tensor, block_table: Tensor, **_: Any) -> None:
    """Every kept position is a key, and the page that takes it exists."""
    _check_range("index", index, -1, k.shape[2] - 1, "the keys of `k`, -1 for none")
    room, capacity = _room(k_pool, block_table), index.shape[2]
    if capacity > room:
        raise InputError(f"`index` has {capacity} entries per head: `block_table` gives a request {room} slots")
    slots = torch.arange(capacity, device=index.device).expand_as(index)
    _check_pages(k_pool, torch.where(index >= 0, slots, -1), block_table)


def check_write_packed(k_pool: Tensor, slots: Tensor, **_: Any) -> None:
    """Every place is in the pool."""
    num_slots = k_pool.shape[0] * k_pool.shape[2]
    _check_range("slots", slots, -1, num_slots - 1, "the slots of `k_pool`, -1 for none")


def check_write_slots(k_pool: Tensor, slots: Tensor, block_table: Tensor | None = None, **_: Any) -> None:
    """Every slot is one that the request can have, and its page exists."""
    _check_range("slots", slots, -1, _room(k_pool, block_table) - 1, "the slots that a request can have, -1 for none")
    _check_pages(k_pool, slots, block_table)


def check_decode_step(
    k_pool: Tensor,
    scores: Tensor,
    lengths: Tensor,
    budgets: Tensor,
    victims: Tensor,
    block_table: Tensor | None = None,
    **_: Any,
) -> None:
    """Lengths and budgets within the slots; of requests with a budget, victims among the slots in use, and pages."""
    _check_batch("budgets", budgets, lengths)
    _check_batch("victims", victims, lengths)
    room = min(scores.shape[2], _room(k_pool, block_table))
    for name, values in (("budgets", budgets), ("lengths", lengths)):
        _check_range(name, values, 0, room, "the slots that a request can have")
    in_use = torch.minimum(lengths + 1, budgets)
    last = (in_use - 1)[:, None].expand_as(victims)
    _check_range("victims", victims, 0, last, "the slots in use, the new token's included", last >= 0)
    _check_first_pages(k_pool, in_use, block_table)


def check_varlen(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **_: Any,
) -> None:
    """Bounds of packed requests start at 0, ascend by at most the longest request, and stay within the tokens."""
    for name, bounds, longest, total in (
        ("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, q.shape[0]),
        ("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, k.shape[0]),
    ):
        before = torch.cat([bounds.new_zeros(1), bounds[:-1]])
        highest = (before + longest).clamp_max(total)
        highest[:1] = 0
        reason = f"from the entry before to `max_seqlen_{name[-1]}` = {longest} more, within {total} tokens"
        _check_range(name, bounds, before, highest, reason)


CHECKS: dict[str, Callable[..., None]] = {
    "attention_varlen": check_varlen,
    "window_lse": check_stored,
    "window_score": check_stored,
    "key_anchor": check_stored,
    "kv_diversity": check_diversity,
    "select": check_select,
    "compact": check_compact,
    "compact_into": check_compact_into,
    "write_packed": check_write_packed,
    "write_slots": check_write_slots,
    "attend_slots": check_stored,
    "decode_step": check_decode_step,
}


def _check_range(
    argument: str,
    values: Tensor,
    lowest: Tensor | int,
    highest: Tensor | int,
    reason: str,
    where: Tensor | None = None,
) -> None:
    """Every value, or those chosen by the mask `where`, lies between two bounds, both included."""
    wrong = (values < lowest) | (values > highest)
    if where is not None:
        wrong &= where
    if not wrong.any():
        return
    at = wrong.nonzero()[0].tolist()
    low, high = (int(bound[tuple(at)]) if isinstance(bound, Tensor) else bound for bound in (lowest, highest))
    raise InputError(f"`{argument}`{at} is {int(values[tuple(at)])}: it must lie in {low} to {high}, {reason}")


def _check_batch(argument: str, tensor: Tensor, lengths: Tensor) -> None:
    if tensor.shape[0] != lengths.shape[0]:
        raise InputError(f"`{argument}` is for {tensor.shape[0]} requests, `lengths` for {lengths.shape[0]}")


def _check_first_pages(k_pool: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    """The pages of the first `lengths` [B] slots."""
    if block_table is None:
        return
    slots = torch.arange(_room(k_pool, block_table), device=lengths.device)[None]
    _check_pages(k_pool, torch.where(slots < lengths[:, None], slots, -1), block_table)


def _check_pages(k_pool: Tensor, slots: Tensor, block_table: Tensor | None) -> None:
    """The pages of `slots` [B, ...], each within what the table has room for, -1 for none."""
    if block_table is None:
        return
    _check_batch("block_table", block_table, slots)
    requests, *_ = (slots >= 0).nonzero(as_tuple=True)
    followed = torch.zeros_like(block_table, dtype=torch.bool)
    followed[requests, slots[slots >= 0] // k_pool.shape[2]] = True
    _check_range("block_table", block_table, 0, k_pool.shape[0] - 1, "the pages of the pool", followed)


def _room(k_pool: Tensor, block_table: Tensor | None) -> int:
    """C, slots that a request can have."""
    return k_pool.shape[2] * (1 if block_table is None else block_table.shape[1])
