"""The end of a prompt or turn: score what a window layer has gathered and keep its budget of it.

Shapes: B request, H query head, K KV head, N candidate, C slot, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.cache.layer import PromptRecord, WindowLayer
from hf_sparsekv.cache.slots import UNLIMITED, SlotStore
from hf_sparsekv.errors import CacheError
from hf_sparsekv.plan import FULL_LAYER_BLOCK
from hf_sparsekv.scorers import ScoreInputs, TwoLists
from hf_sparsekv.select import check_scores, select_kept


@dataclass(frozen=True)
class _Candidates:
    """What a selection may keep: requests of equal length, without padding, in ascending order of position."""

    keys: Tensor
    """[B, K, N, D]."""
    values: Tensor
    queries: Tensor
    """[B, H, A, D], the last A rows; they belong to the last A candidates."""
    positions: Tensor
    """int64 [B, K, N]."""
    carried: Tensor | None
    """fp32 [B, K, N], scores from before, 0 for new tokens; None at a first prompt, and where they are ages."""
    num_seen: int


def finish_prompt(layer: WindowLayer, scale: float) -> None:
    """Select from everything the layer holds, and free the rest.

    While no request exceeds its budget nothing is evicted and nothing moves: the layer stays what a dense cache is,
    and only remembers the scores that decoding will need.

    Raises:
        CacheError: a request of the batch got no token in this turn.
        ScoreError: the scorer returned something that cannot rank tokens.
    """
    if not layer.is_prompt_open:
        return
    tokens = layer.padding.tokens
    for row in range(len(tokens)):
        if layer.num_new(row) == 0:
            raise CacheError(f"request {row} of the batch got only padding in this turn: run it in a batch of its own")
    budgets = [layer.spec.kept_tokens(seen) for seen in tokens]
    fits = layer.slots is None and all(seen <= budget for seen, budget in zip(tokens, budgets, strict=True))
    records = [_record(layer, row, budget) for row, budget in enumerate(budgets)]
    parts, remembered = [], []
    for rows in _uniform_rows(layer):
        candidates = _gather(layer, rows)
        scores = _score(layer, candidates, scale)
        if fits:
            remembered.append((rows, _all_scores(layer, scores, candidates)))
        else:
            parts.append(_keep(layer, candidates, scores, budgets[rows], max(budgets)))
    # Nothing changes before every request is scored: a scorer that fails leaves the prompt open and whole.
    for rows, decode_scores in remembered:
        column_scores(layer)[rows][:, :, layer.padding.columns_of(rows.start, 0)] = decode_scores
    if parts:
        _move_to_slots(layer, parts)
    layer.prompts, layer.num_decoded = records, 0
    layer.tail.clear()
    layer.is_prompt_open = False


def make_room(layer: WindowLayer) -> None:
    """Prepare a layer for one more token: leave the columns if a request is about to exceed its budget."""
    rows = range(len(layer.prompts))
    if layer.slots is None:
        if any(layer.padding.tokens[row] >= layer.prompts[row].budget for row in rows):
            _start_replacing(layer)
        else:
            return
    slots = layer.slots
    assert slots is not None
    if layer.config.decode_mode == "grow" and max(layer.num_in_slots(row) for row in rows) >= slots.capacity:
        slots.reserve(slots.capacity + FULL_LAYER_BLOCK)


def _start_replacing(layer: WindowLayer) -> None:
    """Move a layer that has evicted nothing from columns to slots."""
    capacity = max(record.budget for record in layer.prompts)
    parts = []
    for rows in _uniform_rows(layer):
        columns = layer.padding.columns_of(rows.start, 0)
        keys, values = (t[rows][:, :, columns] for t in (layer.columns.keys, layer.columns.values))
        assert layer.column_scores is not None
        scores = layer.column_scores[rows, :, : layer.columns.num_columns][:, :, columns]
        extra, pad = capacity - keys.shape[2], torch.nn.functional.pad
        positions = torch.arange(keys.shape[2], device=keys.device).expand(*keys.shape[:2], -1)
        budgets = [record.budget for record in layer.prompts[rows]]
        parts.append(
            _new_store(
                layer,
                (pad(keys, (0, 0, 0, extra)), pad(values, (0, 0, 0, extra))),
                pad(positions, (0, extra), value=-1),
                pad(scores, (0, extra)),
                torch.full((keys.shape[0],), keys.shape[2], dtype=torch.int32, device=keys.device),
                budgets,
                keys.shape[2],
            )
        )
    _move_to_slots(layer, parts)


def _move_to_slots(layer: WindowLayer, parts: list[SlotStore]) -> None:
    layer.slots = parts[0] if len(parts) == 1 else SlotStore.join_rows(parts)
    layer.columns.clear()
    layer.column_scores = None


def _record(layer: WindowLayer, row: int, budget: int) -> PromptRecord:
    candidates = layer.num_stored(row)
    kept = min(candidates, budget)
    before = layer.prompts[row].evicted if layer.prompts else 0
    return PromptRecord(layer.padding.tokens[row], kept, before + candidates - kept, budget)


def _uniform_rows(layer: WindowLayer) -> list[slice]:
    """Pieces of the batch that can be scored together: all of it without padding, else each request alone."""
    batch = len(layer.padding.tokens)
    if layer.padding.is_token is None:
        return [slice(0, batch)]
    return [slice(row, row + 1) for row in range(batch)]


def _gather(layer: WindowLayer, rows: slice) -> _Candidates:
    """The candidates of some requests: stored tokens, then the columns of the prompt or turn."""
    row, slots = rows.start, layer.slots
    columns = layer.padding.columns_of(row, layer.num_seen - layer.columns.num_columns)
    keys, values = (t[rows][:, :, columns] for t in (layer.columns.keys, layer.columns.values))
    queries = layer.tail.queries[rows]
    observed = min(queries.shape[2], layer.num_new(row))
    queries = queries[:, :, queries.shape[2] - observed :]
    seen = layer.padding.tokens[row]
    shape = (*keys.shape[:2], keys.shape[2])
    positions = torch.arange(seen - keys.shape[2], seen, device=keys.device).expand(shape)
    if slots is None:
        return _Candidates(keys, values, queries, positions, _carried_columns(layer, rows, columns), seen)
    stored = layer.num_in_slots(row)
    order = slots.positions[rows, :, :stored].argsort(dim=-1)
    spread = order[..., None].expand(*order.shape, keys.shape[3])
    old_positions = slots.positions[rows, :, :stored].gather(-1, order).long()
    carried = None if _holds_ages(layer) else slots.scores[rows, :, :stored].gather(-1, order)
    return _Candidates(
        torch.cat([slots.keys[rows, :, :stored].gather(2, spread), keys], dim=2),
        torch.cat([slots.values[rows, :, :stored].gather(2, spread), values], dim=2),
        queries,
        torch.cat([old_positions, positions], dim=2),
        None if carried is None else torch.cat([carried, carried.new_zeros(shape)], dim=2),
        seen,
    )


def _carried_columns(layer: WindowLayer, rows: slice, columns: Tensor | slice) -> Tensor | None:
    """fp32 [B, K, N]: what earlier turns that fitted the budget have left in the column scores, if there was one."""
    if layer.column_scores is None or _holds_ages(layer):
        return None
    return column_scores(layer)[rows][:, :, columns].clone()  # the scores will be written over


def _holds_ages(layer: WindowLayer) -> bool:
    """Whether the layer's scores are ages, which no scorer could go on with."""
    return layer.config.decode_mode == "ring"


