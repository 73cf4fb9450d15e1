"""The test helpers and the numbers policy catch what they are for. Needs no GPU."""

from collections.abc import Callable

import pytest
import torch
from helpers import make_pool, padded_rows
from torch import Tensor

from hf_sparsekv.ops import reference
from hf_sparsekv.ops.reference.pool import dense_rows
from hf_sparsekv.testing import compare

LENGTHS = [0, 1, 16, 33]


@pytest.mark.parametrize("page_size", [None, 1, 7, 16])
def test_a_pool_holds_its_tokens_and_nothing_else(page_size: int | None) -> None:
    k_pool, v_pool, table, keys, values = make_pool(LENGTHS, 3, 64, page_size, torch.bfloat16, "cpu", seed=0)
    for pool, dense in ((k_pool, keys), (v_pool, values)):
        rows = dense_rows(pool, table, max(LENGTHS))
        for b, length in enumerate(LENGTHS):
            assert torch.equal(rows[b, :, :length], dense[b, :, :length])
        assert int((~pool.isnan()).sum()) == sum(LENGTHS) * 3 * 64
        assert not pool.is_contiguous()


def attend(dropped: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 attention over 2,048 slots: an imitation of a kernel that may drop one, fp32, and plain bf16."""
    q = padded_rows((1, 4, 2, 64), torch.bfloat16, "cpu", 1)
    k, v = (padded_rows((1, 4, 2048, 64), torch.bfloat16, "cpu", seed) for seed in (2, 3))
    mask = torch.ones(1, 2, 2048, dtype=torch.bool)
    exact, _ = reference.attention(q.float(), k.float(), v.float(), 0.125, mask, False)
    same_dtype = torch.softmax(q @ k.transpose(-1, -2) * 0.125, dim=-1) @ v
    if dropped is not None:
        mask[:, :, dropped] = False
    actual, _ = reference.attention(q, k, v, 0.125, mask, False)
    return actual, exact, same_dtype


def test_rounding_passes_and_a_dropped_slot_does_not() -> None:
    compare.assert_close_policy(*attend(dropped=None))
    with pytest.raises(AssertionError, match=r"error|cosine"):
        compare.assert_close_policy(*attend(dropped=100))


def test_misplaced_specials_are_found() -> None:
    reference_row = torch.tensor([1.0, float("-inf"), float("nan")])
    compare.assert_same_specials(reference_row.clone(), reference_row)
    for wrong in ([1.0, float("inf"), float("nan")], [1.0, float("-inf"), 0.0], [float("nan")] * 3):
        with pytest.raises(AssertionError, match="differ in being"):
            compare.assert_same_specials(torch.tensor(wrong), reference_row)


def test_fp32_results_may_differ_by_the_order_of_sums_only() -> None:
    exact = torch.rand(3, 500, generator=torch.Generator().manual_seed(0)) / 500
    compare.assert_close_fp32(exact * (1 + 2e-6), exact)
    with pytest.raises(AssertionError, match="error exceeds"):
        compare.assert_close_fp32(exact * (1 + 1e-4), exact)
    compare.assert_close_fp32(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="error exceeds"):
        compare.assert_close_fp32(torch.full((2, 3), 1e-20), torch.zeros(2, 3))


def test_the_census_notices_one_key() -> None:
    num_keys = torch.tensor([0, 1, 2, 131_072])
    lse = num_keys.float().log()
    compare.assert_census(lse, num_keys)
    with pytest.raises(AssertionError, match="ulp"):
        compare.assert_census(lse, num_keys + torch.tensor([0, 0, 0, 1]))


def test_a_selection_may_differ_at_near_ties_only() -> None:
    scores = torch.tensor([0.5, 0.25, 0.25 * (1 + 1e-6), 0.1])
    expected, tied, worse = (torch.tensor(index) for index in ([0, 2, -1], [0, 1, -1], [0, 3, -1]))
    compare.assert_same_selection(expected, expected.clone())
    compare.assert_same_selection_up_to_near_ties(tied, expected, scores)
    checks: list[Callable[[], None]] = [
        lambda: compare.assert_same_selection(tied, expected),
        lambda: compare.assert_same_selection_up_to_near_ties(worse, expected, scores),
        lambda: compare.assert_same_selection_up_to_near_ties(torch.tensor([0, -1, -1]), expected, scores),
        lambda: compare.assert_same_selection_up_to_near_ties(torch.tensor([2, 0, -1]), expected, scores),
    ]
    for check in checks:
        with pytest.raises(AssertionError):
            check()


def test_every_bit_counts_when_bits_are_compared() -> None:
    zeros = torch.zeros(4)
    compare.assert_bitwise_equal(zeros, zeros.clone())
    with pytest.raises(AssertionError, match="bytes differ"):
        compare.assert_bitwise_equal(-zeros, zeros)
    launches = iter([zeros, zeros, zeros + 1e-45] + [zeros] * compare.NUM_REPEATS)
    with pytest.raises(AssertionError, match="bytes differ"):
        compare.assert_repeatable(lambda: [next(launches)])
