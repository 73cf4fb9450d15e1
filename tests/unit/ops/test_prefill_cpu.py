"""Prefill attention on the CPU through torch's flash attention, against the definition and against fp64."""

import math

import pytest
import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.ops import prefill_choice, prefill_probes, reference
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_census, assert_close_fp32, assert_close_policy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPS = [(2, 2), (9, 3), (8, 2), (8, 1)]
"""(H, K): one, three, four and eight query heads a KV head."""


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each request that the fast path took."""
    taken: list[str] = []
    assert prefill_probes.torch_cpu_missing() is None  # remembered: the recorder below has no schema to probe
    original = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def recorded(*args: object, **keywords: object) -> object:
        taken.append("call")
        return original(*args, **keywords)

    monkeypatch.delenv(prefill_choice.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", recorded)
    return taken


def qkv(num_rows: int, num_keys: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Packed tensors of one or more requests."""
    shapes = [(num_rows, heads[0]), (num_keys, heads[1]), (num_keys, heads[1])]
    return [torch.randn(*shape, dim).to(dtype) for shape in shapes]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def fp64_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """One request, packed: output [T, H, D], LSE [H, T]."""
    num_rows, num_keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    logits = torch.einsum("thd,nhd->htn", q.double(), keys) * scale
    if is_causal:
        sees = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
        logits = logits.masked_fill(~sees, -math.inf)
    lse = logits.logsumexp(-1)
    return torch.einsum("htn,nhd->thd", (logits - lse[..., None]).exp(), values), lse


def assert_output(actual: Tensor, expected: Tensor, same_dtype: Tensor) -> None:
    if actual.dtype == torch.float32:
        assert_close_fp32(actual, expected)
    else:
        assert_close_policy(actual, expected, same_dtype)


def assert_lse(actual: Tensor, expected: Tensor) -> None:
    """All of a request as one row: the LSE of a single key is a dot product, which may come close to zero."""
    assert actual.shape == expected.shape
    assert_close_fp32(actual.flatten(), expected.flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", GROUPS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_requests_are_attended_as_defined(calls, dtype, heads, dim, is_causal):
    q_lengths, k_lengths = [1, 0, 37, 1, 5, 40], [1, 0, 37, 50, 90, 73]
    q, k, v = qkv(sum(q_lengths), sum(k_lengths), heads, dim, dtype)
    q_bounds, k_bounds, scale = bounds(q_lengths), bounds(k_lengths), dim**-0.5
    output, lse = ops.attention_varlen(q, k, v, q_bounds, k_bounds, 40, 90, scale, is_causal)
    assert len(calls) == (5 + 2 if is_causal else 5)  # a past is attended apart
    assert output.dtype == dtype and lse.dtype == torch.float32
    plain, plain_lse = reference.attention_varlen(q, k, v, q_bounds, k_bounds, 40, 90, scale, is_causal)
    for b in range(len(q_lengths)):
        rows, keys = slice(q_bounds[b], q_bounds[b + 1]), slice(k_bounds[b], k_bounds[b + 1])
        if rows.start == rows.stop:
            continue
        expected, expected_lse = fp64_attention(q[rows], k[keys], v[keys], scale, is_causal)
        assert_output(output[rows], expected, plain[rows])
        assert_lse(lse[:, rows], expected_lse)
        assert_lse(lse[:, rows], plain_lse[:, rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 1), (1, 60), (33, 33), (20, 61), (2, 600)])
def test_dense_requests_are_attended_as_defined(calls, dtype, num_rows, num_keys):
    q = torch.randn(2, 8, num_rows, 64).to(dtype)
    k, v = (torch.randn(2, 2, num_keys, 64).to(dtype) for _ in range(2))
    output, lse = ops.attention(q, k, v, 0.125, None, True)
    assert calls
    assert output.is_contiguous() and lse.is_contiguous()
    plain, plain_lse = reference.attention(q, k, v, 0.125, None, True)
    for b in range(2):
        expected, expected_lse = fp64_attention(*(t[b].transpose(0, 1) for t in (q, k, v)), 0.125, True)
        assert_output(output[b].transpose(0, 1), expected, plain[b].transpose(0, 1))
        assert_lse(lse[b], expected_lse)
    assert_lse(lse, plain_lse)


def test_the_mask_is_aligned_at_the_last_key():
    """A query of zeros counts: row i of T over N keys sees N - T + i + 1 of them."""
    q, k, v = qkv(7, 300, (4, 2), 64, torch.float32)
    _, lse = ops.attention_varlen(torch.zeros_like(q), k, v, bounds([7]), bounds([300]), 7, 300, 1.0, True)
    assert_census(lse, torch.arange(294, 301))


