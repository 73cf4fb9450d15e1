"""PrefixCache: who holds a block, what is found, and what has to go, on pools that can be counted by hand."""

import numpy as np
import pytest

from hf_sparsekv.engine.prefix_cache import PrefixCache
from hf_sparsekv.errors import PoolError

SIZE = 2


class Same(int):
    """A token whose hash is that of every other."""

    def __hash__(self):
        return 1


def stored(cache, tokens, num_layers=1):
    """Store a prompt as a request does that ends at once; its blocks per layer."""
    tables = [cache.allocate(-(-len(tokens) // SIZE)).tolist() for _ in range(num_layers)]
    cache.insert(tokens, np.asarray(tables, dtype=np.int32))
    cache.free([block for table in tables for block in table])
    return tables


def found(cache, tokens, most=99):
    return [tuple(entry) for entry in cache.find(tokens, most).blocks.tolist()]


def test_whole_blocks_are_found_up_to_the_first_difference():
    cache = PrefixCache(20, SIZE)
    one, two = stored(cache, [1, 2, 3, 4, 5], num_layers=2)
    assert found(cache, [1, 2, 3, 4, 5, 6]) == [(one[0], two[0]), (one[1], two[1])]
    assert found(cache, [1, 2, 3, 9]) == found(cache, [1, 2, 3]) == [(one[0], two[0])]
    assert found(cache, [1, 9, 3, 4]) == found(cache, [3, 4]) == found(cache, [1]) == []
    assert [len(found(cache, [1, 2, 3, 4], most)) for most in range(6)] == [0, 0, 1, 1, 2, 2]
    assert (cache.num_cached, cache.num_free) == (4, 19)


def test_the_same_tokens_after_others_are_something_else():
    cache = PrefixCache(20, SIZE)
    stored(cache, [1, 2, 5, 6])
    stored(cache, [3, 4, 5, 6])
    assert cache.num_cached == 4
    assert found(cache, [1, 2, 5, 6])[1] != found(cache, [3, 4, 5, 6])[1]


def test_equal_hashes_of_other_tokens_are_no_hit():
    prompts = [[Same(token) for token in tokens] for tokens in ([1, 2, 3, 4], [1, 2, 4, 3], [2, 1, 3, 4])]
    assert len({hash(tuple(tokens)) for tokens in prompts}) == 1
    cache = PrefixCache(20, SIZE)
    (table,) = stored(cache, prompts[0])
    assert found(cache, prompts[1]) == [(table[0],)]
    assert found(cache, prompts[2]) == []
    for tokens in prompts[1:]:
        stored(cache, tokens)
    assert len({tuple(found(cache, tokens)) for tokens in prompts}) == 3


def test_shared_blocks_stay_with_their_holder_when_the_entry_goes():
    cache = PrefixCache(5, SIZE)
    (table,) = stored(cache, [1, 2, 3, 4])
    prefix = cache.find([1, 2, 3, 4], 2)
    cache.share(prefix, prefix.blocks[0])
    assert (cache.num_free, cache.num_held(table)) == (3, 1)
    assert table[0] not in cache.allocate(3)
    assert (cache.num_free, cache.num_evicted, cache.num_cached) == (0, 1, 1)
    assert table[0] in cache.find([1, 2], 2).blocks[0]
    cache.clear()
    assert cache.num_free == 0
    cache.free([table[0]])
    assert cache.allocate(1).tolist() == [table[0]]


def test_the_longest_unused_goes_first_and_the_end_of_a_prefix_before_its_beginning():
    cache = PrefixCache(7, SIZE)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10]
    stored(cache, old)
    stored(cache, new)
    cache.share(cache.find(old, 4), ())  # used again, but for its last block
    lengths = []
    for _ in range(6):
        cache.allocate(1)
        lengths.append((len(found(cache, old)), len(found(cache, new))))
    assert lengths == [(3, 2), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0)]


def test_what_is_known_is_not_stored_twice():
    cache = PrefixCache(20, SIZE)
    (first,) = stored(cache, [1, 2, 3, 4])
    (second,) = stored(cache, [1, 2, 3, 4, 5, 6])
    assert found(cache, [1, 2, 3, 4, 5, 6]) == [(first[0],), (first[1],), (second[2],)]
    assert cache.num_cached == 3
    assert cache.num_free == 19


def test_what_went_since_it_was_known_is_stored_again():
    cache = PrefixCache(9, SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    stored(cache, tokens)
    before = cache.find(tokens, 6)
    cache.share(before, before.blocks[:2])
    taken = cache.allocate(6)  # the last block goes
    table = np.append(before.blocks[:2, 0], taken[:1])
    known = cache.insert(tokens, table[None], before)
    assert known.numbers[:2] == before.numbers[:2] and known.numbers[2] not in before.numbers
    assert found(cache, tokens) == [tuple(entry) for entry in known.blocks.tolist()] == [(b,) for b in table.tolist()]
    cache.clear()
    again = cache.insert(tokens, table[None], known)
    assert not set(again.numbers) & set(known.numbers)
    assert again.blocks.tolist() == known.blocks.tolist() and cache.num_cached == len(found(cache, tokens)) == 3


def test_a_block_is_freed_once_by_each_of_its_holders():
    cache = PrefixCache(5, SIZE)
    (table,) = stored(cache, [1, 2])
    with pytest.raises(PoolError, match="free already"):
        cache.free(table)
    prefix = cache.find([1, 2], 2)
    cache.share(prefix, table)
    cache.share(prefix, table)
    cache.free(table)
    cache.free(table)
    with pytest.raises(PoolError, match="free already"):
        cache.free(table)
    taken = cache.allocate(2)
    with pytest.raises(PoolError, match="named twice"):
        cache.free([taken[0], taken[1], taken[0]])
    cache.free(taken)
    with pytest.raises(PoolError, match="free already"):
        cache.free(taken[:1])


def test_a_pool_that_is_too_small_forgets_nothing():
    cache = PrefixCache(5, SIZE)
    stored(cache, [1, 2, 3, 4])
    held = cache.allocate(1)
    with pytest.raises(PoolError, match="3 of 4 are free"):
        cache.allocate(4)
    assert (cache.num_free, cache.num_evicted) == (3, 0)
    cache.free(held)
    cache.clear()
    assert (cache.num_cached, cache.num_free, cache.num_evicted) == (0, 4, 2)
    assert len(set(cache.allocate(4))) == 4
