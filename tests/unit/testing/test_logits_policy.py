"""The policy for a model's logits tells rounding from a run that computes something else."""

import pytest
import torch

from hf_sparsekv.testing.compare import assert_logits_policy

EXACT = torch.randn(8, 2, 256, generator=torch.Generator().manual_seed(0))


def off_by(size: float, seed: int) -> torch.Tensor:
    """The logits with errors of their own."""
    return EXACT + size * torch.randn(EXACT.shape, generator=torch.Generator().manual_seed(seed))


def test_errors_as_large_as_a_plain_runs_pass() -> None:
    assert_logits_policy(off_by(0.1, 1), EXACT, off_by(0.1, 2))
    assert_logits_policy(EXACT.bfloat16(), EXACT, EXACT)


@pytest.mark.parametrize(("size", "words"), [(0.3, "^error"), (0.17, "^cosine distance")])
def test_larger_ones_do_not(size: float, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_logits_policy(off_by(size, 1), EXACT, off_by(0.1, 2))


def test_one_wrong_entry_and_one_that_is_no_number_show() -> None:
    for value in (EXACT[3, 1, 7] + 1.0, torch.nan):
        wrong = off_by(0.1, 1)
        wrong[3, 1, 7] = value
        with pytest.raises(AssertionError, match=r"error|NaN"):
            assert_logits_policy(wrong, EXACT, off_by(0.1, 2))
