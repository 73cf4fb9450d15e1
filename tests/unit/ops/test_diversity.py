"""`kv_diversity` against plain PyTorch on each request alone, in fp32 without chunks and in fp64.

Shapes: B request, K KV head, N token, D head dim, n tokens of one request.
"""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_sparsekv import ops
from hf_sparsekv.errors import InputError
from hf_sparsekv.ops.reference.rotation import rotate
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_fp32, assert_same_selection

B, K, D = 5, 3, 16
LENGTHS = (90, 0, 1, 37, 64)
N = max(LENGTHS)
INV_FREQ = 1.0 / 500.0 ** (torch.arange(0, D, 2) / D)
NAN = float("nan")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and ascending positions; NaN and large positions where there is no token."""
    rng = torch.Generator().manual_seed(3)
    keys, values = ((torch.randn(B, N, K, D, generator=rng) + 0.5).to(dtype).transpose(1, 2) for _ in range(2))
    positions = torch.stack([torch.randperm(9000, generator=rng)[:N].sort().values for _ in range(B * K)])
    positions = positions.view(B, K, N)
    for b, length in enumerate(LENGTHS):
        keys[b, :, length:], values[b, :, length:], positions[b, :, length:] = NAN, NAN, 2**62
    return keys, values, positions


def plain(keys: Tensor, values: Tensor, positions: Tensor | None, inv_freq: Tensor | None) -> Tensor:
    """[K, n] of one request [K, n, D], in the dtype of its tensors."""
    if inv_freq is not None:
        at = torch.arange(keys.shape[1]) if positions is None else positions
        keys = rotate(keys, at[..., None] * inv_freq.to(keys.dtype), backwards=True)
    total = torch.zeros(keys.shape[:2], dtype=keys.dtype)
    for rows in (keys, values):
        mean = torch.nn.functional.normalize(rows, dim=-1).sum(dim=1, keepdim=True)
        apart = -torch.nn.functional.cosine_similarity(rows, mean, dim=-1)
        total += (apart - apart.mean(-1, keepdim=True)) / apart.std(-1, correction=0, keepdim=True).clamp_min(1.2e-7)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temporary_bytes", [1, 4 * B * K * D * 7, 2**25])
@pytest.mark.parametrize(("turns", "has_positions"), [(False, False), (True, False), (True, True)])
def test_it_is_plain_pytorch_on_each_request_alone(dtype, temporary_bytes, turns, has_positions):
    keys, values, positions = inputs(dtype)
    inv_freq, given = INV_FREQ if turns else None, positions if has_positions else None

    actual = ops.kv_diversity(keys, values, int32(*LENGTHS), inv_freq, given, temporary_bytes)

    assert actual.shape == (B, K, N) and actual.dtype == torch.float32
    for b, length in enumerate(LENGTHS):
        assert not actual[b, :, length:].any()
        if length <= 1:
            assert not actual[b].any()  # alone, nothing is unlike the others
            continue
        own = (keys[b, :, :length], values[b, :, :length])
        at = positions[b, :, :length] if has_positions else None
        assert_close_fp32(actual[b, :, :length], plain(own[0].float(), own[1].float(), at, inv_freq))
        exact = plain(own[0].double(), own[1].double(), at, inv_freq)
        torch.testing.assert_close(actual[b, :, :length].double(), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [9, 20, 33])
def test_the_same_tokens_are_kept_as_by_plain_pytorch(dtype, budget):
    """As the second of two lists, and pooled, as the default scorer has it."""
    keys, values, positions = inputs(dtype)
    first = torch.rand(B, K, N, generator=torch.Generator().manual_seed(7))
    expected = torch.zeros(B, K, N)
    for b, length in enumerate(LENGTHS):
        at = slice(0, length)
        if length > 1:
            expected[b, :, at] = plain(keys[b, :, at].float(), values[b, :, at].float(), positions[b, :, at], INV_FREQ)
    actual = ops.kv_diversity(keys, values, int32(*LENGTHS), INV_FREQ, positions)
    rest = (int32(*LENGTHS), int32(*[budget] * B), budget, 2, 4, "avg", 21)
    kept, other = (ops.select(first, *rest, scores, "avg", 7, 0.5)[0] for scores in (actual, expected))
    assert_same_selection(kept, other)


def test_a_request_is_the_same_in_any_batch_and_room():
    keys, values, positions = inputs()
    together = ops.kv_diversity(keys, values, int32(*LENGTHS), INV_FREQ, positions)
    for b, length in enumerate(LENGTHS):
        at = (slice(b, b + 1), slice(None), slice(0, length))
        alone = ops.kv_diversity(keys[at], values[at], int32(length), INV_FREQ, positions[at])
        assert alone.shape == (1, K, length)
        if length:
            assert_close_fp32(together[at], alone)


@pytest.mark.parametrize("what", ["keys", "values", "both"])
def test_tokens_that_are_all_alike_say_nothing(what):
    keys, values, _ = (t[:1].clone() for t in inputs())
    changed = {"keys": (keys,), "values": (values,), "both": (keys, values)}[what]
    for rows in changed:
        rows.zero_()
    actual = ops.kv_diversity(keys, values, int32(N), INV_FREQ)
    others = [rows for rows in (keys, values) if rows.any()]
    if not others:
        assert_bitwise_equal(actual, torch.zeros(1, K, N))
        return
    assert_close_fp32(actual.std(-1, correction=0), torch.ones(1, K))  # the other list alone


def test_the_rotation_is_undone():
    keys, values, positions = (t[:1] for t in inputs())
    turned = rotate(keys, positions[..., None] * INV_FREQ)
    actual = ops.kv_diversity(turned, values, int32(N), INV_FREQ, positions)
    assert_close_fp32(actual, ops.kv_diversity(keys, values, int32(N)))
    assert not torch.allclose(ops.kv_diversity(turned, values, int32(N)), actual, atol=0.1)


def test_without_tokens_there_is_nothing():
    empty = torch.empty(2, K, 0, D)
    assert ops.kv_diversity(empty, empty, int32(0, 0), INV_FREQ).shape == (2, K, 0)


def test_it_compiles_into_one_graph_for_every_length():
    torch._dynamo.reset()

    def layer(keys: Tensor, values: Tensor, lengths: Tensor, inv_freq: Tensor) -> Tensor:
        return ops.kv_diversity(keys, values, lengths, inv_freq).mul(2.0)

    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=frames, dynamic=True)
    keys, values, _ = (t.nan_to_num(0.0) for t in inputs())
    for length in (40, 41, N):
        given = (keys[:, :, :length].contiguous(), values[:, :, :length].contiguous(), int32(*[length] * B), INV_FREQ)
        assert_bitwise_equal(compiled(*given), layer(*given))
    assert frames.frame_count == 1


def test_positions_that_change_nothing_are_refused():
    keys, values, positions = inputs()
    with pytest.raises(InputError, match="`positions` must not be given without `inv_freq`"):
        ops.kv_diversity(keys, values, int32(*LENGTHS), None, positions)


WRONG = {
    "keys": (lambda t: t[0],),
    "values": (lambda t: t[:1], lambda t: t[:, :1], lambda t: t[:, :, :-1], lambda t: t[..., :-2], lambda t: t[0]),
    "lengths": (lambda t: t[:1], lambda t: t.repeat(2), lambda t: t[0], lambda t: t[None]),
    "inv_freq": (lambda t: t[:-1], lambda t: t[:1], lambda t: t[0], lambda t: t[None]),
    "positions": (lambda t: t[..., :-1], lambda t: t[..., :1], lambda t: t[:, :1], lambda t: t[:1], lambda t: t[0]),
}


@pytest.mark.parametrize(("argument", "change"), [(name, change) for name in WRONG for change in WRONG[name]])
def test_a_tensor_of_another_shape_is_named(argument, change):
    keys, values, positions = inputs()
    given = {"keys": keys, "values": values, "lengths": int32(*LENGTHS), "inv_freq": INV_FREQ, "positions": positions}
    ops.kv_diversity(*given.values())
    given[argument] = change(given[argument])
    with pytest.raises(InputError, match=f"^`{argument}` is "):
        ops.kv_diversity(*given.values())
