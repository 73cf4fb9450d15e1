"""Which rows the GPUs' selection takes with two lists."""

import pytest
import torch

from hf_sparsekv.ops import shared_memory

ADA, HOPPER = 99 * 2**10, 227 * 2**10


@pytest.mark.parametrize(
    ("limit", "num_keys", "capacity", "fits"),
    [
        (ADA, 131_072, 5_900, True),
        (ADA, 131_072, 6_500, False),
        (ADA, 4_000, 10_000, True),
        (ADA, 4_000, 12_400, False),
        (HOPPER, 131_072, 20_000, True),
        (HOPPER, 131_072, 24_000, False),
        (HOPPER, 500_000, 512, False),
    ],
)
def test_a_row_fits_by_its_keys_and_by_what_is_kept(monkeypatch, limit, num_keys, capacity, fits):
    monkeypatch.setattr(shared_memory, "_bytes_per_block", lambda device: limit)
    assert shared_memory.two_lists_fit(num_keys, capacity, torch.device("cuda")) is fits
