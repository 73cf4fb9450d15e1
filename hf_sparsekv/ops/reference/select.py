"""Scores and a budget decide which positions stay.

Source: fixed-budget selection with pooled scores is SnapKV's (arXiv 2404.14469, section 4.2); ours works per KV head,
never pads the pooled row with zeros, and can fill the budget from two lists of scores.
"""

import torch
from torch import Tensor

from hf_sparsekv.errors import InputError
from hf_sparsekv.ops.reference.pool import dense_rows, valid_slots

NOT_CANDIDATE = float("-inf")
MAX_POOL_WIDTH = 41
"""What the compiled kernels can pool over."""
POOLINGS = ("avg", "max", "forward", "none")


def pool_scores(scores_BKN: Tensor, lengths_B: Tensor, pooling: str, width: int) -> Tensor:
    """Spread each score over its neighbours, so that the tokens around an important one survive with it.

    Args:
        scores_BKN: fp32; entries at and past `lengths` are ignored.
        lengths_B: int32 tokens per request.
        pooling: "avg" or "max" over the window centred on j; "forward": token j takes the maximum of
            j - width + 1 .. j, so importance spreads only towards later tokens; "none".
        width: odd, 1 to 41. At the edges the window is cut, not padded.
    Returns:
        fp32 [B, K, N], 0 at and past `lengths`.
    Raises:
        InputError: another pooling or width.
    """
    if pooling not in POOLINGS:
        raise InputError(f"`pooling` is {pooling!r}: it must be one of {', '.join(POOLINGS)}")
    if width % 2 == 0 or not 1 <= width <= MAX_POOL_WIDTH:
        raise InputError(f"the width of a pooling window must be odd, from 1 to {MAX_POOL_WIDTH}: got {width}")
    valid = valid_slots(lengths_B, scores_BKN.shape[-1])[:, None]
    scores = scores_BKN.masked_fill(~valid, 0.0)
    if pooling == "none" or width == 1 or scores.shape[-1] == 0:
        return scores.clone()
    half = width // 2
    if pooling == "avg":
        padded = torch.nn.functional.pad(scores, (half, half))
        counts = torch.nn.functional.pad(valid.float().expand_as(scores), (half, half))
        total, count = (t.unfold(-1, width, 1).sum(dim=-1) for t in (padded, counts))
        pooled = total / count.clamp_min(1.0)
    else:
        left, right = (width - 1, 0) if pooling == "forward" else (half, half)
        lowest = scores_BKN.masked_fill(~valid, NOT_CANDIDATE)
        padded = torch.nn.functional.pad(lowest, (left, right), value=NOT_CANDIDATE)
        pooled = padded.unfold(-1, width, 1).amax(dim=-1)
    return pooled.masked_fill(~valid, 0.0)


