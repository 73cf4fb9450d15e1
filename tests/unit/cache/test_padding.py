"""Padding: refusals and fast paths; `tests/property/test_bookkeeping.py` has its laws."""

import pytest
import torch

from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.errors import CacheError


def mask(*rows: str) -> torch.Tensor:
    """`mask(".xx", "xxx")`: x = token."""
    return torch.tensor([[character == "x" for character in row] for row in rows])


def test_another_batch_size_is_refused():
    padding = Padding()
    padding.extend(2, 3, None)
    with pytest.raises(CacheError, match="holds 2 requests, got a batch of 3: use a new cache"):
        padding.extend(3, 1, None)
    assert padding.tokens == [3, 3]


def test_while_nothing_is_padded_no_mask_is_kept():
    padding = Padding()
    padding.extend(2, 3, mask("xxx", "xxx"))
    padding.extend(2, 1, None)
    assert padding.is_token is None
    assert padding.new_tokens(1) is None
    assert padding.columns_of(1, 0) == slice(0, 4)
    assert padding.columns_of(1, 3) == slice(0, 1)


def test_a_mask_of_the_whole_history_counts_its_last_columns_only():
    padding = Padding()
    padding.extend(1, 3, mask(".xx"))
    padding.extend(1, 2, mask(".xxx."))
    assert padding.tokens == [3]
    assert torch.equal(padding.is_token, mask(".xxx."))


def test_padding_that_comes_late_leaves_earlier_columns_tokens():
    padding = Padding()
    padding.extend(2, 2, None)
    padding.extend(2, 2, mask("x.", "xx"))
    assert torch.equal(padding.is_token, mask("xxx.", "xxxx"))
    assert padding.tokens == [3, 4]


def test_tokens_in_one_piece_are_a_slice_and_others_an_index():
    padding = Padding()
    padding.extend(4, 4, mask("..xx", "xx..", "x.xx", "...."))
    assert padding.columns_of(0, 0) == slice(2, 4)
    assert padding.columns_of(1, 0) == slice(0, 2)
    assert padding.columns_of(2, 0).tolist() == [0, 2, 3]
    assert padding.columns_of(3, 0) == slice(0, 0)


def test_rows_of_an_empty_history_may_be_selected():
    padding = Padding()
    padding.select_rows(torch.tensor([0, 0, 1]))
    padding.extend(3, 1, None)
    assert padding.tokens == [1, 1, 1]
