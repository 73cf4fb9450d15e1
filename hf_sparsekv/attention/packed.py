"""Attention of one packed forward pass of the engine: decoding requests first, then pieces of prompts.

A packed batch is one row of T tokens. Shapes: T token, H query head, K KV head, D head dim, R row of a `RowState`,
C slot, N token of a prompt.
"""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.attention.between import PromptRemains
from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.cache.rows import LayerPlace, RowState
from hf_sparsekv.cache.tail import QueryTail
from hf_sparsekv.cache.upload import to_device
from hf_sparsekv.ops.prefill_choice import gives_lse
from hf_sparsekv.scorers import ScoreInputs, TwoLists
from hf_sparsekv.scorers.base import ALL_HEADS, HeadShard
from hf_sparsekv.scorers.checks import MAX_SCORE
from hf_sparsekv.select import (
    Kept,
    check_score_shapes,
    kept_raw_scores,
    pin_prompt,
    select_kept,
    with_earlier_windows,
)


@dataclass(frozen=True)
class DecodeRows:
    """Requests of one configuration that decode one token each: the first `count` rows of their state."""

    rows: RowState
    offset: int
    """Of the first one among the T tokens."""
    count: int
    max_length: int
    """Upper bound of the tokens that an appending layer holds; part of a CUDA graph's key."""
    _new_slots: list[Tensor] = field(default_factory=list)

    def advance(self) -> None:
        """Count the new token in the appending layers; once a step, before the first layer."""
        self.rows.append_lengths[:, : self.count] += self.rows.is_active[: self.count]

    def new_slots(self, index: int, num_kv_heads: int) -> Tensor:
        """int64 [count, K], where an appending layer puts the new tokens; made for all of them at once."""
        if not self._new_slots:
            last = self.rows.append_lengths[:, : self.count].long() - 1
            self._new_slots.extend(last[:, :, None].expand(-1, -1, num_kv_heads).unbind())
        return self._new_slots[index]


@dataclass(frozen=True)
class PromptRun:
    """Neighbouring chunks that begin their prompts and attend in one call."""

    chunks: "list[PromptChunk]"
    cu_seqlens: Tensor
    """int32 [chunks + 1]."""


@dataclass(frozen=True)
class _KeptSlots:
    place: LayerPlace
    slots: Kept
    positions: Tensor
    """int64 [1, K, C], -1 where nothing is kept."""
    count: int
    budget: int


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of one prompt."""

    rows: RowState
    row: int
    """The row that the request will decode in; only the last chunk writes to it."""
    offset: int
    """Of its first token among the T tokens."""
    start: int
    """Tokens of the prompt that came before."""
    length: int
    is_last: bool
    max_length: int
    """Tokens that the request can ever have."""
    prompt_tables: tuple[Tensor | None, ...]
    """Per layer int32 [M]: pages that take the chunk's tokens in order; None where all of the prompt is at hand."""
    prompt_slots: tuple[Tensor | None, ...]
    """Per layer int64 [length]: places of the chunk's tokens in those pages; None where a selection follows at once."""
    kept_tables: tuple[Tensor, ...]
    """Per layer int32 [M]: pages that the request decodes from."""
    tails: dict[int, QueryTail]
    """Per window layer the last query rows of the chunks before."""
    inv_freq: Tensor | None = None
    heads: HeadShard = ALL_HEADS
    """Which KV heads of the model's layers this rank has."""
    kept: list[_KeptSlots] = field(default_factory=list)
    """Per replacing layer what the last chunk's selection left, until `PackedStep.finish` writes it to the row."""
    score_bounds: list[Tensor] = field(default_factory=list)
    """Lowest and highest score, fp32 scalars, of every window layer; NaN if some score is."""
    remains: PromptRemains = field(default_factory=PromptRemains)
    """What earlier selections of this prompt left, in a bounded prefill; and what the scorer raised, if it did: the
    scores are zeros then."""
    stored_rows: tuple[Tensor, ...] = ()
    """Of a prompt that goes on, per layer int64 [K, M]: `PagePool.head_rows` of its prompt table."""
    _filled: dict[int, Tensor] = field(default_factory=dict)
    _bounds: dict[int, Tensor] = field(default_factory=dict)

    def bounds(self, length: int) -> Tensor:
        """int32 [2], 0 and a length, on the device: of a call for this prompt alone."""
        if length not in self._bounds:
            bounds = torch.tensor([0, length], dtype=torch.int32)
            self._bounds[length] = to_device(bounds, self.rows.tokens.device)
        return self._bounds[length]

    def filled(self, value: int) -> Tensor:
        """int32 [1] of a number, on the device; layers that need the same one share it."""
        if value not in self._filled:
            self._filled[value] = torch.full((1,), value, dtype=torch.int32, device=self.rows.tokens.device)
        return self._filled[value]

    @property
    def seen(self) -> int:
        """Tokens of the prompt, this chunk included."""
        return self.start + self.length

    @property
    def selected(self) -> int:
        """Tokens of the prompt that window layers have selected from before."""
        return selected_before(self.rows.plan.chunk_tokens, self.start)

    @property
    def selects(self) -> bool:
        """Whether window layers select when they have seen this chunk."""
        step = self.rows.plan.chunk_tokens
        return self.is_last or (step is not None and self.seen % step == 0)

    def num_held(self, place: LayerPlace) -> int:
        """Tokens of the prompt that a layer's pages hold, this chunk included."""
        if place.spec.is_full:
            return self.seen
        return min(self.selected, place.spec.kept_tokens(self.seen)) + self.seen - self.selected


