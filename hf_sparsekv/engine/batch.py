"""Prepare a step: from what the scheduler decided to the tensors of one packed forward pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv.attention.between import PromptRemains
from hf_sparsekv.attention.packed import DecodeRows, PackedStep, PromptChunk, PromptRun, selected_before
from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.cache.tail import QueryTail
from hf_sparsekv.cache.upload import to_device
from hf_sparsekv.engine.group import Group
from hf_sparsekv.engine.request import Request
from hf_sparsekv.engine.scheduler import PrefillChunk, StepPlan
from hf_sparsekv.plan import LayerSpec
from hf_sparsekv.scorers.base import ALL_HEADS, HeadShard

LONG_PROMPT = 1024
"""Tokens from which on a prompt attends in a call of its own: backends that are fastest for one take no batches."""


@dataclass(frozen=True)
class Sampled:
    """One output token that a step computes."""

    request: Request
    output_index: int
    """Its place among the request's outputs."""


@dataclass(frozen=True)
class GroupBatch:
    """The part of a step that belongs to one group."""

    group: Group
    num_decode: int
    sampled: list[Sampled]
    """By row: decoding requests, then those whose prompt ends."""


@dataclass(frozen=True)
class Batch:
    """One packed forward pass: [decoding tokens of every group ; pieces of prompts]."""

    step: PackedStep
    groups: list[GroupBatch]
    prompt_ids: Tensor
    """int64 [prompt tokens]."""
    prompt_positions: Tensor
    """int64 [prompt tokens]."""
    logit_index: Tensor | None
    """int64 [sampled tokens], group by group; None = all tokens."""
    scored: list[Request]
    """Requests whose prompt ends here and has window layers to select for."""

    @property
    def is_decode_only(self) -> bool:
        """Whether no prompt is part of it."""
        return not self.step.chunks


