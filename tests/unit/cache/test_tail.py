"""QueryTail: its fast path, limits and memory; `tests/property/test_bookkeeping.py` has its laws."""

import torch

from hf_sparsekv.cache.tail import QueryTail


def queries(first: int, count: int) -> torch.Tensor:
    """[1, 1, T, 1], each row its own number."""
    return torch.arange(first, first + count, dtype=torch.float32).view(1, 1, count, 1)


def held(tail: QueryTail) -> list[float]:
    return tail.queries.flatten().tolist()


def test_chunks_leave_the_last_rows():
    tail = QueryTail(3)
    assert tail.is_empty
    tail.append(queries(0, 2), None)
    assert held(tail) == [0, 1]
    tail.append(queries(2, 2), None)
    assert held(tail) == [1, 2, 3]
    tail.append(queries(4, 9), None)
    assert held(tail) == [10, 11, 12]


def test_padding_pushes_no_token_out():
    tail = QueryTail(3)
    tail.append(queries(0, 4), None)
    tail.append(queries(4, 4), torch.tensor([[True, False, False, False]]))
    assert held(tail) == [2, 3, 4]


def test_no_limit_keeps_every_row_and_a_limit_of_none_keeps_nothing():
    everything, nothing = QueryTail(None), QueryTail(0)
    for start in (0, 5):
        everything.append(queries(start, 5), None)
        nothing.append(queries(start, 5), None)
    assert held(everything) == list(range(10))
    assert nothing.queries.shape == (1, 1, 0, 1)
    assert nothing.nbytes == 0
    assert not nothing.is_empty


def test_only_the_kept_rows_stay_in_memory():
    tail = QueryTail(2)
    tail.append(queries(0, 1000), None)
    assert tail.nbytes == tail.queries.untyped_storage().nbytes() == 2 * 4
    tail.append(queries(0, 1000), torch.ones(1, 1000, dtype=torch.bool))
    assert tail.nbytes == 2 * 4 + 2  # and of each row whether it is a token


def test_a_cleared_tail_starts_again_even_with_another_batch():
    tail = QueryTail(2)
    tail.append(queries(0, 3), torch.tensor([[False, True, True]]))
    tail.clear()
    assert tail.is_empty
    assert tail.nbytes == 0
    tail.append(queries(7, 2).expand(3, 1, 2, 1), None)
    assert tail.queries.shape == (3, 1, 2, 1)


def test_an_empty_tail_may_select_rows():
    tail = QueryTail(2)
    tail.select_rows(torch.tensor([1, 0]))
    assert tail.is_empty
