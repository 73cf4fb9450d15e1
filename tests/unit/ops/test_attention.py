"""`attention` and `attention_varlen` against fp64, one query row and one key at a time."""

import pytest
import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.ops.reference import pool
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_census, assert_close_fp32, assert_close_policy

HEADS = [(8, 2), (9, 3), (4, 4)]
DIM = 8
SCALE = 0.4
NAN = float("nan")


def brute(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 output [B, H, T, D] and LSE [B, H, T] for bool visible [B, T, N]; hidden keys are never touched."""
    batch, heads, num_rows, dim = q.shape
    group = heads // k.shape[1]
    output = torch.zeros(batch, heads, num_rows, dim, dtype=torch.float64)
    lse = torch.full((batch, heads, num_rows), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(num_rows):
                keys = visible[b, t].nonzero().flatten()
                if len(keys) == 0:
                    continue
                logits = k[b, h // group, keys].double() @ q[b, h, t].double() * scale
                lse[b, h, t] = logits.exp().sum().log()
                output[b, h, t] = (logits - lse[b, h, t]).exp() @ v[b, h // group, keys].double()
    return output, lse


def causal(batch: int, num_rows: int, num_keys: int) -> Tensor:
    """The last row sees every key, the one before it all but the last, ..."""
    rows = [[key <= row + num_keys - num_rows for key in range(num_keys)] for row in range(num_rows)]
    return torch.tensor(rows, dtype=torch.bool).reshape(num_rows, num_keys).expand(batch, -1, -1)


def random_qkv(batch: int, heads: int, kv_heads: int, num_rows: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, heads, num_rows, DIM)
    return q, torch.randn(batch, kv_heads, num_keys, DIM), torch.randn(batch, kv_heads, num_keys, DIM)


@pytest.fixture(params=[False, True], ids=["one-chunk", "row-by-row"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run once with the usual temporaries and once with as little memory as the op can do with."""
    if request.param:
        monkeypatch.setattr(pool, "TEMPORARY_BYTES", 1)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 1), (1, 9), (5, 5), (3, 9), (8, 9)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_is_softmax_over_what_each_row_sees(heads, kv_heads, num_rows, num_keys, is_causal):
    q, k, v = random_qkv(2, heads, kv_heads, num_rows, num_keys)
    visible = causal(2, num_rows, num_keys) if is_causal else torch.ones(2, num_rows, num_keys, dtype=torch.bool)
    output, lse = ops.attention(q, k, v, SCALE, None, is_causal)
    expected, expected_lse = brute(q, k, v, SCALE, visible)
    assert lse.dtype == torch.float32
    assert_close_fp32(output, expected)
    assert_close_fp32(lse, expected_lse)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_masked_keys_and_values_may_be_nan(heads, kv_heads, is_causal):
    q, k, v = random_qkv(3, heads, kv_heads, 4, 9)
    is_token = torch.ones(3, 9, dtype=torch.bool)
    is_token[0, :3] = is_token[1, 4] = is_token[2, 8] = False
    mask = is_token[:, None].expand(-1, 4, -1) & (torch.rand(3, 4, 9) < 0.8)
    for tensor in (k, v):
        tensor.masked_fill_(~is_token[:, None, :, None], NAN)
    output, lse = ops.attention(q, k, v, SCALE, mask, is_causal)
    expected, expected_lse = brute(q, k, v, SCALE, mask & causal(3, 4, 9) if is_causal else mask)
    assert_close_fp32(output, expected)
    assert_close_fp32(lse, expected_lse)


def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity():
    q, k, v = random_qkv(1, 4, 2, 5, 2)
    output, lse = ops.attention(q, k, v, SCALE, None, True)  # rows 0 to 2 come before the first key
    assert torch.equal(output[:, :, :3], torch.zeros(1, 4, 3, DIM))
    assert torch.equal(lse[:, :, :3], torch.full((1, 4, 3), float("-inf")))
    assert_close_fp32(output, brute(q, k, v, SCALE, causal(1, 5, 2))[0])
    output, lse = ops.attention(q, k * NAN, v * NAN, SCALE, torch.zeros(1, 5, 2, dtype=torch.bool), False)
    assert torch.equal(output, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((1, 4, 5), float("-inf")))


