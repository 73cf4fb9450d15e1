"""RowState: what the device knows of the running requests that share one configuration.

Row r of every tensor belongs to one request; the running requests are the first rows, so that a decode step works on
plain slices of fixed addresses. Shapes: R row, L layer of a kind, K KV head, C slot, M page of a block table.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.plan import LayerPlan, LayerSpec


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's state is."""

    spec: LayerSpec
    is_append: bool
    """Whether decoding appends (full layers, and window layers that grow), or replaces within a budget."""
    index: int
    """Among the layers of its kind, bottom first."""
    capacity: int
    """Slots of a replacing layer; 0 for an appending one."""
    first_slot: int
    first_page: int


@dataclass(frozen=True)
class SlotViews:
    """A replacing layer's state of the first R rows, views of it."""

    positions: Tensor
    scores: Tensor
    lengths: Tensor
    budgets: Tensor
    victims: Tensor
    next_positions: Tensor
    table: Tensor


class RowState:
    """Block tables, lengths, positions and scores of up to R requests, and the token that each decodes next."""

    def __init__(
        self,
        config: SparseKVConfig,
        plan: LayerPlan,
        *,
        num_rows: int,
        num_kv_heads: int,
        page_size: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        """State for R = `num_rows` requests of at most `max_length` tokens; `num_kv_heads` are those of this rank."""
        self.config, self.plan = config, plan
        self.num_rows, self.max_length = num_rows, max_length
        self.places = _places(plan, max_length, page_size)
        appends = [place for place in self.places if place.is_append]
        replaces = [place for place in self.places if not place.is_append]
        num_slots = sum(place.capacity for place in replaces)
        num_pages = sum(ceil(place.capacity / page_size) for place in replaces)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = ints(num_rows, dtype=torch.int64)
        """int64 [R], the token whose key and value come next."""
        self.positions = ints(num_rows, dtype=torch.int64)
        """int64 [R], its position."""
        self.is_active = ints(num_rows)
        """int32 [R], 1 where a request is decoding; other rows do nothing that matters."""
        self.append_lengths = ints(len(appends), num_rows)
        self.append_tables = ints(len(appends), num_rows, ceil(max_length / page_size))
        self.slot_lengths = ints(len(replaces), num_rows)
        self.slot_budgets = ints(len(replaces), num_rows)
        self.slot_next = ints(len(replaces), num_rows)
        self.victims = ints(len(replaces), num_rows, num_kv_heads, dtype=torch.int64)
        self.slot_tables = ints(num_rows, num_pages)
        self._slot_positions = ints(num_rows, num_kv_heads * num_slots)
        self._slot_scores = torch.zeros(num_rows, num_kv_heads * num_slots, device=device)
        self._num_kv_heads, self._page_size = num_kv_heads, page_size
        self._views: tuple[int, dict[int, SlotViews]] = (0, {})
        self.clear(slice(0, num_rows))

    @staticmethod
    def row_bytes(plan: LayerPlan, num_kv_heads: int, page_size: int, max_length: int) -> int:
        """Bytes of one row."""
        places = _places(plan, max_length, page_size)
        appends = sum(place.is_append for place in places)
        slots = sum(place.capacity for place in places)
        pages = sum(ceil(place.capacity / page_size) for place in places)
        replaces = len(places) - appends
        tables = 4 * appends * (ceil(max_length / page_size) + 1)
        return 20 + tables + replaces * (12 + 8 * num_kv_heads) + slots * num_kv_heads * 8 + 4 * pages

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def slot_positions(self, place: LayerPlace) -> Tensor:
        """View int32 [R, K, C] of a replacing layer."""
        return self._slots(self._slot_positions, place)

    def slot_scores(self, place: LayerPlace) -> Tensor:
        """View fp32 [R, K, C] of a replacing layer."""
        return self._slots(self._slot_scores, place)

    def slot_table(self, place: LayerPlace) -> Tensor:
        """View int32 [R, M] of a replacing layer."""
        return self.slot_tables[:, place.first_page : place.first_page + ceil(place.capacity / self._page_size)]

    def slot_views(self, place: LayerPlace, count: int) -> SlotViews:
        """A replacing layer's state of the first `count` rows; remembered until another number is asked for.

        Nothing here ever moves, and steps with prompts come one after the other with as many rows.
        """
        if self._views[0] != count:
            self._views = (count, {})
        views, i = self._views[1], place.index
        if i not in views:
            views[i] = SlotViews(
                self.slot_positions(place)[:count],
                self.slot_scores(place)[:count],
                self.slot_lengths[i, :count],
                self.slot_budgets[i, :count],
                self.victims[i, :count],
                self.slot_next[i, :count],
                self.slot_table(place)[:count],
            )
        return views[i]

    def set_slots(self, row: int, positions: Tensor, scores: Tensor) -> None:
        """Write a row of all replacing layers: int and fp32 [K * C of every layer, bottom first]."""
        self._slot_positions[row] = positions
        self._slot_scores[row] = scores

    def move(self, source: int, target: int) -> None:
        """Make row `target` what row `source` is, and clear `source`."""
        for tensor in self._per_row():
            tensor[..., target] = tensor[..., source]
        self.append_tables[:, target] = self.append_tables[:, source]
        self.victims[:, target] = self.victims[:, source]
        for tensor in (self.slot_tables, self._slot_positions, self._slot_scores):
            tensor[target] = tensor[source]
        self.clear(slice(source, source + 1))

    def clear(self, rows: slice) -> None:
        """Make rows harmless: they write to page 0 and read at most one slot of it."""
        for tensor in self._per_row():
            tensor[..., rows] = 0
        self.append_tables[:, rows] = 0
        self.slot_tables[rows] = 0
        self.victims[:, rows] = 0
        self.slot_budgets[:, rows] = 1

    def _per_row(self) -> tuple[Tensor, ...]:
        """Tensors whose last dimension is the row."""
        return (
            self.tokens,
            self.positions,
            self.is_active,
            self.append_lengths,
            self.slot_lengths,
            self.slot_budgets,
            self.slot_next,
        )

    def _slots(self, flat: Tensor, place: LayerPlace) -> Tensor:
        first, heads = place.first_slot * self._num_kv_heads, self._num_kv_heads
        part = flat[:, first : first + heads * place.capacity]
        return part.view(self.num_rows, heads, place.capacity)


def _places(plan: LayerPlan, max_length: int, page_size: int) -> tuple[LayerPlace, ...]:
    places: list[LayerPlace] = []
    counts = {True: 0, False: 0}
    slot = page = 0
    for spec in plan.layers:
        is_append = spec.is_full or plan.grows
        capacity = 0 if is_append else min(spec.kept_tokens(max_length), max_length)
        places.append(LayerPlace(spec, is_append, counts[is_append], capacity, slot, page))
        counts[is_append] += 1
        slot, page = slot + capacity, page + ceil(capacity / page_size)
    return tuple(places)
