"""How much the last query rows of a prompt look at each key: column sums of exp(qk - LSE).

Source: the observation window is SnapKV's (arXiv 2404.14469, section 4); getting the weights from the log-sum-exp in
a second pass over the keys follows FlashAttention's backward pass (arXiv 2307.08691, section 3.1).
"""

import torch
from torch import Tensor

from hf_sparsekv.errors import InputError
from hf_sparsekv.ops.reference.pool import chunk_length, dense_rows, valid_slots

REDUCTIONS = ("mean", "max")


def window_lse(
    q_BHAD: Tensor,
    k_pool: Tensor,
    lengths_B: Tensor,
    scale: float,
    max_length: int,
    block_table: Tensor | None = None,
) -> Tensor:
    """LSE of the last A rows of each request, for backends that do not return it.

    Args:
        q_BHAD: the last A queries, right-aligned: row i of request b has position `lengths[b] - A + i`; rows with a
            negative position do not exist and may hold anything.
        k_pool, block_table: keys as a pool (see the module docstring of this package), positions 0 to lengths - 1.
        lengths_B: int32, keys of each request, each <= max_length.
        scale: factor on the logits.
        max_length: N, upper bound of `lengths`.
    Returns:
        fp32 [B, H, A], natural log, over keys at or before the row; -inf for rows that do not exist.
    """
    num_rows = q_BHAD.shape[2]
    q = _grouped(q_BHAD, k_pool.shape[1], lengths_B)
    keys = dense_rows(k_pool, block_table, max_length)
    lse = torch.full((*q.shape[:-1],), float("-inf"), dtype=torch.float32, device=q.device)
    for rows, columns in _tiles(q, max_length):
        logits = _masked_logits(q[..., rows, :], keys, lengths_B, scale, rows, columns, num_rows)
        lse[..., rows] = torch.logaddexp(lse[..., rows], logits.logsumexp(dim=-1))
    return lse.flatten(1, 2)