def test_no_keys_and_no_rows_are_lawful():
    q, k, v = random_qkv(2, 4, 2, 3, 0)
    output, lse = ops.attention(q, k, v, SCALE, None, False)
    assert torch.equal(output, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, 4, 3), float("-inf")))
    q, k, v = random_qkv(2, 4, 2, 0, 3)
    output, lse = ops.attention(q, k, v, SCALE, None, True)
    assert output.shape == (2, 4, 0, DIM) and lse.shape == (2, 4, 0)


def test_huge_logits_neither_overflow_nor_blur():
    q, k, v = random_qkv(1, 4, 2, 3, 6)
    output, lse = ops.attention(1e15 * q, 1e15 * k, v, 1.0, None, False)
    best = (q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)).argmax(dim=-1)
    assert torch.equal(output, v.repeat_interleave(2, dim=1).gather(2, best[..., None].expand(-1, -1, -1, DIM)))
    assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32_and_rounded_once(dtype):
    q, k, v = (t.to(dtype) for t in random_qkv(2, 8, 2, 5, 40))
    output, lse = ops.attention(q, k, v, SCALE, None, True)
    expected, expected_lse = brute(q, k, v, SCALE, causal(2, 5, 40))
    same_dtype = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=causal(2, 5, 40)[:, None], scale=SCALE, enable_gqa=True
    )
    assert output.dtype == dtype
    assert_close_policy(output, expected, same_dtype)
    assert_close_fp32(lse, expected_lse)


def test_a_query_of_zeros_counts_the_keys_that_it_reads():
    q, k, v = random_qkv(2, 4, 2, 7, 300)
    _, lse = ops.attention(torch.zeros_like(q), k, v, SCALE, None, True)
    assert_census(lse, torch.arange(294, 301))


def test_strides_do_not_matter():
    q, k, v = random_qkv(2, 8, 2, 5, 9)
    views = [torch.randn(2, 9, t.shape[1] + 1, 2 * DIM)[:, :, :-1, ::2].transpose(1, 2) for t in (q, k, v)]
    views[0] = views[0][:, :, :5]
    for view, t in zip(views, (q, k, v), strict=True):
        view.copy_(t)
        assert not view.is_contiguous()
    for strided, plain in zip(
        ops.attention(*views, SCALE, None, True), ops.attention(q, k, v, SCALE, None, True), strict=True
    ):
        assert_close_fp32(strided, plain)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_requests_are_attended_one_by_one(heads, kv_heads, is_causal):
    q_lengths, k_lengths = [1, 0, 5, 2, 3], [1, 0, 5, 7, 9]
    q = torch.randn(sum(q_lengths), heads, DIM)
    k, v = (torch.randn(sum(k_lengths), kv_heads, DIM) for _ in range(2))
    q_bounds, k_bounds = (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (q_lengths, k_lengths))
    output, lse = ops.attention_varlen(q, k, v, q_bounds, k_bounds, 5, 9, SCALE, is_causal)
    expected, expected_lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(lse.shape, dtype=torch.float64)
    for b, (num_rows, num_keys) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        rows, keys = slice(q_bounds[b], q_bounds[b + 1]), slice(k_bounds[b], k_bounds[b + 1])
        visible = causal(1, num_rows, num_keys) if is_causal else torch.ones(1, num_rows, num_keys, dtype=torch.bool)
        alone = [t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys])]
        out, row_lse = brute(*alone, SCALE, visible)
        expected[rows], expected_lse[:, rows] = out[0].transpose(0, 1), row_lse[0]
    assert_close_fp32(output, expected)
    assert_close_fp32(lse, expected_lse)


def test_a_packed_request_never_sees_its_neighbours():
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    q, k, v = torch.randn(9, 4, DIM), torch.randn(9, 2, DIM), torch.randn(9, 2, DIM)
    output, lse = ops.attention_varlen(q, k, v, bounds, bounds, 5, 5, SCALE, True)
    for t in (q, k, v):
        t[:4] = NAN
    poisoned, poisoned_lse = ops.attention_varlen(q, k, v, bounds, bounds, 5, 5, SCALE, True)
    assert_bitwise_equal(poisoned[4:], output[4:])
    assert_bitwise_equal(poisoned_lse[:, 4:], lse[:, 4:])
