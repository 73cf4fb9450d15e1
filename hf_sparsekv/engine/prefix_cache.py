"""PrefixCache: a block pool that remembers which tokens its blocks hold, until somebody else needs the blocks.

An entry is one block of a prompt in every layer. Its keys and values depend on its own tokens and on all tokens before
them, and on nothing else, so an entry is known by the entry before it and its own tokens: a chain from the first token
of the prompt. Entries are looked up by hash, and compared: equal hashes of other tokens are no hit.

A block has holders: the requests that have it in a table, and the cache. It is free when it has none. An entry may go
at any time: requests that hold its blocks keep them. It knows numbers only: no layers, no requests, no tensors.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hf_sparsekv.engine.block_pool import HELD, BlockPool, Blocks

_ROOT = 0
"""The number of what comes before the first block."""

_CACHED = 1
"""What the cache adds to the state of a block that it holds."""

_Key = tuple[int, tuple[int, ...]]
"""The number of the entry before, and the tokens: numbers are never used again, so equal keys are equal prefixes."""


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """The beginning of a prompt whose keys and values are stored, block by block; its length is in blocks."""

    numbers: list[int]
    """Of its entries."""
    blocks: Blocks
    """int32 [entries, layers]."""

    def __len__(self) -> int:
        """Blocks of tokens."""
        return len(self.numbers)


NO_PREFIX = Prefix([], np.zeros((0, 0), dtype=np.int32))


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
        self._num_idle = self._num_cached = 0
        """Blocks that nobody but the cache holds; that it holds at all."""
        # In plain tuples of numbers, which Python's garbage collector need not look through.
        self._entries: dict[_Key, tuple[int, int]] = {}
        """An entry's number, and its row in `_rows`."""
        self._by_use: OrderedDict[int, _Key] = OrderedDict()
        """Entries by number, from the least to the most recently used; each is before the one that it continues."""
        self._rows = NO_PREFIX.blocks
        """int32 [rows, layers], the blocks of entries. A block is in one entry at the most, so there are enough."""
        self._free_rows: list[int] = []
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

    def allocate(self, count: int) -> Blocks:
        """Take blocks, all or none; entries go where fewer are free.

        Returns:
            int32 [count], the caller's own.
        Raises:
            PoolError: more than `num_free`; nothing is taken, and no entry goes.
        """
        self._check_count(count)
        while (missing := count - len(self._free)) > 0:
            self._evict(-(-missing // self._rows.shape[1]))  # as many entries as it takes at the least
        return self._take(count)

    def free(self, blocks: Sequence[int] | Blocks) -> None:
        """Let go of blocks, one holder of each, all or none.

        Raises:
            PoolError: one is not of this pool, free already (so are those that only the cache holds), or named twice;
                nothing changes.
        """
        named = self._held(blocks)
        left = self._state[named] - HELD
        self._state[named] = left
        self._num_idle += int(np.count_nonzero(left == _CACHED))
        self.num_holder_changes += 1
        self._put_back(named[left == 0][::-1])

    # --- prefixes -------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int], most: int, before: Prefix = NO_PREFIX) -> Prefix:
        """The longest known prefix of `tokens` that has at most `most` tokens; nothing changes.

        Args:
            tokens, most: what is looked for.
            before: what is known to have been there. Only what came and went since is looked at: an entry goes after
                all that continue it. Where that is nothing, the result is `before` itself.
        """
        num_kept, entries = len(before), self._entries
        while num_kept and before.numbers[num_kept - 1] not in self._by_use:
            num_kept -= 1
        numbers, rows = before.numbers[:num_kept], []
        number = numbers[-1] if numbers else _ROOT
        for piece in self._pieces(tokens, most, num_kept):
            entry = entries.get((number, piece))
            if entry is None:
                break
            number, row = entry
            numbers.append(number)
            rows.append(row)
        if not rows and num_kept == len(before):
            return before
        return Prefix(numbers, _joined(before.blocks[:num_kept], self._rows[rows]))

    def num_held(self, blocks: Sequence[int] | Blocks) -> int:
        """How many of these cached blocks somebody else than the cache holds too: sharing them takes nothing."""
        states = self._state[np.asarray(blocks, dtype=np.intp)]
        return int(np.count_nonzero(states != _CACHED))

    def share(self, prefix: Prefix, blocks: Sequence[int] | Blocks) -> None:
        """Become one more holder of blocks, and mark the entries as used.

        Args:
            prefix: as `find` gave it, with no `allocate` in between.
            blocks: of these entries, each once; to be given to `free` like those that were allocated.
        """
        named = np.asarray(blocks, dtype=np.intp)
        states = self._state[named]
        assert (states & _CACHED).all(), "what is shared is in the cache"
        self._num_idle -= int(np.count_nonzero(states == _CACHED))
        self._state[named] = states + HELD
        self.num_holder_changes += 1
        self._touch(prefix.numbers)

    def insert(self, tokens: Sequence[int], tables: Blocks, before: Prefix = NO_PREFIX) -> Prefix:
        """Remember whole blocks of tokens, and mark them as used; for what is known already, nothing else changes.

        Args:
            tokens: from the first token of a prompt on.
            tables: int32 [layers, blocks], per layer the blocks that hold them in order; somebody holds them, and
                nobody will write to those that are full.
            before: what was known of the tokens at some time, if anything.
        Returns:
            What is known of them now.
        """
        most = min(len(tokens), tables.shape[1] * self.block_size)
        known = self.find(tokens, most, before)
        new = tables[:, len(known) : most // self.block_size].T
        numbers, rows = known.numbers.copy(), self._take_rows(*new.shape)
        number = numbers[-1] if numbers else _ROOT
        for row, piece in zip(rows, self._pieces(tokens, most, len(known)), strict=True):
            key = (number, piece)
            self._last_number = number = self._last_number + 1
            self._entries[key] = number, row
            self._by_use[number] = key
            numbers.append(number)
        self._rows[rows] = new
        self._state[new] += _CACHED
        self._num_cached += new.size
        self._touch(numbers)
        return Prefix(numbers, _joined(known.blocks, new))

    def clear(self) -> None:
        """Forget every prefix."""
        self._evict(len(self._entries))

    def _touch(self, numbers: Sequence[int]) -> None:
        for number in reversed(numbers):  # the first block last: it is needed by all others
            self._by_use.move_to_end(number)

    def _take_rows(self, count: int, num_layers: int) -> list[int]:
        if self._rows.shape[1] != num_layers:
            assert not self._entries, "all entries are of one model"
            self._rows = np.zeros((self.num_usable // num_layers, num_layers), dtype=np.int32)
            self._free_rows = list(range(len(self._rows)))
        start = len(self._free_rows) - count
        taken = self._free_rows[start:]
        del self._free_rows[start:]
        return taken

    def _evict(self, count: int) -> None:
        """Let go of the entries that were not used for the longest time."""
        rows = []
        for _ in range(count):
            _, key = self._by_use.popitem(last=False)
            rows.append(self._entries.pop(key)[1])
        self._free_rows += rows
        self.num_evicted += count
        blocks = self._rows[rows].ravel()
        self._num_cached -= len(blocks)
        left = self._state[blocks] - _CACHED
        self._state[blocks] = left
        unheld = blocks[left == 0]
        self._num_idle -= len(unheld)
        self._put_back(unheld)

    def _pieces(self, tokens: Sequence[int], most: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The tokens of whole blocks, from block `first` on."""
        size = self.block_size
        part = iter(tokens[first * size : max(0, min(most, len(tokens)) // size * size)])
        return zip(*[part] * size, strict=True)


def _joined(first: Blocks, second: Blocks) -> Blocks:
    """Blocks [entries, layers] of one prefix."""
    return np.concatenate([first, second]) if len(first) else second
