"""Every prefill backend that this GPU has, through the ops, against the definition in fp32.

Shapes: T query row, N key, H query head, K KV head, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.ops import prefill_choice, reference
from hf_sparsekv.ops.prefill_table import BACKENDS, Backend, Problem
from hf_sparsekv.testing.compare import (
    assert_bitwise_equal,
    assert_census,
    assert_close_fp32,
    assert_close_policy,
    assert_repeatable,
)

if not torch.cuda.is_available():
    pytest.skip("prefill backends for GPUs need a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

GPU_BACKENDS = {backend.name: backend for backend in BACKENDS if backend.device == "cuda"}
DTYPES = [torch.bfloat16, torch.float16]
HEADS = [(2, 2), (6, 2), (8, 2), (8, 1)]
"""(H, K): one, three, four and eight query heads a KV head."""
WHOLE = [1, 37, 0, 128, 129, 600]
ROWS_AFTER_A_PAST = [1, 5, 64, 33, 1]
KEYS_WITH_A_PAST = [7, 5, 200, 513, 1000]
NAN = math.nan


def obstacle(backend: Backend, *, head_dim: int = 128) -> str | None:
    """Why this machine cannot run the backend on whole bf16 prompts, or None."""
    facts = Problem(
        device="cuda",
        compute_capability=torch.cuda.get_device_capability()[0],
        dtype=torch.bfloat16,
        head_dim=head_dim,
        is_causal=True,
        is_whole=True,
        has_mask=False,
        is_empty=False,
    )
    return backend.refusal(facts)


@pytest.fixture(params=list(GPU_BACKENDS))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A backend that must take every call, or a skip that says why there is none."""
    chosen = GPU_BACKENDS[request.param]
    reason = obstacle(chosen)
    if reason is not None:
        pytest.skip(f"{chosen.name}: {reason}")
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, chosen.name)
    return chosen


def need_past(backend: Backend) -> None:
    if not backend.allows_past:
        pytest.skip(f"{backend.name} takes whole prompts only, by design")


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Packed tensors on the GPU, and where each request is."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_lengths: list[int]
    k_lengths: list[int]
    scale: float
    is_causal: bool = True

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, bool]:
        q_bounds, k_bounds = (
            torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda() for lengths in (self.q_lengths, self.k_lengths)
        )
        longest = max(self.q_lengths), max(self.k_lengths)
        return self.q, self.k, self.v, q_bounds, k_bounds, *longest, self.scale, self.is_causal

    def run(self) -> tuple[Tensor, Tensor]:
        return ops.attention_varlen(*self.arguments())

    def each(self) -> list[tuple[slice, slice]]:
        found, row, key = [], 0, 0
        for num_rows, num_keys in zip(self.q_lengths, self.k_lengths, strict=True):
            found.append((slice(row, row + num_rows), slice(key, key + num_keys)))
            row, key = row + num_rows, key + num_keys
        return found


def make(
    q_lengths: list[int],
    k_lengths: list[int],
    *,
    heads: tuple[int, int] = (8, 2),
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = True,
) -> Requests:
    q, k, v = (
        torch.randn(sum(lengths), number, dim, device="cuda").to(dtype)
        for lengths, number in ((q_lengths, heads[0]), (k_lengths, heads[1]), (k_lengths, heads[1]))
    )
    return Requests(q=q, k=k, v=v, q_lengths=q_lengths, k_lengths=k_lengths, scale=dim**-0.5, is_causal=is_causal)


def plain_pytorch(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
    """One request [T, H, D] in its own dtype, the softmax in fp32: what models do without a fused kernel."""
    num_rows, num_keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    logits = q.transpose(0, 1) @ keys.transpose(1, 2) * scale
    if is_causal:
        sees = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_rows)
        logits = logits.masked_fill(~sees, -math.inf)
    return (logits.softmax(-1, dtype=torch.float32).to(q.dtype) @ values).transpose(0, 1)


def assert_lse(lse: Tensor, expected: Tensor) -> None:
    """fp32 [..., T] as the definition's, or NaN everywhere from a backend that hides it."""
    assert lse.shape == expected.shape and lse.dtype == torch.float32
    if prefill_choice.gives_lse():
        assert_close_fp32(lse, expected)
    else:
        assert lse.isnan().all()


