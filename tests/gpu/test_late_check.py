"""On a GPU the masks of decode steps are checked without waiting; what is wrong is still found."""

import copy

import pytest
import torch

from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.errors import CacheError
from hf_sparsekv.testing.waiting import waiting_is_an_error

pytestmark = pytest.mark.gpu


def history(is_padded):
    mask = torch.ones(2, 5, dtype=torch.bool, device="cuda")
    mask[0, 0] = not is_padded
    padding = Padding()
    padding.extend(2, 5, mask)
    return padding, mask


def step(padding, mask, is_token=True):
    mask = torch.nn.functional.pad(mask, (0, 1), value=True)
    if not is_token:
        mask[1, -1].fill_(False)
    padding.check_mask(2, mask, True)
    padding.extend(2, 1, None)
    return mask


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_decode_step_does_not_wait_and_a_wrong_one_is_found_later(is_padded):
    padding, mask = history(is_padded)
    step(copy.deepcopy(padding), mask)  # the first launch of a kernel may wait
    with waiting_is_an_error():
        for _ in range(3):
            mask = step(padding, mask)
        wrong = step(padding, mask, is_token=False)
    for twin in (copy.deepcopy(padding), copy.deepcopy(padding)):
        with pytest.raises(CacheError, match="an earlier decode step"):
            twin.check_mask(2, wrong, False)
    with waiting_is_an_error():
        for _ in range(2):  # it does not go away, and the host need not wait to know
            with pytest.raises(CacheError, match="an earlier decode step"):
                step(padding, mask)