def select(
    scores_BKN: Tensor,
    lengths_B: Tensor,
    budgets_B: Tensor,
    capacity: int,
    num_sinks: int,
    num_recent: int,
    pooling: str,
    pool_width: int,
    secondary_BKN: Tensor | None = None,
    secondary_pooling: str = "none",
    secondary_width: int = 1,
    share: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Kept positions per request and KV head: the sinks, the most recent, and the best-scored of the rest.

    With C = min(budgets[b], capacity) and n = lengths[b]: if n <= C everything is kept. Otherwise the first
    `num_sinks`, the last `num_recent`, and C - num_sinks - num_recent others by pooled score, ties to the lower
    position. With a second list, the first fills floor(share * free) of the free places and the second fills the rest
    from what is left.

    Args:
        scores_BKN: fp32, finite where j < lengths[b].
        lengths_B: int32 tokens per request.
        budgets_B: int32 tokens to keep, at least num_sinks + num_recent; what is above `capacity` finds no place.
        capacity: the width of the result.
        num_sinks, num_recent: forced tokens.
        pooling, pool_width: see `pool_scores`.
        secondary_BKN, secondary_pooling, secondary_width: the second list and its pooling, or None.
        share: of the free places, the part that the first list fills, in [0, 1].
    Returns:
        index int64 [B, K, capacity]: kept positions, ascending, then -1;
        count int32 [B]: how many, min(lengths, budgets, capacity);
        retained fp32 [B, K, capacity]: ONE score per kept token for later replacement, 0 where index is -1. It is the
        pooled first score; a token that the second list chose at rank r of m takes the score of the first list's chosen
        token at the same relative rank (its own if it chose none), so that both lists' tokens are evicted in turn.
    Raises:
        InputError: a width that `pool_scores` refuses.
    """
    budgets_B = budgets_B.clamp_max(capacity)
    position = torch.arange(scores_BKN.shape[-1], device=scores_BKN.device)
    lengths, budgets = lengths_B.long()[:, None], budgets_B.long()[:, None]
    valid = position[None] < lengths
    forced = valid & ((position[None] < num_sinks) | (position[None] >= lengths - num_recent) | (lengths <= budgets))
    num_free = (torch.minimum(lengths, budgets) - forced.sum(dim=-1, keepdim=True)).clamp_min(0)[:, None]  # [B, 1, 1]
    pooled = pool_scores(scores_BKN, lengths_B, pooling, pool_width)
    candidates = (valid & ~forced)[:, None].expand_as(pooled)
    num_first = num_free if secondary_BKN is None else (num_free * share).floor().long()
    first_rank = _ranks(pooled, candidates)
    first = candidates & (first_rank < num_first)
    chosen, retained = first, pooled
    if secondary_BKN is not None:
        rest = candidates & ~first
        second_rank = _ranks(pool_scores(secondary_BKN, lengths_B, secondary_pooling, secondary_width), rest)
        second = rest & (second_rank < num_free - num_first)
        chosen = first | second
        twin = second_rank * num_first // (num_free - num_first).clamp_min(1)
        retained = torch.where(second & (num_first > 0), _at_rank(pooled, candidates, twin), pooled)
    kept = chosen | forced[:, None]
    return _ascending(kept, retained, capacity, torch.minimum(lengths_B, budgets_B).to(torch.int32))


def compact(
    k_pool: Tensor, v_pool: Tensor, index_BKC: Tensor, block_table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gather the kept keys and values.

    Args:
        k_pool, v_pool, block_table: the pool, see this package's docstring.
        index_BKC: int64 slot per kept token, -1 for none.
    Returns:
        contiguous [B, K, C, D] keys and values in the pool's dtype, zeros where the index is -1.
    """
    num_slots = k_pool.shape[2] if block_table is None else k_pool.shape[2] * block_table.shape[1]
    if num_slots == 0:  # then no index can be but -1
        shape = (*index_BKC.shape, k_pool.shape[-1])
        return k_pool.new_zeros(shape), v_pool.new_zeros(shape)
    absent = (index_BKC < 0)[..., None]
    where = index_BKC.clamp_min(0)[..., None].expand(*index_BKC.shape, k_pool.shape[-1])
    keys, values = (
        dense_rows(pool, block_table, num_slots).gather(2, where).masked_fill(absent, 0.0) for pool in (k_pool, v_pool)
    )
    return keys, values


def compact_into(
    k_pool: Tensor, v_pool: Tensor, k_BKND: Tensor, v_BKND: Tensor, index_BKC: Tensor, block_table_BM: Tensor
) -> None:
    """`compact` from dense keys and values straight into the pages of each request, in place.

    Args:
        k_pool, v_pool: [P, K, S, D], written.
        k_BKND, v_BKND: what the index refers to, the pool's dtype.
        index_BKC: int64 key per kept token, ascending, then -1 for none; entry c goes to slot c.
        block_table_BM: int32 pages of each request; those behind the last kept token are not followed.
    """
    keys, values = compact(k_BKND, v_BKND, index_BKC)
    owner, head, slot = (index_BKC >= 0).nonzero(as_tuple=True)
    pages, offsets = block_table_BM.long()[owner, slot // k_pool.shape[2]], slot % k_pool.shape[2]
    k_pool[pages, head, offsets] = keys[owner, head, slot]
    v_pool[pages, head, offsets] = values[owner, head, slot]


def _ranks(scores_BKN: Tensor, candidates_BKN: Tensor) -> Tensor:
    """int64 rank of every candidate, 0 = highest score, ties to the lower position; non-candidates come last."""
    order = scores_BKN.masked_fill(~candidates_BKN, NOT_CANDIDATE).argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return ranks


def _at_rank(scores_BKN: Tensor, candidates_BKN: Tensor, ranks_BKN: Tensor) -> Tensor:
    """fp32 [B, K, N]: the score that the candidate of each rank has, 0 = highest; ranks past the last are cut to it."""
    ranked = scores_BKN.masked_fill(~candidates_BKN, NOT_CANDIDATE).sort(dim=-1, descending=True, stable=True).values
    return ranked.gather(-1, ranks_BKN.clamp(0, max(0, ranked.shape[-1] - 1)))


def _ascending(kept_BKN: Tensor, retained_BKN: Tensor, capacity: int, count_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_keys = kept_BKN.shape[-1]
    if num_keys == 0:
        shape = (*kept_BKN.shape[:2], capacity)
        return count_B.new_full(shape, -1, dtype=torch.int64), count_B, retained_BKN.new_zeros(shape)
    # Stable sort of "not kept" brings the kept positions to the front in ascending order.
    order = (~kept_BKN).to(torch.uint8).argsort(dim=-1, stable=True)[..., :capacity]
    if num_keys < capacity:
        order = torch.nn.functional.pad(order, (0, capacity - num_keys))
    absent = ~valid_slots(count_B, capacity)[:, None].expand_as(order)
    retained = retained_BKN.gather(-1, order).masked_fill(absent, 0.0)
    return order.masked_fill(absent, -1), count_B, retained
