"""BlockPool: exact ids, all or nothing."""

import pytest

from hf_sparsekv.engine.block_pool import NULL_BLOCK, BlockPool
from hf_sparsekv.errors import PoolError, SparseKVError


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert (pool.num_usable, pool.num_free) == (3, 3)
    assert pool.allocate(3).tolist() == [1, 2, 3]
    assert NULL_BLOCK == 0 and pool.num_free == 0


def test_what_was_given_back_last_is_taken_first():
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(4).tolist() == [1, 2, 3, 4]
    assert pool.allocate(3).tolist() == [5, 6, 7]


def test_an_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(PoolError, match=r"cannot allocate 3 blocks: 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(0).tolist() == []
    with pytest.raises(PoolError, match="-1"):
        pool.allocate(-1)
    assert pool.allocate(2).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([1, 3], "block 3 is free already"),
        ([1, 0], "block 0 is not of this pool: its blocks are 1 to 4"),
        ([1, 5], "block 5 is not of this pool"),
        ([1, -1], "block -1 is not of this pool"),
        ([1, 2, 1], "block 1 is named twice"),
    ],
)
def test_freeing_what_is_not_held_changes_nothing(blocks, message):
    pool = BlockPool(5)
    held = pool.allocate(2)
    with pytest.raises(PoolError, match=message):
        pool.free(blocks)
    assert pool.num_free == 2
    pool.free(held)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]


def test_a_double_free_is_told_from_a_block_taken_again():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(PoolError, match="free already"):
        pool.free(blocks)
    pool.free(pool.allocate(2))


def test_a_pool_needs_a_block_beside_the_null_block():
    with pytest.raises(PoolError, match="num_blocks=1, give at least 2") as caught:
        BlockPool(1)
    assert isinstance(caught.value, SparseKVError)