def _score(layer: WindowLayer, candidates: _Candidates, scale: float) -> Tensor | TwoLists:
    scorer, config = layer.config.scorer_object, layer.config
    scores = scorer.score(
        ScoreInputs(
            keys=candidates.keys,
            values=candidates.values,
            queries=candidates.queries,
            scale=scale,
            row_reduction=config.rows,
            group_reduction=config.groups,
            carried=candidates.carried,
            positions=candidates.positions,
            num_seen=candidates.num_seen,
            inv_freq=layer.inv_freq,
            layer_idx=layer.spec.layer_idx,
            heads=layer.heads,
        )
    )
    batch, kv_heads, num_keys, _ = candidates.keys.shape
    check_scores(scores, (batch, kv_heads, num_keys), layer.spec.layer_idx, scorer.name)
    return scores


def _keep(
    layer: WindowLayer, candidates: _Candidates, scores: Tensor | TwoLists, budgets: list[int], capacity: int
) -> SlotStore:
    budget_tensor = torch.tensor(budgets, dtype=torch.int32, device=candidates.keys.device)
    kept = select_kept(scores, budget_tensor, capacity, candidates.positions, layer.config)
    pair = ops.compact(candidates.keys, candidates.values, kept.index)
    positions = candidates.positions.gather(-1, kept.index.clamp_min(0)).masked_fill(kept.index < 0, -1)
    return _new_store(layer, pair, positions, kept.scores, kept.counts, budgets, candidates.num_seen)


def _new_store(
    layer: WindowLayer,
    keys_values: tuple[Tensor, Tensor],
    positions: Tensor,
    scores: Tensor,
    counts: Tensor,
    budgets: list[int],
    num_seen: int,
) -> SlotStore:
    config = layer.config
    limits = [UNLIMITED] * len(budgets) if config.decode_mode == "grow" else budgets
    budget_tensor = torch.tensor(limits, dtype=torch.int32, device=scores.device)
    next_positions = torch.full_like(counts, num_seen)
    positions = positions.to(torch.int32).contiguous()
    victims = ops.find_victim(
        scores,
        positions,
        counts,
        budget_tensor,
        next_positions,
        config.num_sink_tokens,
        config.num_recent_tokens,
    )
    return SlotStore(*keys_values, positions, scores.contiguous(), counts, budget_tensor, victims, next_positions)


def _all_scores(layer: WindowLayer, scores: Tensor | TwoLists, candidates: _Candidates) -> Tensor:
    """fp32 [B, K, N]: of a prompt that fits, what decoding goes on with when it has to replace."""
    batch, _, num_keys, _ = candidates.keys.shape
    everything = torch.full((batch,), num_keys, dtype=torch.int32, device=candidates.keys.device)
    return select_kept(scores, everything, num_keys, candidates.positions, layer.config).scores


def column_scores(layer: WindowLayer) -> Tensor:
    """View fp32 [B, K, num_columns] of the layer's column scores, their buffer grown to the columns' capacity."""
    columns = layer.columns
    if layer.column_scores is None:
        shape = (columns.keys.shape[0], columns.keys.shape[1], columns.capacity)
        layer.column_scores = torch.zeros(shape, dtype=torch.float32, device=columns.keys.device)
    missing = columns.capacity - layer.column_scores.shape[2]
    if missing > 0:
        layer.column_scores = torch.nn.functional.pad(layer.column_scores, (0, missing))
    return layer.column_scores[:, :, : columns.num_columns]
