"""The end of a prompt or turn: score what a window layer has gathered and keep its budget of it.

Shapes: B request, H query head, K KV head, N candidate, C slot, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.cache.layer import PromptRecord, WindowLayer
from hf_sparsekv.cache.slots import UNLIMITED, SlotStore
from hf_sparsekv.cache.upload import to_device
from hf_sparsekv.errors import CacheError, InputError
from hf_sparsekv.plan import FULL_LAYER_BLOCK
from hf_sparsekv.scorers import ScoreInputs, TwoLists
from hf_sparsekv.select import check_scores, kept_raw_scores, pin_prompt, select_kept, unpinned, with_earlier_windows


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


def check_pass_length(layer: WindowLayer, num_new: int) -> None:
    """Refuse what a bounded prefill would have to hold at once.

    Raises:
        InputError: more tokens than a chunk has.
    """
    limit = layer.config.chunk_tokens
    if limit is not None and num_new > limit:
        raise InputError(
            f"a forward pass of {num_new} tokens, but prefill='bounded' takes at most prefill_chunk_tokens={limit} "
            f"at a time: pass prefill_chunk_size={limit} to model.generate, or feed the prompt in pieces; "
            "hf_sparsekv.generate does so by itself"
        )


def is_chunk_full(layer: WindowLayer, num_coming: int = 0) -> bool:
    """Whether a bounded prefill has to select before it takes `num_coming` more columns in, or now if none come."""
    limit = layer.config.chunk_tokens
    if limit is None or layer.num_unselected == 0:
        return False
    return layer.num_unselected >= limit if num_coming == 0 else layer.num_unselected + num_coming > limit


def finish_prompt(layer: WindowLayer, scale: float) -> None:
    """End a prompt or turn: select from what no selection has seen yet.

    Raises:
        CacheError: a request of the batch got no token in this turn.
        ScoreError: the scorer returned something that cannot rank tokens.
    """
    if layer.is_prompt_open:
        is_bounded = layer.config.chunk_tokens is not None  # earlier chunks may have had a request's tokens
        for row, seen in enumerate(layer.padding.tokens):
            if (seen if is_bounded else layer.num_new(row)) == 0:
                raise CacheError(
                    f"request {row} of the batch got only padding in this turn: run it in a batch of its own"
                )
        finish_chunk(layer, scale, is_last=True)
    layer.tail.clear()
    layer.chunk_scores = None


def finish_chunk(layer: WindowLayer, scale: float, *, is_last: bool = False) -> None:
    """Select from everything the layer holds, and free the rest; `is_last` where the prompt or turn ends here.

    While no request exceeds its budget nothing is evicted and nothing moves: the layer stays what a dense cache is,
    and only remembers the scores that decoding will need.

    In a bounded prefill the prompt may go on, and scores are carried on: see `with_earlier_windows`. The observed rows
    stay too, since the last tokens of a chunk are kept and a short last chunk has too few rows of its own; but a scorer
    of every row gets each row once.

    Raises:
        ScoreError: the scorer returned something that cannot rank tokens.
    """
    tokens = layer.padding.tokens
    budgets = [layer.spec.kept_tokens(seen) for seen in tokens]
    fits = layer.slots is None and all(seen <= budget for seen, budget in zip(tokens, budgets, strict=True))
    records = [_record(layer, row, budget) for row, budget in enumerate(budgets)]
    parts, remembered, raw = [], [], []
    for rows in _uniform_rows(layer):
        if tokens[rows.start] == 0:  # all padding so far; its tokens come in a later chunk
            if not fits:
                parts.append(_empty_store(layer, budgets[rows], max(budgets)))
                raw.append(torch.zeros_like(parts[-1].scores))
            continue
        candidates = _gather(layer, rows)
        scores = _score(layer, candidates, scale, is_last)
        if fits:
            remembered.append((rows, *_all_scores(layer, scores, candidates, budgets[rows.start])))
        else:
            store, raw_scores = _keep(layer, candidates, scores, budgets[rows], max(budgets))
            parts.append(store)
            raw.append(raw_scores)
    # Nothing changes before every request is scored: a scorer that fails leaves the prompt open and whole.
    layer.chunk_scores = torch.cat(raw) if raw else None
    for rows, decode_scores, raw_scores in remembered:
        columns = layer.padding.columns_of(rows.start, 0)
        column_scores(layer)[rows][:, :, columns] = decode_scores
        if layer.chunk_scores is None:
            layer.chunk_scores = torch.zeros_like(column_scores(layer))
        layer.chunk_scores[rows][:, :, columns] = raw_scores
    if parts:
        _move_to_slots(layer, parts)
    if layer.config.chunk_tokens is None:
        layer.chunk_scores = None
    layer.prompts, layer.num_decoded, layer.num_unselected = records, 0, 0
    if layer.config.scorer_object.queries == "all" or layer.config.chunk_tokens is None:
        layer.tail.clear()
    layer.is_prompt_open = False


def make_room(layer: WindowLayer) -> None:
    """Prepare a layer for one more token: leave the columns if a request is about to exceed its budget."""
    rows = range(len(layer.prompts))
    if layer.slots is None:
        if any(layer.padding.tokens[row] >= layer.prompts[row].budget for row in rows):
            start_replacing(layer)
        else:
            return
    slots = layer.slots
    assert slots is not None
    if layer.config.decode_mode == "grow" and max(layer.num_in_slots(row) for row in rows) >= slots.capacity:
        slots.reserve(slots.capacity + FULL_LAYER_BLOCK)


def start_replacing(layer: WindowLayer) -> None:
    """Move a layer that has evicted nothing from columns to slots; those that no token takes yet are free."""
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
    observed = layer.tail.num_rows(row)
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
    carried = None
    if not _holds_ages(layer):
        carried = unpinned(slots.scores[rows, :, :stored].gather(-1, order), layer.config.num_sink_tokens)
    if layer.chunk_scores is not None:
        carried = layer.chunk_scores[rows, :, :stored]  # ascending already: nothing was decoded since
    return _Candidates(
        torch.cat([slots.keys[rows, :, :stored].gather(2, spread), keys], dim=2),
        torch.cat([slots.values[rows, :, :stored].gather(2, spread), values], dim=2),
        queries,
        torch.cat([old_positions, positions], dim=2),
        None if carried is None else torch.cat([carried, carried.new_zeros(shape)], dim=2),
        seen,
    )


def _carried_columns(layer: WindowLayer, rows: slice, columns: Tensor | slice) -> Tensor | None:
    """fp32 [B, K, N]: what earlier chunks or turns that fitted the budget have left, if there was one."""
    if layer.chunk_scores is not None:
        missing = layer.columns.num_columns - layer.chunk_scores.shape[2]
        return torch.nn.functional.pad(layer.chunk_scores, (0, missing))[rows][:, :, columns]
    if layer.column_scores is None or _holds_ages(layer):
        return None
    scores, num_new = column_scores(layer)[rows][:, :, columns], layer.num_new(rows.start)
    before = unpinned(scores[:, :, : scores.shape[2] - num_new], layer.config.num_sink_tokens)
    return torch.nn.functional.pad(before, (0, num_new))  # a copy: the scores will be written over


def _holds_ages(layer: WindowLayer) -> bool:
    """Whether the layer's scores are ages, which no scorer could go on with."""
    return layer.config.decode_mode == "ring"