def selected_before(chunk_tokens: int | None, start: int) -> int:
    """Tokens of a prompt that have gone through a selection when `start` of them have been read."""
    return 0 if chunk_tokens is None else start // chunk_tokens * chunk_tokens


class PackedStep:
    """What the layers of one forward pass need, and the attention they call."""

    def __init__(
        self, pool: PagePool, decode: list[DecodeRows], chunks: list[PromptChunk], runs: list[PromptRun]
    ) -> None:
        """A step.

        Args:
            pool: where keys and values are.
            decode, chunks: the tokens, in this order, without gaps.
            runs: those of the chunks that begin their prompts.
        """
        self.pool, self.decode, self.chunks, self.runs = pool, decode, chunks, runs

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store the new tokens of one layer, attend, and select at the end of a prompt.

        Args:
            layer_idx: which layer.
            q: [T, H, D] after RoPE. k, v: [T, K, D], k after RoPE.
            scale: factor on the logits.
        Returns:
            [T, H, D]; rows that belong to no request hold nothing of use.
        """
        if not self.chunks and len(self.decode) == 1:
            return self._decode(self.decode[0], layer_idx, q, k, v, scale)
        self._write(layer_idx, k, v)
        if not self.decode and len(self.runs) == 1 and len(self.runs[0].chunks) == len(self.chunks):
            return self._attend_run(self.runs[0], layer_idx, q, k, v, scale).contiguous()  # all there is: as it comes
        if not self.decode and not self.runs and len(self.chunks) == 1:
            return self._attend_stored(self.chunks[0], layer_idx, q, scale).contiguous()
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in self.decode:
            at = slice(part.offset, part.offset + part.count)
            output[at] = self._decode(part, layer_idx, q[at], k[at], v[at], scale)
        for run in self.runs:
            at = slice(run.chunks[0].offset, run.chunks[-1].offset + run.chunks[-1].length)
            output[at] = self._attend_run(run, layer_idx, q[at], k[at], v[at], scale)
        for chunk in self.chunks:
            if chunk.start > 0:
                at = slice(chunk.offset, chunk.offset + chunk.length)
                output[at] = self._attend_stored(chunk, layer_idx, q[at], scale)
        return output

    def _decode(self, part: DecodeRows, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows, count, pool = part.rows, part.count, self.pool
        place, config = rows.places[layer_idx], rows.config
        i = place.index
        if place.is_append:
            lengths, table = rows.append_lengths[i, :count], rows.append_tables[i, :count]
            ops.write_slots(pool.keys, pool.values, k, v, part.new_slots(i, pool.num_kv_heads), table)
            return ops.attend_slots(q, pool.keys, pool.values, lengths, scale, part.max_length, table)
        decay, gain = config.decode_weights
        state = rows.slot_views(place, count)
        return ops.decode_step(
            q,
            k,
            v,
            pool.keys,
            pool.values,
            state.positions,
            state.scores,
            state.lengths,
            state.budgets,
            state.victims,
            state.next_positions,
            scale,
            decay,
            gain,
            config.num_sink_tokens,
            config.num_recent_tokens,
            config.decode_mode == "ring",
            state.table,
        )

    def finish(self) -> Tensor | None:
        """Write what the selections left to the rows; once a step, after the last layer.

        Returns:
            bool [prompts that ended and were scored]: whether their scores can rank tokens, see `check_scores`; None
            without any.
        """
        flags = []
        for chunk in self.chunks:
            if chunk.kept:
                _write_row(chunk)
            if chunk.score_bounds:
                can_rank = (torch.stack(chunk.score_bounds).abs() <= MAX_SCORE).all()  # NaN is not
                can_rank = chunk.remains.note(can_rank)
                if chunk.is_last:
                    flags.append(can_rank)
        return torch.stack(flags) if flags else None

    def _write(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Store what has its place in order: of full layers, and of prompts that are staged."""
        for chunk in self.chunks:
            slots = chunk.prompt_slots[layer_idx]
            if slots is not None:
                at = slice(chunk.offset, chunk.offset + chunk.length)
                ops.write_packed(self.pool.keys, self.pool.values, k[at], v[at], slots)

    def _attend_run(self, run: PromptRun, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Of prompts that begin: their tokens are all of q, k and v."""
        longest = max(chunk.length for chunk in run.chunks)
        bounds = (run.cu_seqlens, run.cu_seqlens, longest, longest)
        attended, lse = ops.attention_varlen(q, k, v, *bounds, scale, True)
        queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))
        first, has_lse = run.chunks[0].offset, gives_lse()
        for chunk in run.chunks:
            if not chunk.rows.places[layer_idx].spec.is_full:
                at = slice(chunk.offset - first, chunk.offset - first + chunk.length)
                own_lse = lse[None, :, at] if has_lse else None
                self._score(chunk, layer_idx, queries[:, :, at], keys[:, :, at], values[:, :, at], own_lse, scale)
        return attended

    def _attend_stored(self, chunk: PromptChunk, layer_idx: int, q: Tensor, scale: float) -> Tensor:
        """Of a prompt that goes on: its tokens are all of q, their keys are stored with those before."""
        place = chunk.rows.places[layer_idx]
        num_held = chunk.num_held(place)
        keys, values = self.pool.gather(chunk.stored_rows[layer_idx], num_held)
        bounds = (chunk.bounds(chunk.length), chunk.bounds(num_held), chunk.length, num_held)
        attended, lse = ops.attention_varlen(
            q, keys[0].transpose(0, 1), values[0].transpose(0, 1), *bounds, scale, True
        )
        if not place.spec.is_full:
            queries = q.transpose(0, 1)[None]
            self._score(chunk, layer_idx, queries, keys, values, lse[None] if gives_lse() else None, scale)
        return attended

    def _score(
        self,
        chunk: PromptChunk,
        layer_idx: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        lse: Tensor | None,
        scale: float,
    ) -> None:
        """Of a window layer: collect the query rows that score; when it is time select, and write what stays.

        `lse` fp32 [1, H, T] is that of the chunk's own rows over these keys, or None where it is not known.
        """
        place, config = chunk.rows.places[layer_idx], chunk.rows.config
        needed = {"none": 0, "last": config.observation_window, "all": None}[config.scorer_object.queries]
        if chunk.is_last and (chunk.start == 0 or (needed is not None and chunk.length >= needed)):
            rows = queries[:, :, 0 if needed is None else max(0, chunk.length - needed) :]
        else:
            tail = chunk.tails.setdefault(layer_idx, QueryTail(needed))
            tail.append(queries, None)
            if not chunk.selects:
                return
            rows = tail.queries
            if needed is None:
                tail.clear()  # the next chunk's rows are scored by themselves
        positions, carried = chunk.remains.candidates(layer_idx, chunk.selected, chunk.seen, keys)
        inputs = ScoreInputs(
            keys=keys,
            values=values,
            queries=rows,
            scale=scale,
            row_reduction=config.rows,
            group_reduction=config.groups,
            lse=_lse_of_last(lse, rows.shape[2]),
            carried=carried,
            positions=positions,
            num_seen=chunk.seen,
            inv_freq=chunk.inv_freq,
            is_last=chunk.is_last,
            layer_idx=layer_idx,
            key_counts=chunk.filled(keys.shape[2]),
            heads=chunk.heads,
        )
        shape = (1, keys.shape[1], keys.shape[2])
        try:
            scores = config.scorer_object.score(inputs)
            lists = check_score_shapes(scores, shape, layer_idx, config.scorer_object.name)
        except Exception as problem:  # noqa: BLE001 (a scorer's problem is that of its requests alone)
            chunk.remains.problems.append(f"{type(problem).__name__}: {problem}")
            scores = torch.zeros(shape, device=keys.device)
            lists = (scores,)
        for tensor in lists:
            chunk.score_bounds.extend(tensor.aminmax())
        scores = with_earlier_windows(scores, carried, config.scorer_object)
        self._keep(chunk, place, keys, values, scores, positions)

    def _keep(
        self,
        chunk: PromptChunk,
        place: LayerPlace,
        keys: Tensor,
        values: Tensor,
        scores: Tensor | TwoLists,
        candidates: Tensor | None,
    ) -> None:
        layer_idx = place.spec.layer_idx
        budget = min(place.spec.kept_tokens(chunk.seen), chunk.max_length)
        capacity = place.capacity or min(budget, keys.shape[2])
        counts = chunk.filled(budget), chunk.filled(keys.shape[2])
        kept = select_kept(scores, counts[0], capacity, candidates, chunk.rows.config, counts[1])
        table = chunk.kept_tables[layer_idx] if chunk.is_last else chunk.prompt_tables[layer_idx]
        assert table is not None
        ops.compact_into(self.pool.keys, self.pool.values, keys, values, kept.index, table[None])
        positions = kept.index
        if candidates is not None:
            positions = candidates.gather(-1, kept.index.clamp_min(0)).masked_fill(kept.index < 0, -1)
        count = min(budget, keys.shape[2])
        if not chunk.is_last:
            chunk.remains.keep(layer_idx, positions, kept_raw_scores(scores, kept), count)
        elif not place.is_append:
            chunk.kept.append(_KeptSlots(place, kept, positions, count, budget))


def _lse_of_last(lse: Tensor | None, num_rows: int) -> Tensor | None:
    """Of the last rows [1, H, num_rows]; None if it is not known or some of them came with an earlier chunk."""
    return None if lse is None or lse.shape[2] < num_rows else lse[:, :, lse.shape[2] - num_rows :]


def _write_row(chunk: PromptChunk) -> None:
    """Positions, scores, lengths and first victims of a request that begins to decode, all layers at once."""
    rows, row, config = chunk.rows, chunk.row, chunk.rows.config
    budgets = torch.tensor([entry.budget for entry in chunk.kept], dtype=torch.int32)
    rows.slot_lengths[:, row] = torch.cat([entry.slots.counts for entry in chunk.kept])
    rows.slot_budgets[:, row] = to_device(budgets, rows.slot_budgets.device)
    rows.slot_next[:, row] = chunk.seen
    pinned = []
    for layers in _alike(chunk.kept):
        at = slice(layers[0].place.index, layers[-1].place.index + 1)
        scores = pin_prompt(torch.cat([e.slots.scores for e in layers]), layers[0].count, layers[0].budget, config)
        rows.victims[at, row] = ops.find_victim(
            scores,
            torch.cat([entry.positions for entry in layers]).int(),
            rows.slot_lengths[at, row],
            rows.slot_budgets[at, row],
            rows.slot_next[at, row],
            config.num_sink_tokens,
            config.num_recent_tokens,
        )
        pinned.append(scores.flatten())
    rows.set_slots(row, torch.cat([entry.positions.flatten() for entry in chunk.kept]), torch.cat(pinned))


def _alike(kept: list[_KeptSlots]) -> list[list[_KeptSlots]]:
    """Neighbouring layers with as many slots, tokens and budget."""
    return [list(g) for _, g in itertools.groupby(kept, key=lambda e: (e.place.capacity, e.count, e.budget))]