def assert_parity(requests: Requests) -> None:
    output, lse = requests.run()
    q, k, v = (t.float() for t in (requests.q, requests.k, requests.v))
    expected, expected_lse = reference.attention_varlen(q, k, v, *requests.arguments()[3:])
    assert output.dtype == requests.q.dtype
    for rows, keys in requests.each():
        if rows.start == rows.stop:
            continue
        parts = requests.q[rows], requests.k[keys], requests.v[keys]
        same_dtype = plain_pytorch(*parts, requests.scale, requests.is_causal)
        assert_close_policy(output[rows], expected[rows], same_dtype)
        # The LSE of a single key is a dot product, which may come close to zero: all of a request is one row.
        assert_lse(lse[:, rows].flatten(), expected_lse[:, rows].flatten())


def assert_reads(requests: Requests) -> None:
    """One request whose queries are made zeros: it reads every key that its rows see, and each of them once.

    With values that are one in a dimension of their own, keys taking turns, an output is the number of a dimension's
    keys over that of all: of so few, one more or less does not round away.
    """
    num_rows, num_keys, dim = requests.q.shape[0], requests.k.shape[0], requests.v.shape[2]
    values = torch.eye(dim, device="cuda")[torch.arange(num_keys, device="cuda") % dim][:, None]
    values = values.to(requests.v.dtype).expand_as(requests.v).contiguous()
    output, lse = replace(requests, q=torch.zeros_like(requests.q), v=values).run()
    num_seen = torch.arange(num_keys - num_rows + 1, num_keys + 1, device="cuda")
    counts = values[:, 0].float().cumsum(0)[num_keys - num_rows :]
    found = (output.float() * num_seen[:, None, None]).round()
    assert_bitwise_equal(found, counts[:, None].expand_as(found).contiguous())
    if prefill_choice.gives_lse():
        assert_census(lse, num_seen)
    else:
        assert lse.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_whole_prompts(backend, dtype, heads, dim):
    assert_parity(make(WHOLE, WHOLE, heads=heads, dim=dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 511, 512, 513, 4000, 4097])
def test_one_whole_prompt(backend, dtype, length):
    assert_parity(make([length], [length], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_after_a_past_are_aligned_at_the_last_key(backend, dtype, heads, dim, is_causal):
    need_past(backend)
    assert_parity(make(ROWS_AFTER_A_PAST, KEYS_WITH_A_PAST, heads=heads, dim=dim, dtype=dtype, is_causal=is_causal))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [([1, 1, 1], [4, 900, 1]), ([1, 0, 1], [4, 900, 1]), ([1], [5000]), ([0, 1], [0, 300])],
)
def test_single_rows(backend, heads, q_lengths, k_lengths):
    """FlashAttention-2 folds query heads into rows here, and may split the keys."""
    need_past(backend)
    assert_parity(make(q_lengths, k_lengths, heads=heads))


@pytest.mark.parametrize("dim", [80, 96, 256])
def test_other_head_dimensions(backend, dim):
    reason = obstacle(backend, head_dim=dim)
    if reason is not None:
        pytest.skip(f"{backend.name}: {reason}")
    assert_parity(make([37, 129], [37, 129], dim=dim))


def test_rows_that_see_nothing_give_zero_and_minus_infinity(backend):
    need_past(backend)
    requests = make([5, 2, 3], [2, 0, 3])
    parts = requests.q, requests.k, requests.v
    output, lse = requests.run()
    assert not output[:3].any() and not output[5:7].any()
    expected, expected_lse = reference.attention_varlen(*(t.float() for t in parts), *requests.arguments()[3:])
    assert expected_lse[:, :3].isneginf().all() and expected_lse[:, 5:7].isneginf().all()
    assert_lse(lse, expected_lse)
    for rows, keys in ((slice(3, 5), slice(0, 2)), (slice(7, 10), slice(2, 5))):
        same_dtype = plain_pytorch(requests.q[rows], requests.k[keys], requests.v[keys], requests.scale, True)
        assert_close_policy(output[rows], expected[rows], same_dtype)


def test_every_key_is_read_once(backend):
    assert_reads(make([3000], [3000]))


def test_every_key_of_the_past_is_read_once(backend):
    need_past(backend)
    assert_reads(make([100], [3000]))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("num_rows", "num_keys"), [(129, 129), (33, 513), (1, 77)])
