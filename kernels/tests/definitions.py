"""The compiled ops by their own names and arguments, computed by their definitions: what a launch should leave behind.

Shapes: B request, T query row, H query head, K KV head, D head dim, C slots per request.
"""

import torch
from torch import Tensor

from hf_sparsekv.ops import reference
from hf_sparsekv.ops.kernels import POOLINGS, REDUCTIONS

_POOLING = {code: name for name, code in POOLINGS.items()}
_REDUCTION = {code: name for name, code in REDUCTIONS.items()}


def score(
    score: Tensor,
    cosine: Tensor | None,
    q: Tensor,
    k_pool: Tensor,
    lse: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    value_norm: Tensor | None,
    anchor: Tensor | None,
    scale: float,
    max_length: int,
    row_reduction: int,
    group_reduction: int,
) -> None:
    reductions = _REDUCTION[row_reduction], _REDUCTION[group_reduction]
    extras = (block_table, value_norm, anchor)
    found, cosines = reference.window_score(q, k_pool, lse, lengths, scale, max_length, *reductions, *extras)
    score.copy_(found)
    if cosine is not None:
        cosine.copy_(cosines)


def lse_tail(
    lse: Tensor,
    workspace: Tensor,
    q: Tensor,
    k_pool: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    scale: float,
    max_length: int,
) -> None:
    lse.copy_(reference.window_lse(q, k_pool, lengths, scale, max_length, block_table))


def key_anchor(
    anchor: Tensor, workspace: Tensor, k_pool: Tensor, lengths: Tensor, block_table: Tensor | None, max_length: int
) -> None:
    anchor.copy_(reference.key_anchor(k_pool, lengths, max_length, block_table))


def kv_diversity(
    diversity: Tensor,
    workspace: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:
    diversity.copy_(reference.kv_diversity(keys, values, lengths, inv_freq, positions))


def select(
    index: Tensor,
    count: Tensor,
    retained: Tensor,
    scores: Tensor,
    lengths: Tensor,
    budgets: Tensor,
    num_sinks: int,
    num_recent: int,
    pooling: int,
    pool_width: int,
    secondary: Tensor | None = None,
    secondary_pooling: int = 0,
    secondary_width: int = 1,
    share: float = 1.0,
) -> None:
    first = (num_sinks, num_recent, _POOLING[pooling], pool_width)
    second = (secondary, _POOLING[secondary_pooling], secondary_width, share)
    found = reference.select(scores, lengths, budgets, index.shape[2], *first, *second)
    for output, values in zip((index, count, retained), found, strict=True):
        output.copy_(values)


def compact(
    k_out: Tensor,
    v_out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    index: Tensor,
    in_table: Tensor | None = None,
    out_table: Tensor | None = None,
) -> None:
    kept = reference.compact(k_pool, v_pool, index, in_table)
    if out_table is None:
        k_out.copy_(kept[0])
        v_out.copy_(kept[1])
        return
    # The rows are gathered: entry c of them is what goes to slot c.
    places = torch.arange(index.shape[2]).expand_as(index)
    reference.compact_into(k_out, v_out, *kept, torch.where(index < 0, -1, places), out_table)


def write_kv(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    block_table: Tensor | None = None,
    positions: Tensor | None = None,
    new_positions: Tensor | None = None,
) -> None:
    reference.write_slots(k_pool, v_pool, k, v, slots, block_table)
    if positions is not None and new_positions is not None:
        owner, head = (slots >= 0).nonzero(as_tuple=True)
        positions[owner, head, slots[owner, head]] = new_positions[owner]


def write_kv_packed(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    new_positions: Tensor | None = None,
) -> None:
    reference.write_packed(k_pool, v_pool, k, v, slot_mapping)
    if positions is not None and new_positions is not None:
        tokens = (slot_mapping >= 0).nonzero().flatten()
        pages, slots = slot_mapping[tokens] // k_pool.shape[2], slot_mapping[tokens] % k_pool.shape[2]
        positions[pages, :, slots] = new_positions[tokens][:, None]


def decode_attention(
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    scale: float,
    max_length: int,
    num_splits: int = 0,
) -> None:
    num_rows = q.shape[1]
    for row in range(num_rows):  # row i sees the slots below lengths - T + 1 + i
        seen = (lengths - num_rows + 1 + row).clamp_min(0)
        stored = (k_pool, v_pool, seen, scale, max_length, block_table)
        found, row_lse, _ = reference.decode_attention(q[:, row], *stored)
        out[:, row] = found
        if lse is not None:
            lse[:, row] = row_lse


def decode_step(
    out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    positions: Tensor,
    scores: Tensor,
    lengths: Tensor,
    victims: Tensor,
    next_position: Tensor,
    workspace: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    budgets: Tensor,
    block_table: Tensor | None,
    scale: float,
    decay: float,
    gain: float,
    num_sinks: int,
    num_recent: int,
    score_by_position: bool,
    num_splits: int = 0,
) -> None:
    state = (k_pool, v_pool, positions, scores, lengths, budgets, victims, next_position)
    rule = (scale, decay, gain, num_sinks, num_recent, score_by_position)
    out.copy_(reference.decode_step(q, k, v, *state, *rule, block_table))


def decode_workspace_bytes(*sizes: int) -> int:
    """Definitions need no workspace: what is left are the counters that a kernel has to leave at zero."""
    return 2 * 8192 * 4