class BatchBuilder:
    """Turns plans into batches, and keeps what a prompt leaves between its chunks."""

    def __init__(
        self, pool: PagePool, inv_freq: Tensor | None, device: torch.device, heads: HeadShard = ALL_HEADS
    ) -> None:
        """A builder for one engine; `heads` are this rank's."""
        self._heads = heads
        self._pool, self._inv_freq, self._device = pool, inv_freq, device
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self._tails: dict[str, dict[int, QueryTail]] = {}
        self._remains: dict[str, PromptRemains] = {}

    def build(self, plan: StepPlan, groups: Mapping[Any, Group]) -> Batch:
        """The batch of a step; admits requests whose prompt ends to rows, and uploads their tables.

        Args:
            plan: what runs.
            groups: by the requests' group key; rows hold exactly the requests of `plan.decode`.
        """
        self._grow_tables(plan, groups)
        decode, offset, counts = [], 0, {}
        for key, group in groups.items():
            counts[key] = len(group.requests)
            if group.requests:
                longest = max(request.cached_length for request in group.requests)
                decode.append(DecodeRows(group.rows, offset, len(group.requests), longest))
                offset += len(group.requests)
        num_decode, chunks, ends = offset, [], []
        for planned in plan.prefill:
            chunk = self._chunk(planned, groups[planned.request.group], offset)
            chunks.append(chunk)
            offset += chunk.length
            if chunk.is_last:
                ends.append((planned.request, offset - 1))
        batches, index, first = [], [], 0
        for key, group in groups.items():
            if not group.requests:
                continue
            own_ends = [at for request, at in ends if request.group == key]
            index += [*range(first, first + counts[key]), *own_ends]
            first += counts[key]
            sampled = [Sampled(request, request.num_scheduled_outputs - 1) for request in group.requests]
            batches.append(GroupBatch(group, counts[key], sampled))
        scored = [request for request, _ in ends if any(not spec.is_full for spec in request.plan.layers)]
        if not chunks:
            return Batch(PackedStep(self._pool, decode, [], []), batches, self._nothing, self._nothing, None, scored)
        ids = [c.request.prompt_ids[c.start : c.start + c.length] for c in plan.prefill]
        positions = [np.arange(c.start, c.start + c.length) for c in plan.prefill]
        assert first == num_decode
        return Batch(
            PackedStep(self._pool, decode, chunks, _runs(chunks, self._device)),
            batches,
            self._upload(np.concatenate(ids).astype(np.int64)),
            self._upload(np.concatenate(positions)),
            self._upload(np.asarray(index, dtype=np.int64)),
            scored,
        )

    def forget(self, request: Request) -> None:
        """Drop what a prompt left between chunks, when its request ends or starts again."""
        self._tails.pop(request.request_id, None)
        self._remains.pop(request.request_id, None)

    def _grow_tables(self, plan: StepPlan, groups: Mapping[Any, Group]) -> None:
        entries: dict[Any, list[tuple[int, int, int, int]]] = {}
        for request, layer, index, block in plan.grown:
            place = groups[request.group].rows.places[layer]
            assert request.row is not None
            entries.setdefault(request.group, []).append((place.index, request.row, index, block))
        for key, values in entries.items():
            layers, rows, indexes, blocks = self._upload(np.asarray(values, dtype=np.int64).T.copy())
            groups[key].rows.append_tables[layers, rows, indexes] = blocks.int()

    def _chunk(self, planned: PrefillChunk, group: Group, offset: int) -> PromptChunk:
        request, rows = planned.request, group.rows
        tables = request.tables
        assert tables is not None
        pages = -(-len(request.prompt_ids) // self._pool.page_size)
        is_whole = planned.start == 0 and planned.is_last
        in_order = [p.spec.is_full or not is_whole or tables.has_staging(i) for i, p in enumerate(rows.places)]
        with_table = [layer for layer, has_order in enumerate(in_order) if has_order]
        ordered = np.zeros((len(with_table), pages), dtype=np.int32)
        for i, layer in enumerate(with_table):
            blocks = tables.prompt_blocks(layer)[:pages]
            ordered[i, : len(blocks)] = blocks
        stacked = self._upload(ordered)
        selected = selected_before(rows.plan.chunk_tokens, planned.start)
        first = [planned.start - _num_dropped(rows.places[layer].spec, selected) for layer in with_table]
        slots = self._slots_of(stacked, min(first, default=0), max(first, default=0) + planned.length)
        none: list[Tensor | None] = [None] * len(rows.places)
        prompt_tables, prompt_slots = list(none), list(none)
        for layer, table, place, begin in zip(with_table, stacked.unbind(), slots.unbind(), first, strict=True):
            begin -= min(first)
            prompt_tables[layer], prompt_slots[layer] = table, place[begin : begin + planned.length]
        # What goes on reads every layer's pages: then all have a table, and their places are made at once.
        stored_rows = self._pool.head_rows(stacked).unbind() if planned.start > 0 else ()
        kept = self._kept_tables(request, group) if planned.is_last else ()
        tails = self._tails.setdefault(request.request_id, {})
        remains = self._remains.setdefault(request.request_id, PromptRemains())
        if planned.is_last:
            self.forget(request)
        return PromptChunk(
            rows,
            request.row if request.row is not None else -1,
            offset,
            planned.start,
            planned.length,
            planned.is_last,
            tables.max_length,
            tuple(prompt_tables),
            tuple(prompt_slots),
            kept,
            tails,
            self._inv_freq,
            self._heads,
            remains=remains,
            stored_rows=stored_rows,
        )

    def _slots_of(self, tables: Tensor, begin: int, end: int) -> Tensor:
        """Places int64 [L, end - begin] in the pool of the tokens `begin` to `end` behind tables int32 [L, M]."""
        size = self._pool.page_size
        first_page = begin // size
        pages = tables[:, first_page : -(-end // size)].long() * size
        slots = (pages[:, :, None] + torch.arange(size, device=self._device)).flatten(1)
        return slots[:, begin - first_page * size : end - first_page * size]

    def _kept_tables(self, request: Request, group: Group) -> tuple[Tensor, ...]:
        """Admit a request to its row and write the row's tables and lengths; the tables per layer."""
        rows, tables = group.rows, request.tables
        assert tables is not None
        row = group.admit(request)
        group.sampler.set_row(row, request.params, request.seed, request.prompt_ids)
        prompt = len(request.prompt_ids)
        slot_table = np.zeros(rows.slot_tables.shape[1], dtype=np.int32)
        append_table = np.zeros((len(rows.append_tables), rows.append_tables.shape[2]), dtype=np.int32)
        lengths = np.zeros(len(append_table), dtype=np.int32)
        for place in rows.places:
            blocks = tables.own_blocks(place.spec.layer_idx)
            if place.is_append:
                append_table[place.index, : len(blocks)] = blocks
                lengths[place.index] = min(prompt, place.spec.kept_tokens(prompt))
            else:
                slot_table[place.first_page : place.first_page + len(blocks)] = blocks
        rows.slot_tables[row] = self._upload(slot_table)
        rows.append_tables[:, row] = self._upload(append_table)
        rows.append_lengths[:, row] = self._upload(lengths)
        rows.positions[row] = prompt
        rows.is_active[row] = 1
        return tuple(rows.append_tables[p.index, row] if p.is_append else rows.slot_table(p)[row] for p in rows.places)

    def _upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        return to_device(torch.from_numpy(values), self._device)


def _num_dropped(spec: LayerSpec, selected: int) -> int:
    """Tokens of a prompt that a layer no longer holds when its last selection was from the first `selected`."""
    return 0 if spec.is_full or selected == 0 else max(0, selected - spec.kept_tokens(selected))


def _runs(chunks: list[PromptChunk], lengths_device: torch.device) -> list[PromptRun]:
    """Long prompts alone, neighbouring short ones together: one call each."""
    runs: list[list[PromptChunk]] = []
    for chunk in chunks:
        if chunk.start > 0:
            continue
        last = runs[-1] if runs else []
        is_neighbour = bool(last) and last[-1].offset + last[-1].length == chunk.offset
        if is_neighbour and chunk.length < LONG_PROMPT and last[-1].length < LONG_PROMPT:
            last.append(chunk)
        else:
            runs.append([chunk])
    bounds = [np.cumsum([0, *(chunk.length for chunk in run)], dtype=np.int32) for run in runs]
    return [
        PromptRun(run, to_device(torch.from_numpy(bound), lengths_device))
        for run, bound in zip(runs, bounds, strict=True)
    ]
