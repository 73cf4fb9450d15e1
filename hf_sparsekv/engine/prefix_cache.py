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

from hf_sparsekv.engine.block_pool import NULL_BLOCK, BlockPool

_ROOT = 0
"""The number of what comes before the first block."""

_CACHED, _HELD = 1, 2
"""A block's state is the sum of one for the cache and two for each request that holds it; 0 = free. One list and plain
loops: a prompt's blocks pass through here by the thousand, while the device waits for the host or nearly so."""

_Key = tuple[int, tuple[int, ...]]
"""The number of the entry before, and the tokens: numbers are never used again, so equal keys are equal prefixes."""


class CachedBlock(NamedTuple):
    """`block_size` tokens of a prompt whose keys and values are stored."""

    key: _Key
    number: int
    blocks: tuple[int, ...]
    """One for each layer."""


NO_PREFIX: Sequence[CachedBlock] = ()


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
        self._state = [0] * num_blocks
        self._num_idle = self._num_cached = 0
        """Blocks that nobody but the cache holds."""
        # From the least to the most recently used; an entry is always before the one that it continues.
        # Numbers and blocks in plain tuples of numbers, which Python's garbage collector need not look through.
        self._entries: OrderedDict[_Key, tuple[int, tuple[int, ...]]] = OrderedDict()
        self._last_number = _ROOT
        self.num_holder_changes = 0
        """Times that cached blocks got or lost holders: while it stands still, so does `num_held` of given entries."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now: free ones, and those that nobody but the cache holds."""
        return len(self._free) + self._num_idle

    @property
    def num_cached(self) -> int:
        """Blocks that hold a remembered prefix, in use or not."""
        return self._num_cached

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, all or none; entries go where fewer are free.

        Raises:
            PoolError: more than `num_free`; nothing is taken, and no entry goes.
        """
        self._check_count(count)
        while len(self._free) < count:
            self._evict()
        taken, state = self._take(count), self._state
        for block in taken:
            state[block] = _HELD
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, one holder of each, all or none.

        Raises:
            PoolError: one is not of this pool, free already (so are those that only the cache holds), or named twice;
                nothing changes.
        """
        state = self._state
        is_known = not blocks or (min(blocks) > NULL_BLOCK and max(blocks) < self.num_blocks)
        if not is_known or len(set(blocks)) != len(blocks) or any(state[block] < _HELD for block in blocks):
            self._check_blocks(blocks)  # says what is wrong
        unheld = []
        for block in blocks:
            left = state[block] = state[block] - _HELD
            if left == 0:
                unheld.append(block)
            elif left == _CACHED:
                self._num_idle += 1
        self.num_holder_changes += 1
        self._free.extend(reversed(unheld))

    def _is_free_now(self, block: int) -> bool:
        return self._state[block] < _HELD

    # --- prefixes -------------------------------------------------------------------------------------------------

    def find(
        self, tokens: Sequence[int], most: int, before: Sequence[CachedBlock] = NO_PREFIX
    ) -> Sequence[CachedBlock]:
        """The longest known prefix of `tokens` that has at most `most` tokens, block by block; nothing changes.

        Args:
            tokens, most: what is looked for.
            before: what was found the last time for the same. Only what came and went since is looked at: an entry
                goes after all that continue it. Where that is nothing, the result is `before` itself.
        """
        found, entries = list(before), self._entries
        while found and entries.get(found[-1].key, (None,))[0] != found[-1].number:
            found.pop()
        num_kept, number = len(found), found[-1].number if found else _ROOT
        for piece in self._pieces(tokens, most, num_kept):
            key = (number, piece)
            entry = self._entries.get(key)
            if entry is None:
                break
            number = entry[0]
            found.append(CachedBlock(key, *entry))
        return before if len(found) == num_kept == len(before) else found

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of these cached blocks somebody else than the cache holds too: sharing them takes nothing."""
        return len(blocks) - list(map(self._state.__getitem__, blocks)).count(_CACHED)

    def share(self, prefix: Sequence[CachedBlock], blocks: Sequence[int]) -> None:
        """Become one more holder of blocks, and mark the entries as used.

        Args:
            prefix: as `find` gave it, with no `allocate` in between.
            blocks: of these entries; to be given to `free` like those that were allocated.
        """
        state = self._state
        for block in blocks:
            assert state[block] & _CACHED, "what is shared is in the cache"
            if state[block] == _CACHED:
                self._num_idle -= 1
            state[block] += _HELD
        self.num_holder_changes += 1
        self._touch([entry.key for entry in prefix])

    def insert(self, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Remember whole blocks of tokens, and mark them as used; for what is known already, nothing else changes.

        Args:
            tokens: from the first token of a prompt on.
            tables: per layer the blocks that hold them in order; somebody holds them, and nobody will write to those
                that are full.
        """
        keys: list[_Key] = []
        number, state = _ROOT, self._state
        for piece, blocks in zip(self._pieces(tokens, len(tokens)), zip(*tables, strict=False), strict=False):
            key = (number, piece)
            entry = self._entries.get(key)
            if entry is None:
                for block in blocks:
                    state[block] += _CACHED
                self._num_cached += len(blocks)
                self._last_number += 1
                entry = self._entries[key] = (self._last_number, blocks)
            keys.append(key)
            number = entry[0]
        self._touch(keys)

    def clear(self) -> None:
        """Forget every prefix."""
        while self._entries:
            self._evict()

    def _touch(self, keys: Sequence[_Key]) -> None:
        for key in reversed(keys):  # the first block last: it is needed by all others
            self._entries.move_to_end(key)

    def _evict(self) -> None:
        _, (_, blocks) = self._entries.popitem(last=False)
        self.num_evicted += 1
        self._num_cached -= len(blocks)
        state, unheld = self._state, []
        for block in blocks:
            left = state[block] = state[block] - _CACHED
            if left == 0:
                unheld.append(block)
        self._num_idle -= len(unheld)
        self._free.extend(unheld)

    def _pieces(self, tokens: Sequence[int], most: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        size = self.block_size
        for end in range((first + 1) * size, min(most, len(tokens)) + 1, size):
            yield tuple(tokens[end - size : end])
