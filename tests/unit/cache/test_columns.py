"""ColumnStore: blocks, bytes and views; `tests/property/test_bookkeeping.py` has its laws."""

import pytest
import torch

from hf_sparsekv.cache.columns import ColumnStore
from hf_sparsekv.plan import FULL_LAYER_BLOCK, MAX_SHORT_COLUMNS, SHORT_LAYER_BLOCK


def columns(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, count, 4).to(dtype)


def test_an_empty_store_holds_no_bytes():
    store = ColumnStore()
    assert (store.num_columns, store.capacity, store.nbytes) == (0, 0, 0)
    store.select_rows(torch.tensor([0]))
    assert store.nbytes == 0


@pytest.mark.parametrize(("before", "block"), [(0, SHORT_LAYER_BLOCK), (MAX_SHORT_COLUMNS, FULL_LAYER_BLOCK)])
def test_the_buffers_stay_in_place_until_their_block_is_full(before, block):
    store = ColumnStore()
    store.append(columns(before + 1), columns(before + 1))
    address = store.keys.data_ptr()
    for _ in range(block - 1):
        store.append(columns(1), columns(1))
        assert store.keys.data_ptr() == address
    assert store.capacity == store.num_columns == before + block
    store.append(columns(1), columns(1))
    assert store.capacity == before + 2 * block
    assert store.keys.data_ptr() != address


def test_bytes_are_those_reserved():
    store = ColumnStore()
    store.append(columns(5, torch.bfloat16), columns(5, torch.bfloat16))
    assert store.keys.dtype == torch.bfloat16
    assert store.nbytes == 2 * (2 * 3 * SHORT_LAYER_BLOCK * 4) * 2


def test_what_was_appended_may_change_later():
    keys, values = columns(3), columns(3)
    before = keys.clone()
    store = ColumnStore()
    store.append(keys, values)
    keys.zero_()
    assert torch.equal(store.keys, before)


def test_a_cleared_store_can_start_again_with_another_batch():
    store = ColumnStore()
    store.append(columns(9), columns(9))
    store.clear()
    assert (store.num_columns, store.capacity, store.nbytes) == (0, 0, 0)
    keys, values = torch.randn(5, 1, 2, 8), torch.randn(5, 1, 2, 8)
    store.append(keys, values)
    assert torch.equal(store.keys, keys)
    assert torch.equal(store.values, values)