def test_rows_before_the_first_key_and_requests_without_keys_see_nothing(calls):
    q, k, v = qkv(8, 3, (4, 2), 64, torch.float32)
    q_bounds, k_bounds = bounds([5, 2, 1]), bounds([2, 0, 1])
    output, lse = ops.attention_varlen(q, k, v, q_bounds, k_bounds, 5, 2, 0.3, True)
    assert len(calls) == 1  # torch divides by zero without keys: only the last request may go there
    expected, expected_lse = reference.attention_varlen(q, k, v, q_bounds, k_bounds, 5, 2, 0.3, True)
    assert lse[:, :3].isneginf().all() and lse[:, 5:7].isneginf().all() and not output[5:7].any()
    assert_close_fp32(output, expected)
    assert_close_fp32(lse, expected_lse)


@pytest.mark.parametrize(("num_rows", "num_keys"), [(0, 0), (0, 4), (3, 0)])
def test_no_rows_and_no_keys_are_lawful(calls, num_rows, num_keys):
    q, k, v = qkv(num_rows, num_keys, (4, 2), 64, torch.float32)
    arguments = bounds([num_rows]), bounds([num_keys]), num_rows, num_keys, 0.3, True
    output, lse = ops.attention_varlen(q, k, v, *arguments)
    assert output.shape == q.shape and lse.shape == (4, num_rows)
    assert not output.any() and lse.isneginf().all()
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_do_not_matter(dtype):
    """Every other column: torch would read its neighbours instead."""
    plain = qkv(5, 9, (4, 2), 64, dtype)
    strided = [torch.empty(*t.shape[:2], 128).to(dtype)[..., ::2].copy_(t) for t in plain]
    gaps = [torch.empty(t.shape[0], t.shape[1] + 3, 64).to(dtype)[:, 1:-2].copy_(t) for t in plain]
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in plain]
    arguments = bounds([5]), bounds([9]), 5, 9, 0.3, True
    expected = ops.attention_varlen(*plain, *arguments)
    for views in (strided, gaps, heads_first):
        output, lse = ops.attention_varlen(*views, *arguments)
        assert output.stride() == torch.empty_like(views[0]).stride()
        assert_bitwise_equal(output, expected[0])
        assert_bitwise_equal(lse, expected[1])


def test_a_request_never_sees_its_neighbours():
    q, k, v = qkv(40, 40, (4, 2), 64, torch.float32)
    lengths = bounds([17, 23])
    output, lse = ops.attention_varlen(q, k, v, lengths, lengths, 23, 23, 0.3, True)
    for t in (q, k, v):
        t[:17] = math.nan
    poisoned, poisoned_lse = ops.attention_varlen(q, k, v, lengths, lengths, 23, 23, 0.3, True)
    assert_bitwise_equal(poisoned[17:], output[17:])
    assert_bitwise_equal(poisoned_lse[:, 17:], lse[:, 17:])


def test_huge_logits_neither_overflow_nor_blur():
    q, k, v = qkv(3, 6, (4, 2), 64, torch.float32)
    output, lse = ops.attention_varlen(1e15 * q, 1e15 * k, v, bounds([3]), bounds([6]), 3, 6, 1.0, True)
    expected, expected_lse = fp64_attention(1e15 * q, 1e15 * k, v, 1.0, True)
    assert_close_fp32(output, expected)
    assert_close_fp32(lse, expected_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ops_are_lawful_where_the_fast_path_takes_them(calls, dtype):
    q, k, v = qkv(9, 9, (4, 2), 64, dtype)
    packed = (q, k, v, bounds([4, 5]), bounds([4, 5]), 5, 5, 0.3, True)
    dense = (*(t.transpose(0, 1)[None] for t in (q, k, v)), 0.3, None, True)
    for op, arguments in (("attention_varlen", packed), ("attention", dense)):
        result = torch.library.opcheck(getattr(torch.ops.hf_sparsekv, op).default, arguments)
        assert set(result.values()) == {"SUCCESS"}
    assert calls


def test_the_environment_brings_the_definition_back(monkeypatch, calls):
    q, k, v = qkv(9, 12, (4, 2), 64, torch.float32)
    arguments = (q, k, v, bounds([9]), bounds([12]), 9, 12, 0.3, True)
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "reference")
    for actual, expected in zip(ops.attention_varlen(*arguments), reference.attention_varlen(*arguments), strict=True):
        assert_bitwise_equal(actual, expected)
    assert not calls