def test_dense_requests(backend, heads, num_rows, num_keys):
    if num_rows != num_keys:
        need_past(backend)
    q = torch.randn(3, heads[0], num_rows, 128, device="cuda").bfloat16()
    k, v = (torch.randn(3, heads[1], num_keys, 128, device="cuda").bfloat16() for _ in range(2))
    output, lse = ops.attention(q, k, v, 0.09, None, True)
    expected, expected_lse = reference.attention(q.float(), k.float(), v.float(), 0.09, None, True)
    assert output.is_contiguous() and lse.is_contiguous()
    assert_lse(lse, expected_lse)
    for b in range(3):
        same_dtype = plain_pytorch(*(t[b].transpose(0, 1) for t in (q, k, v)), 0.09, True)
        assert_close_policy(output[b].transpose(0, 1), expected[b].transpose(0, 1), same_dtype)


def _fused(t: Tensor) -> Tensor:
    """As a view of one projection for queries, keys and values."""
    return torch.full((t.shape[0], t.shape[1] + 4, t.shape[2]), NAN, device="cuda").to(t.dtype)[:, 2:-2].copy_(t)


def _heads_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def _off_boundary(t: Tensor) -> Tensor:
    """Rows that begin where no kernel can load 16 bytes."""
    return torch.full((*t.shape[:2], t.shape[2] + 1), NAN, device="cuda").to(t.dtype)[..., 1:].copy_(t)


def _every_other_column(t: Tensor) -> Tensor:
    return torch.full((*t.shape[:2], 2 * t.shape[2]), NAN, device="cuda").to(t.dtype)[..., ::2].copy_(t)


@pytest.mark.parametrize("view", [_fused, _heads_first, _off_boundary, _every_other_column])
def test_strides_do_not_matter(backend, view: Callable[[Tensor], Tensor]):
    plain = make([129, 60], [129, 60])
    strided = replace(plain, q=view(plain.q), k=view(plain.k), v=view(plain.v))
    expected, expected_lse = plain.run()
    output, lse = strided.run()
    assert output.stride() == torch.empty_like(strided.q).stride()
    assert_bitwise_equal(output, expected)
    assert_bitwise_equal(lse, expected_lse)


def test_a_request_never_sees_its_neighbours(backend):
    requests = make([70, 129, 50], [70, 129, 50])
    output, lse = requests.run()
    for t in (requests.q, requests.k, requests.v):
        t[:70] = NAN
        t[199:] = NAN
    poisoned, poisoned_lse = requests.run()
    assert_bitwise_equal(poisoned[70:199], output[70:199])
    assert_bitwise_equal(poisoned_lse[:, 70:199], lse[:, 70:199])


def test_launches_repeat_bit_for_bit(backend):
    assert_repeatable(make([600, 129], [600, 129]).run)


def test_a_model_that_asks_for_gradients_does_not_matter(backend):
    requests = make([129, 60], [129, 60])
    expected, expected_lse = requests.run()
    with torch.enable_grad():
        output, lse = replace(requests, q=requests.q.clone().requires_grad_()).run()
    assert_bitwise_equal(output.detach(), expected)
    assert_bitwise_equal(lse.detach(), expected_lse)


def test_a_call_is_one_operator_of_a_graph(backend):
    torch._dynamo.reset()
    requests = make([129, 60], [129, 60])
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if prefill_choice.gives_lse():  # this one takes a NaN for another number than itself
        checks.append("test_aot_dispatch_dynamic")
    operator = torch.ops.hf_sparsekv.attention_varlen.default
    result = torch.library.opcheck(operator, requests.arguments(), test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}

    def doubled(*given):
        return tuple(t * 2 for t in ops.attention_varlen(*given))

    for dynamic in (False, True):
        compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for actual, expected in zip(compiled(*requests.arguments()), doubled(*requests.arguments()), strict=True):
            assert_bitwise_equal(actual, expected)


def test_half_precision_never_runs_the_definition_by_itself(monkeypatch):
    """Where torch has an attention for this GPU, that is; with and without a past."""
    monkeypatch.delenv(prefill_choice.BACKEND_VARIABLE, raising=False)
    if obstacle(GPU_BACKENDS["torch_flash"]) is not None:
        pytest.skip(f"torch_flash: {obstacle(GPU_BACKENDS['torch_flash'])}")
    monkeypatch.setattr(reference, "attention", None)  # calling it raises
    monkeypatch.setattr(reference, "attention_varlen", None)
    for requests in (make([129], [129]), make([60, 129], [60, 129]), make([5], [129]), make([3, 9], [30, 90])):
        output, lse = requests.run()
        assert output.isfinite().all() and lse.isfinite().all()
