"""One decode step over stored slots: write, attend, update the scores, find the next victim.

Source: replacing the lowest-scored entry while decoding follows H2O (arXiv 2306.14048, section 4); ours keeps a
moving average of the exact softmax weights instead of their running sum, unless told otherwise.
"""

import torch
from torch import Tensor

from hf_sparsekv.ops.reference.pool import dense_rows, valid_slots

_NEVER = float("inf")


def decode_attention(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    lengths_B: Tensor,
    scale: float,
    max_length: int,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one query over the stored slots, with the weight that every slot got.

    Args:
        q_BHD: one query per request.
        k_pool, v_pool, block_table: the pool; slots 0 to lengths - 1 are read, in any order of positions.
        lengths_B: int32, slots that hold a token, the current one included.
        scale: factor on the logits.
        max_length: C, upper bound of `lengths`.
    Returns:
        output [B, H, D] in q's dtype; LSE fp32 [B, H], natural log; probs fp32 [B, K, C], the softmax weight of each
        slot, mean over the group, 0 at and past `lengths`.
    """
    logits, values = _logits_and_values(q_BHD, k_pool, v_pool, lengths_B, scale, max_length, block_table)
    lse = logits.logsumexp(dim=-1)
    lowest = torch.finfo(torch.float32).min  # a request without slots: exp(-inf - lowest) is 0, and so is its output
    probs = logits.sub_(lse.clamp_min(lowest)[..., None]).exp_()
    return _combined(probs, values, q_BHD), lse.flatten(1), probs.mean(dim=2)


def attend_slots(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    lengths_B: Tensor,
    scale: float,
    max_length: int,
    block_table: Tensor | None = None,
) -> Tensor:
    """`decode_attention` without what only scoring needs: the output [B, H, D], 0 for a request without slots."""
    return decode_attention(q_BHD, k_pool, v_pool, lengths_B, scale, max_length, block_table)[0]


def write_packed(k_pool: Tensor, v_pool: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """Store the keys and values of T tokens of any requests, in place.

    Args:
        k_pool, v_pool: [P, K, S, D].
        k_TKD, v_TKD: the pool's dtype.
        slots_T: int64 place in the pool, page * S + slot; -1 writes nothing.
    """
    tokens = (slots_T >= 0).nonzero().flatten()
    pages, slots = slots_T[tokens] // k_pool.shape[2], slots_T[tokens] % k_pool.shape[2]
    k_pool[pages, :, slots] = k_TKD[tokens]
    v_pool[pages, :, slots] = v_TKD[tokens]


def write_slots(
    k_pool: Tensor,
    v_pool: Tensor,
    k_BKD: Tensor,
    v_BKD: Tensor,
    slots_BK: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """Store one new key and value per request and KV head, in place.

    Args:
        k_pool, v_pool, block_table: the pool.
        k_BKD, v_BKD: new key and value, the pool's dtype.
        slots_BK: int64 slot to overwrite; -1 writes nothing.
    """
    # A request that writes nothing may have no page at all: take only those that write.
    rows, heads = (slots_BK >= 0).nonzero(as_tuple=True)
    slots = slots_BK[rows, heads]
    pages, offsets = rows, slots
    if block_table is not None:
        page_size = k_pool.shape[2]
        pages, offsets = block_table.long()[rows, slots // page_size], slots % page_size
    k_pool[pages, heads, offsets] = k_BKD[rows, heads]
    v_pool[pages, heads, offsets] = v_BKD[rows, heads]


def find_victim(
    scores_BKC: Tensor,
    positions_BKC: Tensor,
    lengths_B: Tensor,
    budgets_B: Tensor,
    next_position_B: Tensor,
    num_sinks: int,
    num_recent: int,
) -> Tensor:
    """The slot that the token at `next_position` will take.

    The next free slot while lengths < budgets; else the lowest-scored slot that holds neither a sink nor one of the
    last `num_recent` positions as they are once the new token is in. Ties go to the lower slot.

    Args:
        scores_BKC: fp32 score per slot, no NaN.
        positions_BKC: int32 position per slot.
        lengths_B, budgets_B: int32, slots in use and slots allowed.
        next_position_B: int32 position of the token that comes next.
        num_sinks, num_recent: protected tokens; num_sinks + num_recent <= budgets.
    Returns:
        int64 [B, K].
    """
    oldest_recent = (next_position_B - (num_recent - 1))[:, None, None]
    protected = (positions_BKC < num_sinks).logical_or_(positions_BKC >= oldest_recent)
    if not _all_full(lengths_B, scores_BKC.shape[-1]):
        protected.logical_or_(~valid_slots(lengths_B, scores_BKC.shape[-1])[:, None])
    lowest = scores_BKC.masked_fill(protected, _NEVER).argmin(dim=-1)
    lengths = lengths_B.long()[:, None]
    return torch.where(lengths < budgets_B[:, None], lengths, lowest)


def decode_step(
    q_BHD: Tensor,
    k_BKD: Tensor,
    v_BKD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    positions_BKC: Tensor,
    scores_BKC: Tensor,
    lengths_B: Tensor,
    budgets_B: Tensor,
    victims_BK: Tensor,
    next_position_B: Tensor,
    scale: float,
    decay: float,
    gain: float,
    num_sinks: int,
    num_recent: int,
    score_by_position: bool,
    block_table: Tensor | None = None,
) -> Tensor:
    """The whole decode step of a window layer; everything but q, k, v and the table is updated in place.

    1. The new key and value go to slot `victims`; its position is `next_position`, its score starts at 0.
    2. The query attends over the stored slots, the new one included.
    3. scores = decay * scores + gain * (softmax weight, mean over the group). With `score_by_position` the scores
       stay as they are and the new token's score is its position: the oldest is then the lowest (a ring).
    4. `victims` becomes the slot for the token after this one.

    Args:
        q_BHD, k_BKD, v_BKD: the new token, after RoPE.
        k_pool, v_pool, block_table: the pool; C = scores.shape[2] slots per request.
        positions_BKC: int32 position per slot.
        scores_BKC: fp32 score per slot; infinity = never evicted.
        lengths_B: int32 slots in use before this token; grows by one while below `budgets`.
        budgets_B: int32 slots allowed, each <= C.
        victims_BK: int64 slot for this token, from the previous step or `find_victim`.
        next_position_B: int32 position of this token; grows by one.
        scale: factor on the logits. decay, gain: of the score update.
        num_sinks, num_recent: never evicted, see `find_victim`.
    Returns:
        output [B, H, D] in q's dtype.
    """
    capacity = scores_BKC.shape[2]
    _store_new(k_BKD, v_BKD, k_pool, v_pool, positions_BKC, scores_BKC, victims_BK, next_position_B, block_table)
    if score_by_position:
        scores_BKC.scatter_(
            -1, victims_BK[..., None], next_position_B[:, None, None].float().expand(*victims_BK.shape, 1)
        )
    torch.minimum(lengths_B + 1, budgets_B, out=lengths_B)
    next_position_B += 1
    logits, values = _logits_and_values(q_BHD, k_pool, v_pool, lengths_B, scale, capacity, block_table)
    probs = logits.softmax(dim=-1)
    if not score_by_position:
        scores_BKC.mul_(decay).add_(probs.mean(dim=2), alpha=gain)
    victims_BK.copy_(
        find_victim(scores_BKC, positions_BKC, lengths_B, budgets_B, next_position_B, num_sinks, num_recent)
    )
    return _combined(probs, values, q_BHD)


def _store_new(
    k_BKD: Tensor,
    v_BKD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    positions_BKC: Tensor,
    scores_BKC: Tensor,
    victims_BK: Tensor,
    next_position_B: Tensor,
    block_table: Tensor | None,
) -> None:
    """The new token takes its slot: key, value, position, and score 0."""
    slot = victims_BK[..., None]
    if block_table is None:
        where = slot[..., None].expand(-1, -1, 1, k_pool.shape[3])
        k_pool.scatter_(2, where, k_BKD[:, :, None])
        v_pool.scatter_(2, where, v_BKD[:, :, None])
    else:
        write_slots(k_pool, v_pool, k_BKD, v_BKD, victims_BK, block_table)
    positions_BKC.scatter_(-1, slot, next_position_B[:, None, None].expand_as(slot))
    scores_BKC.scatter_(-1, slot, 0.0)


def _logits_and_values(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    lengths_B: Tensor,
    scale: float,
    max_length: int,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Logits fp32 [B, K, G, C], -inf at free slots, and values fp32 [B, K, C, D], 0 there."""
    batch, heads, dim = q_BHD.shape
    kv_heads = k_pool.shape[1]
    keys = dense_rows(k_pool, block_table, max_length).float()
    values = dense_rows(v_pool, block_table, max_length).float()
    is_full = _all_full(lengths_B, max_length)
    free = None if is_full else ~valid_slots(lengths_B, max_length)[:, None]
    if free is not None:
        keys, values = keys.masked_fill(free[..., None], 0.0), values.masked_fill(free[..., None], 0.0)
    q = (q_BHD.float() * scale).reshape(batch * kv_heads, heads // kv_heads, dim)
    logits = torch.bmm(q, keys.reshape(batch * kv_heads, max_length, dim).transpose(1, 2))
    logits = logits.view(batch, kv_heads, heads // kv_heads, max_length)
    if free is not None:
        logits.masked_fill_(free[:, :, None], float("-inf"))
    return logits, values


def _combined(probs_BKGC: Tensor, values_BKCD: Tensor, q_BHD: Tensor) -> Tensor:
    """Output [B, H, D] in q's dtype."""
    output = torch.bmm(probs_BKGC.flatten(0, 1), values_BKCD.flatten(0, 1))
    return output.view(q_BHD.shape).to(q_BHD.dtype)


def _all_full(lengths_B: Tensor, capacity: int) -> bool:
    """Whether no slot is unused; asked only where reading a length is free (on the CPU)."""
    return lengths_B.device.type == "cpu" and int(lengths_B.min()) >= capacity
