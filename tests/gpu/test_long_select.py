"""Long rows with two lists: the kernel keeps what the definition keeps, at every length it is given."""

import pytest
import torch

from hf_sparsekv.ops import kernels, reference
from hf_sparsekv.ops.shared_memory import two_lists_fit

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or kernels.load() is None, reason="needs a GPU and the compiled kernels"
)


@pytest.mark.parametrize(
    ("num_keys", "capacity"), [(16_385, 512), (32_768, 2_048), (131_072, 5_900), (131_072, 20_000)]
)
def test_two_lists_of_long_rows_are_the_definition(num_keys, capacity):
    if not two_lists_fit(num_keys, capacity, torch.device("cuda")):
        pytest.skip("this GPU has too little shared memory: the definition runs")
    generator = torch.Generator("cuda").manual_seed(3)
    first, second = torch.rand(2, 1, 4, num_keys, device="cuda", generator=generator)
    lengths, budgets = (torch.tensor([n], dtype=torch.int32, device="cuda") for n in (num_keys - 3, capacity))
    options = (lengths, budgets, capacity, 4, 32, "avg", 21, second, "avg", 7, 0.5)
    expected, found = reference.select(first, *options), kernels.select(first, *options)
    torch.cuda.synchronize()
    # Averages are summed in another order: neighbours in rank may change places.
    for row, other in zip(expected[0].flatten(0, 1).tolist(), found[0].flatten(0, 1).tolist(), strict=True):
        assert len(set(row) & set(other)) >= 0.995 * capacity
    assert torch.equal(expected[1], found[1])