def _score(layer: WindowLayer, candidates: _Candidates, scale: float, is_last: bool) -> Tensor | TwoLists:
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
            is_last=is_last,
            layer_idx=layer.spec.layer_idx,
            heads=layer.heads,
        )
    )
    batch, kv_heads, num_keys, _ = candidates.keys.shape
    check_scores(scores, (batch, kv_heads, num_keys), layer.spec.layer_idx, scorer.name)
    return scores if layer.chunk_scores is None else with_earlier_windows(scores, candidates.carried, scorer)


def _keep(
    layer: WindowLayer, candidates: _Candidates, scores: Tensor | TwoLists, budgets: list[int], capacity: int
) -> tuple[SlotStore, Tensor]:
    """The slots that stay, and their scores before pooling, fp32 [B, K, C]; budgets are equal, since lengths are."""
    budget_tensor = to_device(torch.tensor(budgets, dtype=torch.int32), candidates.keys.device)
    kept = select_kept(scores, budget_tensor, capacity, candidates.positions, layer.config)
    pair = ops.compact(candidates.keys, candidates.values, kept.index)
    positions = candidates.positions.gather(-1, kept.index.clamp_min(0)).masked_fill(kept.index < 0, -1)
    pinned = pin_prompt(kept.scores, min(candidates.keys.shape[2], budgets[0]), budgets[0], layer.config)
    store = _new_store(layer, pair, positions, pinned, kept.counts, budgets, candidates.num_seen)
    return store, kept_raw_scores(scores, kept)


def _empty_store(layer: WindowLayer, budgets: list[int], capacity: int) -> SlotStore:
    """The slots of one request that has no token yet."""
    like = layer.columns.keys if layer.slots is None else layer.slots.keys
    keys, values = (like.new_zeros(1, like.shape[1], capacity, like.shape[3]) for _ in range(2))
    scores = torch.zeros(keys.shape[:3], device=like.device)
    counts = torch.zeros(1, dtype=torch.int32, device=like.device)
    positions = torch.full_like(scores, -1, dtype=torch.int32)
    return _new_store(layer, (keys, values), positions, scores, counts, budgets, 0)


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
    budget_tensor = to_device(torch.tensor(limits, dtype=torch.int32), scores.device)
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


def _all_scores(
    layer: WindowLayer, scores: Tensor | TwoLists, candidates: _Candidates, budget: int
) -> tuple[Tensor, Tensor]:
    """Of a prompt that fits, what decoding goes on with when it has to replace, and the next chunk; fp32 [B, K, N]."""
    batch, _, num_keys, _ = candidates.keys.shape
    everything = torch.full((batch,), num_keys, dtype=torch.int32, device=candidates.keys.device)
    kept = select_kept(scores, everything, num_keys, candidates.positions, layer.config)
    return pin_prompt(kept.scores, num_keys, budget, layer.config), kept_raw_scores(scores, kept)


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
