"""`pool_scores`, `select` and `compact` by example and by brute force; `tests/property/test_select.py` has the laws."""

import pytest
import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.errors import InputError
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_fp32

NAN = float("nan")
LENGTHS = (0, 1, 2, 6, 7, 11)
KEYS = 11


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def select(
    scores: list[float], budget: int, *, sinks: int = 0, recent: int = 0, capacity: int | None = None, **options: object
) -> tuple[list[int], list[float]]:
    """Kept positions and retained scores of one request with one head, without the filling."""
    arguments = {"pooling": "none", "pool_width": 1} | options
    lists = {name: torch.tensor([[value]]) for name, value in arguments.items() if isinstance(value, list)}
    width = budget if capacity is None else capacity
    index, counts, retained = ops.select(
        torch.tensor([[scores]]),
        int32(len(scores)),
        int32(budget),
        width,
        sinks,
        recent,
        **(arguments | lists),
    )
    kept = int(counts[0])
    assert index.dtype == torch.int64 and counts.dtype == torch.int32 and retained.dtype == torch.float32
    assert index.shape == retained.shape == (1, 1, width)
    assert (index[0, 0, kept:] == -1).all() and (retained[0, 0, kept:] == 0).all()
    return index[0, 0, :kept].tolist(), retained[0, 0, :kept].tolist()


# --- pooling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["avg", "max", "forward", "none"])
@pytest.mark.parametrize("width", [1, 3, 7, 41])
@pytest.mark.parametrize("shift", [0.0, -5.0], ids=["any-sign", "all-negative"])
def test_pooling_takes_what_exists_of_its_window(pooling, width, shift):
    scores = torch.randn(len(LENGTHS), 2, KEYS) + shift
    expected = torch.zeros(len(LENGTHS), 2, KEYS, dtype=torch.float64)
    for b, length in enumerate(LENGTHS):
        for j in range(length):
            first = j if pooling == "none" else j - (width - 1 if pooling == "forward" else width // 2)
            last = j + width // 2 if pooling in ("avg", "max") else j
            window = scores[b, :, max(0, first) : min(last + 1, length)].double()
            expected[b, :, j] = window.mean(dim=-1) if pooling == "avg" else window.amax(dim=-1)
        scores[b, :, length:] = NAN
    assert_close_fp32(ops.pool_scores(scores, int32(*LENGTHS), pooling, width), expected)


def test_edges_are_cut_and_not_padded_with_zeros():
    ones = torch.ones(1, 1, 9)
    assert torch.equal(ops.pool_scores(ones, int32(9), "avg", 7), ones)
    assert torch.equal(ops.pool_scores(-ones, int32(9), "max", 7), -ones)
    assert torch.equal(ops.pool_scores(-ones, int32(9), "forward", 7), -ones)


def test_forward_pooling_spreads_only_to_later_tokens():
    impulse = torch.zeros(1, 1, 9)
    impulse[..., 3] = 1.0
    assert ops.pool_scores(impulse, int32(9), "forward", 3)[0, 0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert ops.pool_scores(impulse, int32(9), "max", 3)[0, 0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("pooling", ["avg", "max", "forward", "none"])
def test_pooling_leaves_its_input_alone(pooling):
    scores = torch.randn(1, 2, 9)
    before = scores.clone()
    ops.pool_scores(scores, int32(9), pooling, 3).add_(1)
    assert_bitwise_equal(scores, before)


# --- selection ----------------------------------------------------------------------------------------------------


def test_sinks_recents_and_the_best_of_the_rest_are_kept_in_order():
    kept, retained = select([0.0, 9.0, 1.0, 5.0, 3.0, 4.0, 0.0], 5, sinks=1, recent=1)
    assert kept == [0, 1, 3, 5, 6]
    assert retained == [0.0, 9.0, 5.0, 4.0, 0.0]


def test_a_prompt_as_long_as_its_budget_is_kept_whole():
    scores = [3.0, 1.0, 2.0, 0.0]
    assert select(scores, 4, sinks=1, recent=2) == ([0, 1, 2, 3], scores)
    assert select(scores, 7, sinks=1, recent=2) == ([0, 1, 2, 3], scores)
    assert select(scores, 3, sinks=1, recent=1)[0] == [0, 2, 3]


def test_a_budget_of_protected_tokens_alone_keeps_just_those():
    assert select([1.0, 2.0, 9.0, 9.0, 3.0], 3, sinks=2, recent=1)[0] == [0, 1, 4]


def test_equal_scores_keep_the_lower_positions():
    assert select([7.0] * 300, 5, sinks=1, recent=1)[0] == [0, 1, 2, 3, 299]


def test_pooling_decides_before_the_choice():
    scores = [0.0, 0.0, 9.0, 0.0, 0.0, 5.0, 0.0, 0.0]
    assert select(scores, 3, pooling="none")[0] == [0, 2, 5]
    assert select(scores, 3, pooling="avg", pool_width=3) == ([1, 2, 3], [3.0, 3.0, 3.0])
    assert select(scores, 3, pooling="forward", pool_width=3) == ([2, 3, 4], [9.0, 9.0, 9.0])


def test_two_lists_share_the_free_places_and_retain_one_score_per_token():
    first = [0.0, 8.0, 6.0, 4.0, 2.0, 1.0, 0.5, 0.0]
    second = [0.0, 9.0, 0.0, 0.0, 1.0, 3.0, 2.0, 0.0]
    kept, retained = select(first, 6, sinks=1, recent=1, secondary=second, share=0.5)
    # First list: 1 and 2. Second: 5, then 6 (1 is already in); each takes the score of its twin in the first.
    assert kept == [0, 1, 2, 5, 6, 7]
    assert retained == [0.0, 8.0, 6.0, 8.0, 6.0, 0.0]


@pytest.mark.parametrize(("share", "free"), [(0.0, [4, 5, 6]), (0.5, [1, 5, 6]), (0.9, [1, 2, 5]), (1.0, [1, 2, 3])])
def test_the_first_list_fills_the_floor_of_its_share(share, free):
    first, second = [0.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 5.0, 0.0]
    kept, retained = select(first, 5, sinks=1, recent=1, secondary=second, share=share)
    assert kept == [0, *free, 7]
    if share == 0.0:  # nothing to borrow from: their own first scores
        assert retained == [0.0, 3.0, 2.0, 1.0, 0.0]


def test_the_second_list_is_pooled_its_own_way():
    second = [0.0, 0.0, 0.0, 9.0, 0.0, 0.0]
    options = {"secondary": second, "share": 0.0, "secondary_width": 3}
    assert select([0.0] * 6, 3, secondary_pooling="max", **options)[0] == [2, 3, 4]
    assert select([0.0] * 6, 3, secondary_pooling="forward", **options)[0] == [3, 4, 5]


def test_each_request_and_head_chooses_for_itself():
    scores = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]], [[0.0, 5.0, NAN, NAN], [6.0, 0.0, NAN, NAN]]])
    index, counts, retained = ops.select(scores, int32(4, 2), int32(2, 1), 3, 0, 0, "none", 1)
    assert counts.tolist() == [2, 1]
    assert index.tolist() == [[[2, 3, -1], [0, 1, -1]], [[1, -1, -1], [0, -1, -1]]]
    assert retained.tolist() == [[[3.0, 4.0, 0.0], [4.0, 3.0, 0.0]], [[5.0, 0.0, 0.0], [6.0, 0.0, 0.0]]]


