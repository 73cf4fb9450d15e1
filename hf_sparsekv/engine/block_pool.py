"""BlockPool: which blocks of the KV storage are free. It knows numbers only: no layers, no requests, no tensors.

A prompt's blocks come and go by the thousand, while the device waits for the host or nearly so. So they are numpy
arrays, and what is done to all of them is one operation.
"""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hf_sparsekv.errors import PoolError

NULL_BLOCK = 0
"""Never allocated: writes of padding rows go there."""

HELD = 2
"""What each request that holds a block adds to the block's state; 1 is left to the prefix cache, and 0 is free."""

Blocks = NDArray[np.int32]
"""Numbers of blocks."""


class BlockPool:
    """The free list of a storage of `num_blocks` blocks.

    The blocks given back last are taken first: their memory is the likeliest to be in a cache still.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise PoolError(f"a pool needs the null block and one more: got num_blocks={num_blocks}, give at least 2")
        self.num_blocks = num_blocks
        self._stack = np.arange(num_blocks - 1, NULL_BLOCK, -1, dtype=np.int32)
        self._free = self._stack
        """The free blocks: the lower end of a stack that has room for all."""
        self._state = np.zeros(num_blocks, dtype=np.int32)
        self._places = np.zeros(num_blocks, dtype=np.int32)
        """Scratch: per block its place among those that a call names."""

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

    def allocate(self, count: int) -> Blocks:
        """Take blocks, all or none, in O(count).

        Returns:
            int32 [count], the caller's own.
        Raises:
            PoolError: fewer are free; nothing is taken.
        """
        self._check_count(count)
        return self._take(count)

    def _take(self, count: int) -> Blocks:
        start = len(self._free) - count
        taken = self._free[start:][::-1].copy()
        self._free = self._free[:start]
        self._state[taken] = HELD
        return taken

    def _check_count(self, count: int) -> None:
        if not 0 <= count <= self.num_free:
            raise PoolError(
                f"cannot allocate {count} blocks: {self.num_free} of {self.num_usable} are free; "
                "check num_free first, or free some"
            )

    def free(self, blocks: Sequence[int] | Blocks) -> None:
        """Give blocks back, all or none, in O(len(blocks)).

        Raises:
            PoolError: one is not of this pool, free already, or named twice; nothing is given back.
        """
        named = self._held(blocks)
        self._state[named] = 0
        self._put_back(named[::-1])

    def _put_back(self, blocks: NDArray[np.integer]) -> None:
        """Make blocks free; the last one is taken next."""
        start = len(self._free)
        self._free = self._stack[: start + len(blocks)]
        self._free[start:] = blocks

    def _held(self, blocks: Sequence[int] | Blocks) -> NDArray[np.intp]:
        """The blocks, once it is sure that somebody holds them and none is named twice; what arrays are indexed with.

        Raises:
            PoolError: as `free`.
        """
        named = np.asarray(blocks, dtype=np.intp)
        if named.view(np.uintp).max(initial=0) >= self.num_blocks:  # where a negative number is a huge one
            self._refuse(named)
        # Of a block that is named twice, the first place is overwritten.
        places = np.arange(len(named), dtype=np.int32)
        self._places[named] = places
        if not ((self._state[named] >= HELD) & (self._places[named] == places)).all():
            self._refuse(named)
        return named

    def _refuse(self, named: NDArray[np.intp]) -> NoReturn:
        blocks: list[int] = named.tolist()
        for block in blocks:
            if not NULL_BLOCK < block < self.num_blocks:
                raise PoolError(f"block {block} is not of this pool: its blocks are 1 to {self.num_usable}")
            if self._state[block] < HELD:
                raise PoolError(f"block {block} is free already: free a block once, by whoever allocated it")
        twice = next(block for block in blocks if blocks.count(block) > 1)
        raise PoolError(f"block {twice} is named twice in one call: free a block once")
