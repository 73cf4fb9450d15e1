"""PagePool: the bytes it says it takes, and prompts read back through block tables."""

import torch

from hf_sparsekv import ops
from hf_sparsekv.cache.pages import PagePool


def pool_of(dtype=torch.float32, pages=7, heads=3, size=4, dim=8):
    return PagePool(pages, heads, size, dim, dtype, torch.device("cpu"))


def test_bytes_are_counted_before_anything_is_reserved():
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        pool = pool_of(dtype)
        assert pool.nbytes == 7 * 2 * 3 * 4 * 8 * size
        assert pool.nbytes == 7 * PagePool.page_bytes(3, 4, 8, size)
        assert (pool.page_size, pool.num_kv_heads) == (4, 3)


def test_what_was_written_through_a_table_is_gathered_in_order_whatever_else_the_pages_hold():
    pool, table = pool_of(), torch.tensor([5, 2, 6, -1], dtype=torch.int32)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    for length in (1, 3, 4, 5, 8, 11, 12):
        keys, values = torch.randn(length, 3, 8), torch.randn(length, 3, 8)
        at = torch.arange(length)
        ops.write_packed(pool.keys, pool.values, keys, values, table[at // 4].long() * 4 + at % 4)
        read_keys, read_values = pool.gather(pool.head_rows(table), length)
        assert torch.equal(read_keys, keys.transpose(0, 1)[None])
        assert torch.equal(read_values, values.transpose(0, 1)[None])


def test_what_is_gathered_is_a_copy():
    pool, table = pool_of(), torch.tensor([1], dtype=torch.int32)
    keys, _ = pool.gather(pool.head_rows(table), 4)
    keys.fill_(1.0)
    assert not pool.keys.any()