def test_an_empty_request_keeps_nothing():
    index, counts, retained = ops.select(torch.full((1, 2, 5), NAN), int32(0), int32(3), 3, 1, 1, "avg", 3)
    assert counts.tolist() == [0]
    assert (index == -1).all() and (retained == 0).all()


# --- compaction ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compaction_copies_the_kept_bits_and_leaves_zeros_behind_them(dtype):
    k, v = (torch.randn(2, 3, 9, 8).to(dtype) for _ in range(2))
    index = torch.tensor([[[0, 4, 8], [1, 2, 3], [5, 6, -1]], [[2, -1, -1], [7, 8, -1], [-1, -1, -1]]])
    for source, kept in zip((k, v), ops.compact(k, v, index), strict=True):
        expected = torch.zeros(2, 3, 3, 8, dtype=dtype)
        for b, head, place in (index >= 0).nonzero().tolist():
            expected[b, head, place] = source[b, head, index[b, head, place]]
        assert_bitwise_equal(kept, expected)


def test_compaction_does_not_read_what_is_not_kept():
    k, v = (torch.full((1, 1, 5, 8), NAN) for _ in range(2))
    k[0, 0, 3], v[0, 0, 3] = 1.0, 2.0
    keys, values = ops.compact(k, v, torch.tensor([[[3, -1, -1]]]))
    assert keys[0, 0].sum(dim=-1).tolist() == [8.0, 0.0, 0.0]
    assert values[0, 0].sum(dim=-1).tolist() == [16.0, 0.0, 0.0]


def test_another_pooling_is_refused_by_name():
    """As the compiled kernels do, and not taken for the maximum."""
    scores, two = torch.rand(1, 1, 9), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(InputError, match="`pooling` is 'median': it must be one of avg, max, forward, none"):
        ops.pool_scores(scores, two + 7, "median", 3)
    with pytest.raises(InputError, match="`pooling` is 'median'"):
        ops.select(scores, two + 7, two, 2, 0, 1, "median", 3)
