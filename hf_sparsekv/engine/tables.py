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

if TYPE_CHECKING:
    # The plan's own imports lead to torch; here it is only looked at.
    from hf_sparsekv.engine.block_pool import BlockPool
    from hf_sparsekv.engine.prefix_cache import CachedBlock, PrefixCache
    from hf_sparsekv.plan import LayerPlan


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens of one layer."""
    return -(-tokens // block_size)


class RequestTables:
    """The block tables of one request.

    Args:
        plan: what each layer keeps.
        prompt_length: tokens, at least 1.
        max_length: prompt and the most tokens it may generate.
        block_size: tokens of a block.
        stages_all: whether window layers that keep the whole prompt are staged like the others.
    """

    blocks: list[list[int]]
    """Per layer, the block of slots `[i * block_size, (i + 1) * block_size)` at index i; empty before `allocate`."""
    staging: list[list[int]]
    """Per layer the same for the prompt's tokens in order; empty where the layer needs none. In a bounded prefill, the
    blocks that follow `blocks`."""

    def __init__(
        self, plan: "LayerPlan", prompt_length: int, max_length: int, block_size: int, *, stages_all: bool = False
    ) -> None:
        self.prompt_length, self.max_length, self.block_size = prompt_length, max_length, block_size
        self.blocks = [[] for _ in plan.layers]
        self.staging = [[] for _ in plan.layers]
        # A layer either has a fixed number of slots, or as many as tokens were seen, less an offset.
        self._fixed_slots: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._staging: dict[int, int] = {}
        self._chunk = plan.chunk_tokens
        self.window_layers = [layer for layer, spec in enumerate(plan.layers) if not spec.is_full]
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

    def prompt_blocks(self, layer: int) -> list[int]:
        """The blocks that take a window layer's tokens while its prompt is computed in pieces."""
        own, staging = self.blocks[layer], self.staging[layer]
        return own + staging if self._chunk else staging or own

    def growth(self, length: int) -> int:
        """Blocks that `grow` to `length` tokens would take; O(1) while the last block of every layer has room."""
        if length <= self._capacity:
            return 0
        return sum(self._missing(layer, length) for layer in self._offsets)

    def allocate(self, pool: "BlockPool", length: int, staged: bool) -> None:
        """Fill tables that are empty or begin with a shared prefix, for `length` tokens, at least the prompt.

        Raises:
            PoolError: fewer than `demand(length, staged) - num_blocks` blocks are free; nothing is taken.
        """
        assert self._capacity == 0, "tables are filled once"
        free = iter(pool.allocate(self.demand(length, staged) - self.num_blocks))
        for layer, table in enumerate(self.blocks):
            count = blocks_for(self.num_slots(layer, length), self.block_size) - len(table)
            table.extend(next(free) for _ in range(count))
        if staged:
            for layer, count in self._staging.items():
                table = self.staging[layer]
                table.extend(next(free) for _ in range(count - len(table)))
        self._capacity = self._tokens_that_fit(length)

    def begin_with(self, cache: "PrefixCache", prefix: "Sequence[CachedBlock]") -> None:
        """Share the blocks of a cached prefix; to be followed by `allocate`, staged.

        Args:
            cache: the pool.
            prefix: as it was found, less than the prompt.
        """
        assert self.num_blocks == 0, "a prefix comes first"
        windows = set(self.window_layers)
        cache.share(prefix, [block for entry in prefix for block in entry.blocks])
        for layer in range(len(self.blocks)):
            table = self.staging[layer] if layer in windows else self.blocks[layer]
            table.extend(entry.blocks[layer] for entry in prefix)

    def missing_to_store(self) -> int:
        """Blocks that `stage_to_store` would take; 0 if every token of the prompt has its place."""
        missing = sum(not self.staging[layer] for layer in self.window_layers)
        return missing * blocks_for(self.prompt_length, self.block_size)

    def stage_to_store(self, pool: "BlockPool") -> None:
        """Give each window layer that has none a staging table, so that the prefix cache can take the prompt over.

        Raises:
            PoolError: fewer than `missing_to_store()` blocks are free; nothing is taken.
        """
        count = blocks_for(self.prompt_length, self.block_size)
        free, first = pool.allocate(self.missing_to_store()), 0
        for layer in self.window_layers:
            if not self.staging[layer]:
                self.staging[layer] = free[first : first + count]
                first += count

    def in_order(self) -> list[list[int]] | None:
        """Per layer the blocks that hold all tokens in order; None if a window layer has no such blocks."""
        if any(not self.staging[layer] for layer in self.window_layers):
            return None
        windows = set(self.window_layers)
        return [self.staging[i] if i in windows else table for i, table in enumerate(self.blocks)]

    def grow(self, pool: "BlockPool", length: int) -> list[tuple[int, int, int]]:
        """Make the tables hold `length` tokens.

        Returns:
            The new entries, for the device's copy of the tables: (layer, index in its table, block).

        Raises:
            PoolError: fewer than `growth(length)` blocks are free; nothing is taken.
        """
        if length <= self._capacity:
            return []
        free = pool.allocate(self.growth(length))
        entries: list[tuple[int, int, int]] = []
        for layer in self._offsets:
            for _ in range(self._missing(layer, length)):
                block = free[len(entries)]
                entries.append((layer, len(self.blocks[layer]), block))
                self.blocks[layer].append(block)
        self._capacity = self._tokens_that_fit(length)
        return entries

    def release_staging(self, pool: "BlockPool") -> None:
        """Give the staging blocks back, if there are any."""
        pool.free([block for table in self.staging for block in table])
        for table in self.staging:
            table.clear()

    def release(self, pool: "BlockPool") -> None:
        """Give everything back; the tables are empty afterwards."""
        self.release_staging(pool)
        pool.free([block for table in self.blocks for block in table])
        for table in self.blocks:
            table.clear()
        self._capacity = 0

    @property
    def num_blocks(self) -> int:
        """Blocks held now, staging included."""
        return sum(map(len, self.blocks)) + sum(map(len, self.staging))

    def _staging_blocks(self, tokens: int, layer: int) -> int:
        """Blocks for so many tokens of a prompt, beside the layer's own where those take part."""
        if self._chunk is None:
            return blocks_for(tokens, self.block_size)
        own = blocks_for(self.num_slots(layer, min(self.prompt_length + 1, self.max_length - 1)), self.block_size)
        return max(0, blocks_for(tokens, self.block_size) - own)

    def _missing(self, layer: int, length: int) -> int:
        return blocks_for(self.num_slots(layer, length), self.block_size) - len(self.blocks[layer])

    def _tokens_that_fit(self, length: int) -> int:
        """Tokens that tables sized for `length` hold before a growing layer needs its next block."""
        if not self._layers_of_offset:
            return self.max_length
        size = self.block_size
        return min(blocks_for(length - offset, size) * size + offset for offset in self._layers_of_offset)