def window_score(
    q_BHAD: Tensor,
    k_pool: Tensor,
    lse_BHA: Tensor,
    lengths_B: Tensor,
    scale: float,
    max_length: int,
    row_reduction: str = "mean",
    group_reduction: str = "mean",
    block_table: Tensor | None = None,
    value_norm_BKN: Tensor | None = None,
    anchor_BKD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention that each key receives from the last A rows, reduced over rows, then over the KV group.

    With p[g, i, j] = exp(scale * q[g, i] . k[j] - lse[g, i]) for keys at or before row i, else 0:
    `mean` divides the sum over rows by min(A, lengths[b]), the rows that exist; `max` takes the largest over rows.
    The group reduction does the same over the G query heads of a KV head.

    Args:
        q_BHAD, k_pool, lengths_B, scale, max_length, block_table: as in `window_lse`.
        lse_BHA: fp32 LSE of those rows over every key the row sees, natural log.
        row_reduction, group_reduction: "mean" or "max".
        value_norm_BKN: fp32 factor per key (the norm of its value), or None.
        anchor_BKD: fp32 mean direction of the keys; asks for the second output in the same pass.
    Returns:
        fp32 score [B, K, N], a probability scale, 0 at and past `lengths`; and fp32 [B, K, N], the negative cosine
        between each key and the anchor (larger = more unlike the others), 0 past `lengths`; empty [0] without anchor.
    Raises:
        InputError: another reduction.
    """
    for name, value in (("row_reduction", row_reduction), ("group_reduction", group_reduction)):
        if value not in REDUCTIONS:
            raise InputError(f"`{name}` is {value!r}: it must be one of {', '.join(REDUCTIONS)}")
    batch, heads, num_rows, _ = q_BHAD.shape
    kv_heads = k_pool.shape[1]
    q = _grouped(q_BHAD, kv_heads, lengths_B)
    keys = dense_rows(k_pool, block_table, max_length)
    lse = lse_BHA.view(batch, kv_heads, heads // kv_heads, num_rows)
    per_head = torch.zeros(*q.shape[:3], max_length, dtype=torch.float32, device=q.device)
    for rows, columns in _tiles(q, max_length):
        logits = _masked_logits(q[..., rows, :], keys, lengths_B, scale, rows, columns, num_rows)
        row_lse = lse[..., rows].masked_fill(~_existing_rows(lengths_B, num_rows)[:, None, None, rows], 0.0)
        probs = logits.sub_(row_lse[..., None]).exp_()
        target = per_head[..., columns]
        if row_reduction == "mean":
            target += probs.sum(dim=-2)
        else:
            torch.maximum(target, probs.amax(dim=-2), out=target)
    if row_reduction == "mean":
        per_head /= lengths_B.clamp(1, max(1, num_rows))[:, None, None, None]
    score = per_head.mean(dim=2) if group_reduction == "mean" else per_head.amax(dim=2)
    if value_norm_BKN is not None:
        # Norms past the length may be anything: multiply only what exists.
        score = torch.where(valid_slots(lengths_B, max_length)[:, None], score * value_norm_BKN, 0.0)
    if anchor_BKD is None:
        return score, score.new_empty(0)
    return score, _negative_cosine(keys, anchor_BKD, lengths_B)


def key_anchor(k_pool: Tensor, lengths_B: Tensor, max_length: int, block_table: Tensor | None = None) -> Tensor:
    """Mean of the keys' directions, the point KeyDiff measures from.

    Returns:
        fp32 [B, K, D], the mean of k / |k| over each request's keys.
    Source: KeyDiff (arXiv 2504.15364, section 3).
    """
    keys = dense_rows(k_pool, block_table, max_length)
    batch, kv_heads, num_keys, dim = keys.shape
    total = torch.zeros(batch, kv_heads, dim, dtype=torch.float32, device=keys.device)
    valid = valid_slots(lengths_B, num_keys)
    step = chunk_length(batch * kv_heads * dim * 4)
    for start in range(0, num_keys, step):
        columns = slice(start, start + step)
        chunk = keys[:, :, columns].float().masked_fill(~valid[:, None, columns, None], 0.0)
        total += torch.nn.functional.normalize(chunk, dim=-1).sum(dim=2)
    return total / lengths_B.clamp_min(1)[:, None, None]


def _negative_cosine(keys_BKND: Tensor, anchor_BKD: Tensor, lengths_B: Tensor) -> Tensor:
    batch, kv_heads, num_keys, dim = keys_BKND.shape
    result = torch.zeros(batch, kv_heads, num_keys, dtype=torch.float32, device=keys_BKND.device)
    valid = valid_slots(lengths_B, num_keys)
    step = chunk_length(batch * kv_heads * dim * 4)
    for start in range(0, num_keys, step):
        columns = slice(start, start + step)
        chunk = keys_BKND[:, :, columns].float().masked_fill(~valid[:, None, columns, None], 0.0)
        result[:, :, columns] = -torch.nn.functional.cosine_similarity(chunk, anchor_BKD[:, :, None], dim=-1)
    return result


def _grouped(q_BHAD: Tensor, kv_heads: int, lengths_B: Tensor) -> Tensor:
    """Queries as fp32 [B, K, G, A, D], rows that do not exist set to 0 so that their NaN cannot spread."""
    batch, heads, num_rows, dim = q_BHAD.shape
    exists = _existing_rows(lengths_B, num_rows)
    q = q_BHAD.float().masked_fill(~exists[:, None, :, None], 0.0)
    return q.reshape(batch, kv_heads, heads // kv_heads, num_rows, dim)


def _existing_rows(lengths_B: Tensor, num_rows: int) -> Tensor:
    """bool [B, A]: row i stands for position lengths - A + i, which must not be negative."""
    return torch.arange(num_rows, device=lengths_B.device)[None, :] >= num_rows - lengths_B[:, None]


def _tiles(q_BKGAD: Tensor, num_keys: int) -> list[tuple[slice, slice]]:
    """(rows, columns) pieces whose fp32 logits and keys stay under the stated bound of temporaries.

    Columns end where the last of the rows does: later keys are hidden from them in every request.
    """
    batch, kv_heads, groups, num_rows, dim = q_BKGAD.shape
    row_step = max(1, min(num_rows, 256))
    column_step = chunk_length(batch * kv_heads * max(groups * row_step, dim) * 4)
    tiles = []
    for row in range(0, num_rows, row_step):
        rows = slice(row, min(row + row_step, num_rows))
        end = num_keys - num_rows + rows.stop
        tiles += [(rows, slice(column, min(column + column_step, end))) for column in range(0, end, column_step)]
    return tiles


def _masked_logits(
    q_BKGAD: Tensor,
    keys_BKND: Tensor,
    lengths_B: Tensor,
    scale: float,
    rows: slice,
    columns: slice,
    num_rows: int,
) -> Tensor:
    """Scaled logits [B, K, G, rows, columns], -inf where the key is absent or later than the row."""
    batch, kv_heads, groups, row_count, dim = q_BKGAD.shape
    key_index = torch.arange(columns.start, columns.stop, device=lengths_B.device)
    position = lengths_B[:, None] - num_rows + torch.arange(rows.start, rows.stop, device=lengths_B.device)
    visible = key_index[None, None, :] <= position[:, :, None]
    chunk = keys_BKND[:, :, columns].float().masked_fill(~visible.any(dim=1)[:, None, :, None], 0.0)
    packed = q_BKGAD.reshape(batch, kv_heads, groups * row_count, dim)
    logits = torch.matmul(packed, chunk.transpose(-1, -2)).mul_(scale).view(batch, kv_heads, groups, row_count, -1)
    return logits.masked_fill_(~visible[:, None, None], float("-inf"))
