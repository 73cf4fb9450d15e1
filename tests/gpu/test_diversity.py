"""The scorers' diversity on a GPU, through the door of the ops: the kernel's, without waiting, copies or graph breaks.

The kernel itself is tested in `kernels/tests/test_diversity.py`.

Shapes: B request, H query head, K KV head, N token, D head dim.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_sparsekv import ops
from hf_sparsekv.errors import InputError
from hf_sparsekv.ops import kernels, reference
from hf_sparsekv.scorers import ScoreInputs, TwoLists
from hf_sparsekv.scorers.registry import build_scorer
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_fp32
from hf_sparsekv.testing.waiting import waiting_is_an_error

pytestmark = pytest.mark.gpu

H, K, D = 16, 8, 128


@pytest.fixture(autouse=True)
def _with_kernels() -> None:
    assert kernels.load() is not None, "build the kernels first: python kernels/build.py, then set HF_SPARSEKV_KERNELS"


def packed(lengths: list[int]) -> list[ScoreInputs]:
    """Prompts that lie one behind the other in one packed batch, as the engine scores them."""
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, D, device="cuda").add_(0.3).bfloat16() for heads in (H, K, K))
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, D, 2) / D)
    found, start = [], 0
    for length in lengths:
        own = slice(start, start + length)
        start += length
        keys, values = (t[own].transpose(0, 1)[None] for t in (k, v))
        queries = q[own][-32:].transpose(0, 1)[None]
        found.append(
            ScoreInputs(
                keys=keys,
                values=values,
                queries=queries,
                scale=D**-0.5,
                row_reduction="max",
                group_reduction="mean",
                num_seen=length,
                inv_freq=inv_freq.cuda(),
            )
        )
    return found


def definition(inputs: ScoreInputs) -> Tensor:
    given = (inputs.keys, inputs.values, inputs.lengths, inputs.inv_freq, inputs.positions)
    return reference.kv_diversity(*given)


def test_every_prompt_of_a_packed_batch_is_its_definition():
    for inputs in packed([401, 1, 64, 2000, 33]):
        assert_close_fp32(inputs.kv_diversity(), definition(inputs))
        scores = build_scorer("hybrid", {}).score(inputs)
        assert isinstance(scores, TwoLists)
        assert_bitwise_equal(scores.secondary, inputs.kv_diversity())


def test_tokens_that_stayed_are_turned_back_by_their_own_positions():
    (inputs,) = packed([600])
    positions = torch.randint(1, 40, (1, K, 600), device="cuda").cumsum(-1)
    stayed = replace(inputs, positions=positions, num_seen=24_000)
    assert_close_fp32(stayed.kv_diversity(), definition(stayed))
    assert not torch.allclose(stayed.kv_diversity(), inputs.kv_diversity(), atol=0.1)


@pytest.mark.parametrize("frequencies_on", ["cuda", "cpu"])
def test_nothing_waits_for_the_device(frequencies_on):
    (inputs,) = packed([500])
    assert inputs.inv_freq is not None
    inputs = replace(inputs, inv_freq=inputs.inv_freq.to(frequencies_on))
    inputs.kv_diversity()
    with waiting_is_an_error():
        inputs.kv_diversity()


def test_no_copy_of_the_keys_is_made():
    (inputs,) = packed([16_000])
    inputs.kv_diversity()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = inputs.kv_diversity()
    taken = torch.cuda.max_memory_allocated() - before
    # The result, as much for the values' part, and 64 splits of directions and moments of keys and values.
    assert taken <= 2 * result.nbytes + 4 * 2 * K * 64 * (D + 2) + 2**12
    assert taken < inputs.keys.nbytes / 16


def test_it_compiles_without_a_graph_break():
    torch._dynamo.reset()
    (inputs,) = packed([300])
    given = (inputs.keys, inputs.values, inputs.lengths, inputs.inv_freq)

    def layer(*tensors: Tensor) -> Tensor:
        return ops.kv_diversity(*tensors).mul(2.0)

    frames = CompileCounterWithBackend("aot_eager")
    assert_bitwise_equal(torch.compile(layer, fullgraph=True, backend=frames)(*given), layer(*given))
    assert frames.frame_count == 1


def test_it_is_captured_in_a_graph():
    (inputs,) = packed([700])
    given = (inputs.keys, inputs.values, inputs.lengths, inputs.inv_freq)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.kv_diversity(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ops.kv_diversity(*given)
    for length in (700, 33, 0):
        inputs.keys.normal_()
        given[2].fill_(length)
        graph.replay()
        assert_close_fp32(result, reference.kv_diversity(*given))


def test_other_dtypes_and_head_dims_run_the_definition():
    for dtype, dim in ((torch.float32, 128), (torch.bfloat16, 32)):
        keys, values = (torch.randn(1, 2, 50, dim, device="cuda", dtype=dtype) for _ in range(2))
        lengths = torch.tensor([50], dtype=torch.int32, device="cuda")
        assert_bitwise_equal(ops.kv_diversity(keys, values, lengths), reference.kv_diversity(keys, values, lengths))


def test_what_the_kernel_refuses_is_an_input_error():
    (inputs,) = packed([40])
    with pytest.raises(InputError, match="`lengths` must be int32, got int64"):
        ops.kv_diversity(inputs.keys, inputs.values, inputs.lengths.long(), inputs.inv_freq)
    with pytest.raises(InputError, match="`positions` must not be given without `inv_freq`"):
        ops.kv_diversity(inputs.keys, inputs.values, inputs.lengths, None, inputs.key_positions())
