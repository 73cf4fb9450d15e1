"""Scores and a budget decide which positions stay.

Source: fixed-budget selection with pooled scores is SnapKV's (arXiv 2404.14469, section 4.2); ours works per KV head,
never pads the pooled row with zeros, and can fill the budget from two lists of scores.
"""

import torch
from torch import Tensor

from hf_sparsekv.ops.reference.pool import dense_rows, valid_slots

NOT_CANDIDATE = float("-inf")


def pool_scores(scores_BKN: Tensor, lengths_B: Tensor, pooling: str, width: int) -> Tensor:
    """Spread each score over its neighbours, so that the tokens around an important one survive with it.

    Args:
        scores_BKN: fp32; entries at and past `lengths` are ignored.
        lengths_B: int32 tokens per request.
        pooling: "avg" or "max" over the window centred on j; "forward": token j takes the maximum of
            j - width + 1 .. j, so importance spreads only towards later tokens; "none".
        width: odd, at least 1. At the edges the window is cut, not padded.
    Returns:
        fp32 [B, K, N], 0 at and past `lengths`.
    """
    valid = valid_slots(lengths_B, scores_BKN.shape[-1])[:, None]
    scores = scores_BKN.masked_fill(~valid, 0.0)
    if pooling == "none" or width == 1:
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

    With C = budgets[b] and n = lengths[b]: if n <= C everything is kept. Otherwise the first `num_sinks`, the last
    `num_recent`, and C - num_sinks - num_recent others by pooled score, ties to the lower position. With a second
    list, the first fills floor(share * free) of the free places and the second fills the rest from what is left.

    Args:
        scores_BKN: fp32, finite where j < lengths[b].
        lengths_B: int32 tokens per request.
        budgets_B: int32 tokens to keep per request, num_sinks + num_recent <= budgets[b] <= capacity.
        capacity: C, the width of the result.
        num_sinks, num_recent: forced tokens.
        pooling, pool_width: see `pool_scores`.
        secondary_BKN, secondary_pooling, secondary_width: the second list and its pooling, or None.
        share: of the free places, the part that the first list fills, in [0, 1].
    Returns:
        index int64 [B, K, capacity]: kept positions, ascending, then -1;
        count int32 [B]: how many, min(lengths, budgets);
        retained fp32 [B, K, capacity]: ONE score per kept token for later replacement, 0 where index is -1. It is the
        pooled first score; a token that the second list chose at rank r of m takes the score of the first list's
        chosen token at the same relative rank (its own if the first list chose none), so that both lists'
        tokens are evicted in turn.
    """
    num_keys = scores_BKN.shape[-1]
    position = torch.arange(num_keys, device=scores_BKN.device)
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
        ranked = pooled.masked_fill(~candidates, NOT_CANDIDATE).sort(dim=-1, descending=True, stable=True).values
        twin = second_rank * num_first // (num_free - num_first).clamp_min(1)
        borrowed = ranked.gather(-1, twin.clamp(0, num_keys - 1))
        retained = torch.where(second & (num_first > 0), borrowed, pooled)
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
    absent = (index_BKC < 0)[..., None]
    where = index_BKC.clamp_min(0)[..., None].expand(*index_BKC.shape, k_pool.shape[-1])
    keys, values = (
        dense_rows(pool, block_table, num_slots).gather(2, where).masked_fill(absent, 0.0) for pool in (k_pool, v_pool)
    )
    return keys, values


def _ranks(scores_BKN: Tensor, candidates_BKN: Tensor) -> Tensor:
    """int64 rank of every candidate, 0 = highest score, ties to the lower position; non-candidates come last."""
    order = scores_BKN.masked_fill(~candidates_BKN, NOT_CANDIDATE).argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return ranks


def _ascending(kept_BKN: Tensor, retained_BKN: Tensor, capacity: int, count_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_keys = kept_BKN.shape[-1]
    # Stable sort of "not kept" brings the kept positions to the front in ascending order.
    order = (~kept_BKN).to(torch.uint8).argsort(dim=-1, stable=True)[..., :capacity]
    if num_keys < capacity:
        order = torch.nn.functional.pad(order, (0, capacity - num_keys))
    absent = ~valid_slots(count_B, capacity)[:, None].expand_as(order)
    retained = retained_BKN.gather(-1, order).masked_fill(absent, 0.0)
    return order.masked_fill(absent, -1), count_B, retained
