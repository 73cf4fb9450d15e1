"""BlockPool: which blocks of the KV storage are free. It knows numbers only: no layers, no requests, no tensors."""

from collections.abc import Sequence

from hf_sparsekv.errors import PoolError

NULL_BLOCK = 0
"""Never allocated: writes of padding rows go there."""


class BlockPool:
    """The free list of a storage of `num_blocks` blocks.

    The blocks given back last are taken first: their memory is the likeliest to be in a cache still.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise PoolError(f"a pool needs the null block and one more: got num_blocks={num_blocks}, give at least 2")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._is_free = bytearray([0] + [1] * (num_blocks - 1))

    @property
    def num_usable(self) -> int:
        """Blocks that can be allocated at all: every one but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a remembered prefix: none in this pool, see `PrefixCache`."""
        return 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, all or none, in O(count).

        Raises:
            PoolError: fewer are free; nothing is taken.
        """
        self._check_count(count)
        taken = self._take(count)
        for block in taken:
            self._is_free[block] = 0
        return taken

    def _check_count(self, count: int) -> None:
        if not 0 <= count <= self.num_free:
            raise PoolError(
                f"cannot allocate {count} blocks: {self.num_free} of {self.num_usable} are free; "
                "check num_free first, or free some"
            )

    def _take(self, count: int) -> list[int]:
        start = len(self._free) - count
        taken = self._free[start:]
        del self._free[start:]
        taken.reverse()
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, all or none, in O(len(blocks)).

        Raises:
            PoolError: one is not of this pool, free already, or named twice; nothing is given back.
        """
        self._check_blocks(blocks)
        for block in blocks:
            self._is_free[block] = 1
        self._free.extend(reversed(blocks))

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not NULL_BLOCK < block < self.num_blocks:
                raise PoolError(f"block {block} is not of this pool: its blocks are 1 to {self.num_usable}")
            if self._is_free_now(block):
                raise PoolError(f"block {block} is free already: free a block once, by whoever allocated it")
        if len(set(blocks)) != len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            raise PoolError(f"block {twice} is named twice in one call: free a block once")

    def _is_free_now(self, block: int) -> bool:
        return bool(self._is_free[block])
