"""RequestTables: the blocks of one request, a table per layer, and how many blocks a length needs.

A block holds the keys and values of `block_size` tokens of one layer. A full layer's table grows with the request. A
window layer's table is fixed at admission, or, when the plan grows, starts with the kept prompt and grows. A prompt
that is computed in several pieces also has staging tables: its window layers need every key until they select. So has
one that begins with blocks of the prefix cache, or will leave its own there. When the prefill is bounded they select
after every chunk, and staging is what a chunk needs beside what is kept: the kept tokens lie in the layer's own blocks,
the chunk's right behind them, the last ones in staging blocks. The prefix cache has no part in that.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hf_sparsekv.engine.block_pool import BlockPool, Blocks
from hf_sparsekv.engine.prefix_cache import NO_PREFIX, Prefix, PrefixCache

if TYPE_CHECKING:
    # The plan's own imports lead to torch; here it is only looked at.
    from hf_sparsekv.plan import LayerPlan


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens of one layer."""
    return -(-tokens // block_size)


class _LayerTables:
    """A block table for each layer: the rows of one array, each as far as its count says."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.clear()

    def clear(self) -> None:
        """Make all tables empty, without memory of their own."""
        self.counts = [0] * self._num_layers
        self.rows: Blocks = np.empty((self._num_layers, 0), dtype=np.int32)

    def __getitem__(self, layer: int) -> Blocks:
        """int32 [count], a view."""
        return self.rows[layer, : self.counts[layer]]

    def begin(self, layers: Sequence[int], blocks: Blocks) -> None:
        """Fill tables that are all empty with blocks int32 [len(layers), count]."""
        self.reserve(blocks.shape[1])
        self.rows[layers, : blocks.shape[1]] = blocks
        for layer in layers:
            self.counts[layer] = blocks.shape[1]

    def extend(self, counts: Sequence[int], blocks: Blocks) -> Blocks:
        """Take the first blocks, layer by layer, until every table has its count; those that are left over."""
        self.reserve(max(counts))
        first = 0
        for row, old, new in zip(self.rows, self.counts, counts, strict=True):
            if new > old:
                row[old:new] = blocks[first : first + new - old]
                first += new - old
        self.counts = list(counts)
        return blocks[first:]

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back, layer by layer, if there are any."""
        if any(self.counts):
            pool.free(np.concatenate([row[:count] for row, count in zip(self.rows, self.counts, strict=True)]))
            self.clear()

    def as_lists(self) -> list[list[int]]:
        """The tables, a copy."""
        return [self[layer].tolist() for layer in range(len(self.counts))]

    def reserve(self, width: int) -> None:
        """Make room for tables of so many blocks.

        Room for the longest request from the beginning would be gigabytes where a million tokens may be generated.
        """
        old = self.rows.shape[1]
        if width > old:
            rows = np.empty((self._num_layers, max(width, 2 * old)), dtype=np.int32)  # doubled: seldom copied
            rows[:, :old] = self.rows
            self.rows = rows


class RequestTables:
    """The block tables of one request.

    Args:
        plan: what each layer keeps.
        prompt_length: tokens, at least 1.
        max_length: prompt and the most tokens it may generate.
        block_size: tokens of a block.
        stages_all: whether window layers that keep the whole prompt are staged like the others.
    """

    prefix: Prefix
    """What the prefix cache had of the tokens when it was last asked for them or given them."""

    def __init__(
        self, plan: "LayerPlan", prompt_length: int, max_length: int, block_size: int, *, stages_all: bool = False
    ) -> None:
        self.prompt_length, self.max_length, self.block_size = prompt_length, max_length, block_size
        self.prefix = NO_PREFIX
        self._own_tables = _LayerTables(len(plan.layers))
        self._staging_tables = _LayerTables(len(plan.layers))
        # A layer either has a fixed number of slots, or as many as tokens were seen, less an offset.
        self._fixed_slots: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._staging: dict[int, int] = {}
        self._chunk = plan.chunk_tokens
        self.window_layers = [layer for layer, spec in enumerate(plan.layers) if not spec.is_full]
        self.full_layers = [layer for layer, spec in enumerate(plan.layers) if spec.is_full]
        for layer, spec in enumerate(plan.layers):
            kept = spec.kept_tokens(prompt_length)
            if spec.is_full:
                self._offsets[layer] = 0
            elif plan.grows:
                self._offsets[layer] = prompt_length - min(prompt_length, kept)
            else:
                self._fixed_slots[layer] = min(kept, max_length)
            if not spec.is_full and (stages_all or kept < prompt_length):
                self._staging[layer] = self._staging_blocks(plan.prefill_tokens(layer, prompt_length), layer)
        self._num_fixed_blocks = sum(blocks_for(slots, block_size) for slots in self._fixed_slots.values())
        self._num_staging_blocks = sum(self._staging.values())
        self._layers_of_offset = Counter(self._offsets.values())
        self._capacity = 0

    @property
    def blocks(self) -> list[list[int]]:
        """Per layer, the block of slots `[i * block_size, (i + 1) * block_size)` at index i; empty before `allocate`.

        A copy, for looking at; a step of thousands of tokens takes `own_blocks`.
        """
        return self._own_tables.as_lists()

    @property
    def staging(self) -> list[list[int]]:
        """Per layer the same for the prompt's tokens in order; empty where the layer needs none.

        In a bounded prefill, the blocks that follow `blocks`. A copy, too.
        """
        return self._staging_tables.as_lists()

    def own_blocks(self, layer: int) -> Blocks:
        """int32 [blocks], a layer's table; a view that holds until the tables change."""
        return self._own_tables[layer]

    def has_staging(self, layer: int) -> bool:
        """Whether a layer has staging blocks now."""
        return self._staging_tables.counts[layer] > 0

    def num_slots(self, layer: int, length: int) -> int:
        """Slots of a layer once `length` tokens (at least the prompt) were seen; staging not counted."""
        return self._fixed_slots[layer] if layer in self._fixed_slots else length - self._offsets[layer]

    def demand(self, length: int, staged: bool) -> int:
        """Blocks in total at `length` tokens (at least the prompt), with or without staging."""
        growing = sum(
            count * blocks_for(length - offset, self.block_size) for offset, count in self._layers_of_offset.items()
        )
        return self._num_fixed_blocks + growing + (self._num_staging_blocks if staged else 0)

    def is_staged(self, longest_piece: int) -> bool:
        """Whether a prompt needs staging that is computed in pieces of at most so many tokens."""
        return self.prompt_length > min(longest_piece, self._chunk or longest_piece)

    def prompt_blocks(self, layer: int) -> Blocks:
        """int32 [blocks], those that take a window layer's tokens while its prompt is computed in pieces."""
        if self._chunk:
            return np.concatenate([self._own_tables[layer], self._staging_tables[layer]])
        return (self._staging_tables if self.has_staging(layer) else self._own_tables)[layer]

    def growth(self, length: int) -> int:
        """Blocks that `grow` to `length` tokens would take; O(1) while the last block of every layer has room."""
        if length <= self._capacity:
            return 0
        return self.demand(length, staged=False) - sum(self._own_tables.counts)

    def allocate(self, pool: BlockPool, length: int, staged: bool) -> None:
        """Fill tables that are empty or begin with a shared prefix, for `length` tokens, at least the prompt.

        Raises:
            PoolError: fewer than `demand(length, staged) - num_blocks` blocks are free; nothing is taken.
        """
        assert self._capacity == 0, "tables are filled once"
        free = pool.allocate(self.demand(length, staged) - self.num_blocks)
        layers = range(len(self._own_tables.counts))
        free = self._own_tables.extend([self._num_own_blocks(layer, length) for layer in layers], free)
        if staged:
            self._staging_tables.extend([self._staging.get(layer, 0) for layer in layers], free)
        self._capacity = self._tokens_that_fit(length)

    def begin_with(self, cache: PrefixCache, prefix: Prefix) -> None:
        """Share the blocks of a cached prefix; to be followed by `allocate`, staged.

        Args:
            cache: the pool.
            prefix: as it was found, less than the prompt.
        """
        assert self.num_blocks == 0, "a prefix comes first"
        cache.share(prefix, prefix.blocks)
        self._own_tables.begin(self.full_layers, prefix.blocks[:, self.full_layers].T)
        self._staging_tables.begin(self.window_layers, prefix.blocks[:, self.window_layers].T)
        self.prefix = prefix

    def missing_to_store(self) -> int:
        """Blocks that `stage_to_store` would take; 0 if every token of the prompt has its place."""
        counts = self._staging_tables.counts
        return sum(counts[layer] == 0 for layer in self.window_layers) * blocks_for(self.prompt_length, self.block_size)

    def stage_to_store(self, pool: BlockPool) -> None:
        """Give each window layer that has none a staging table, so that the prefix cache can take the prompt over.

        Raises:
            PoolError: fewer than `missing_to_store()` blocks are free; nothing is taken.
        """
        counts = list(self._staging_tables.counts)
        for layer in self.window_layers:
            counts[layer] = counts[layer] or blocks_for(self.prompt_length, self.block_size)
        self._staging_tables.extend(counts, pool.allocate(self.missing_to_store()))

    def in_order(self) -> Blocks | None:
        """The blocks int32 [layers, blocks] that hold all tokens in order; None if a window layer has no such blocks.

        A copy, as long as the shortest table.
        """
        own, staging = self._own_tables, self._staging_tables
        shortest = min([own.counts[i] for i in self.full_layers] + [staging.counts[i] for i in self.window_layers])
        if shortest == 0:
            return None
        result = np.empty((len(own.counts), shortest), dtype=np.int32)
        for layers, tables in ((self.full_layers, own), (self.window_layers, staging)):
            if layers:
                result[layers] = tables.rows[layers, :shortest]
        return result

    def grow(self, pool: BlockPool, length: int) -> list[tuple[int, int, int]]:
        """Make the tables hold `length` tokens.

        Returns:
            The new entries, for the device's copy of the tables: (layer, index in its table, block).

        Raises:
            PoolError: fewer than `growth(length)` blocks are free; nothing is taken.
        """
        if length <= self._capacity:
            return []
        own, size = self._own_tables, self.block_size
        places = [
            (layer, index)
            for layer, offset in self._offsets.items()
            for index in range(own.counts[layer], blocks_for(length - offset, size))
        ]
        free: list[int] = pool.allocate(len(places)).tolist()
        own.reserve(max(self._num_own_blocks(layer, length) for layer in self._offsets))
        for (layer, index), block in zip(places, free, strict=True):
            own.rows[layer, index] = block
            own.counts[layer] = index + 1
        self._capacity = self._tokens_that_fit(length)
        return [(*place, block) for place, block in zip(places, free, strict=True)]

    def release_staging(self, pool: BlockPool) -> None:
        """Give the staging blocks back, if there are any."""
        self._staging_tables.release(pool)
        if self.window_layers:  # nothing more of this request will be stored
            self.prefix = NO_PREFIX

    def release(self, pool: BlockPool) -> None:
        """Give everything back; the tables are empty afterwards."""
        self._staging_tables.release(pool)
        self._own_tables.release(pool)
        self.prefix, self._capacity = NO_PREFIX, 0

    @property
    def num_blocks(self) -> int:
        """Blocks held now, staging included."""
        return sum(self._own_tables.counts) + sum(self._staging_tables.counts)

    def _staging_blocks(self, tokens: int, layer: int) -> int:
        """Blocks for so many tokens of a prompt, beside the layer's own where those take part."""
        if self._chunk is None:
            return blocks_for(tokens, self.block_size)
        own = blocks_for(self.num_slots(layer, min(self.prompt_length + 1, self.max_length - 1)), self.block_size)
        return max(0, blocks_for(tokens, self.block_size) - own)

    def _num_own_blocks(self, layer: int, length: int) -> int:
        return blocks_for(self.num_slots(layer, length), self.block_size)

    def _tokens_that_fit(self, length: int) -> int:
        """Tokens that tables sized for `length` hold before a growing layer needs its next block."""
        if not self._layers_of_offset:
            return self.max_length
        size = self.block_size
        return min(blocks_for(length - offset, size) * size + offset for offset in self._layers_of_offset)
