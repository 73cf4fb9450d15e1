"""PrefixCache: a block pool that remembers which tokens its blocks hold, until somebody else needs the blocks.

An entry is one block of a prompt in every layer. Its keys and values depend on its own tokens and on all tokens before
them, and on nothing else, so an entry is known by the entry before it and its own tokens: a chain from the first token
of the prompt. Entries are looked up by hash, and compared: equal hashes of other tokens are no hit.

A block has holders: the requests that have it in a table, and the cache. It is free when it has none. An entry may go
at any time: requests that hold its blocks keep them. It knows numbers only: no layers, no requests, no tensors.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.errors import PoolError

_ROOT = 0
"""The number of what comes before the first block."""

_Key = tuple[int, tuple[int, ...]]
"""The number of the entry before, and the tokens: numbers are never used again, so equal keys are equal prefixes."""


class CachedBlock(NamedTuple):
    """`block_size` tokens of a prompt whose keys and values are stored."""

    key: _Key
    number: int
    blocks: tuple[int, ...]
    """One for each layer."""


class PrefixCache(BlockPool):
    """A pool whose blocks may have several holders, and what is known of their tokens.

    What only the cache holds is handed out when nothing else is free: the entries not used for the longest time go
    first, the end of a prefix before its beginning.

    Args:
        num_blocks: the null block included.
        block_size: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        assert block_size >= 1, "a block holds tokens"
        self.block_size = block_size
        self.num_evicted = 0
        """Entries that had to go since the beginning."""
        self._holders = [0] * num_blocks
        self._is_cached = bytearray(num_blocks)
        self._num_idle = 0
        """Blocks that nobody but the cache holds."""
        # From the least to the most recently used; an entry is always before the one that it continues.
        self._entries: OrderedDict[_Key, CachedBlock] = OrderedDict()
        self._last_number = _ROOT

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now: free ones, and those that nobody but the cache holds."""
        return len(self._free) + self._num_idle

    @property
    def num_cached(self) -> int:
        """Blocks that hold a remembered prefix, in use or not."""
        return self._is_cached.count(1)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, all or none; entries go where fewer are free.

        Raises:
            PoolError: more than `num_free`; nothing is taken, and no entry goes.
        """
        if count <= self.num_free:
            while len(self._free) < count:
                self._evict()
        taken = super().allocate(count)
        for block in taken:
            self._holders[block] = 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, one holder of each, all or none.

        Raises:
            PoolError: one is not of this pool, nobody's or the cache's alone, or named twice; nothing changes.
        """
        self._check_held(blocks)
        holders, is_cached = self._holders, self._is_cached
        for block in blocks:
            if is_cached[block] and holders[block] == 1:
                raise PoolError(f"block {block} is free already, only the cache holds it: free a block once")
        unheld = []
        for block in blocks:
            holders[block] -= 1
            if holders[block] == 0:
                unheld.append(block)
            elif holders[block] == 1 and is_cached[block]:
                self._num_idle += 1
        self._give_back(unheld)

    # --- prefixes -------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int], most: int) -> list[CachedBlock]:
        """The longest known prefix of `tokens` that has at most `most` tokens, block by block; nothing changes."""
        found: list[CachedBlock] = []
        number = _ROOT
        for piece in self._pieces(tokens, most):
            entry = self._entries.get((number, piece))
            if entry is None:
                break
            found.append(entry)
            number = entry.number
        return found

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of these cached blocks somebody else than the cache holds too: sharing them takes nothing."""
        return len(blocks) - list(map(self._holders.__getitem__, blocks)).count(1)

    def share(self, prefix: Sequence[CachedBlock], blocks: Sequence[int]) -> None:
        """Become one more holder of blocks, and mark the entries as used.

        Args:
            prefix: as `find` gave it, with no `allocate` in between.
            blocks: of these entries; to be given to `free` like those that were allocated.
        """
        holders = self._holders
        for block in blocks:
            assert self._is_cached[block], "what is shared is in the cache"
            if holders[block] == 1:
                self._num_idle -= 1
            holders[block] += 1
        self._touch([entry.key for entry in prefix])

    def insert(self, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Remember whole blocks of tokens, and mark them as used; for what is known already, nothing else changes.

        Args:
            tokens: from the first token of a prompt on.
            tables: per layer the blocks that hold them in order; somebody holds them, and nobody will write to those
                that are full.
        """
        keys: list[_Key] = []
        number = _ROOT
        for index, piece in enumerate(self._pieces(tokens, len(tokens))):
            key = (number, piece)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._remember(key, tuple([table[index] for table in tables]))
            keys.append(key)
            number = entry.number
        self._touch(keys)

    def clear(self) -> None:
        """Forget every prefix."""
        while self._entries:
            self._evict()

    def _remember(self, key: _Key, blocks: tuple[int, ...]) -> CachedBlock:
        for block in blocks:
            assert self._holders[block] > 0 and not self._is_cached[block], "a held block enters the cache once"
            self._holders[block] += 1
            self._is_cached[block] = 1
        self._last_number += 1
        entry = self._entries[key] = CachedBlock(key, self._last_number, blocks)
        return entry

    def _touch(self, keys: Sequence[_Key]) -> None:
        for key in reversed(keys):  # the first block last: it is needed by all others
            self._entries.move_to_end(key)

    def _evict(self) -> None:
        entry = self._entries.popitem(last=False)[1]
        self.num_evicted += 1
        unheld = []
        for block in entry.blocks:
            self._is_cached[block] = 0
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._num_idle -= 1
                unheld.append(block)
        self._give_back(unheld)

    def _pieces(self, tokens: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
        size = self.block_size
        for end in range(size, min(most, len(tokens)) + 1, size):
            yield tuple(tokens[end - size : end])
