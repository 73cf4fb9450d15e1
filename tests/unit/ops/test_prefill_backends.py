"""How each GPU backend is called: stand-ins record their arguments and compute through the definition.

What they stand for is not tested here but in tests/gpu, on a GPU.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_sparsekv.ops import prefill_backends, prefill_probes, reference
from hf_sparsekv.ops.prefill_backends import LseForm, Packed, bucket_length, natural_lse
from hf_sparsekv.ops.prefill_table import BACKENDS
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_fp32

BY_NAME = {backend.name: backend for backend in BACKENDS}
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 64, 0.3
Calls = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _fresh_probes() -> Iterator[None]:
    prefill_probes.import_module.cache_clear()
    yield
    prefill_probes.import_module.cache_clear()


def packed(q_lengths: list[int], k_lengths: list[int], *, is_causal: bool = True) -> Packed:
    bounds = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (q_lengths, k_lengths)]
    return Packed(
        q=torch.randn(sum(q_lengths), HEADS, DIM),
        k=torch.randn(sum(k_lengths), KV_HEADS, DIM),
        v=torch.randn(sum(k_lengths), KV_HEADS, DIM),
        cu_seqlens_q=bounds[0],
        cu_seqlens_k=bounds[1],
        max_rows=max(q_lengths),
        max_keys=max(k_lengths),
        scale=SCALE,
        is_causal=is_causal,
    )


def varlen_stand_in(calls: Calls, empty: float, returns_lse: bool = True) -> Callable[..., Any]:
    """The arguments that the varlen kernels have in common, and FlashAttention-2's trap."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, max_rows: int, max_keys: int, **rest: Any
    ) -> Any:
        calls.append({"q": q, "k": k, "v": v, "max_rows": max_rows, "max_keys": max_keys, **rest})
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        if max_rows == 1 and empty == math.inf:  # it folds a group's query heads into rows: each request needs one
            assert q.shape[0] == q_bounds.shape[0] - 1
        bounds = (q_bounds, k_bounds, max_rows, max_keys)
        output, lse = reference.attention_varlen(q, k, v, *bounds, rest["softmax_scale"], rest["causal"])
        lse = lse.masked_fill(lse == -math.inf, empty)
        return (output, lse, None) if returns_lse else output

    return attend


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    module = ModuleType(name)
    module.__version__ = "2.8.3"
    module.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, name, module)


def install_flash_attn_3(monkeypatch: pytest.MonkeyPatch, calls: Calls, keyword: str | None) -> None:
    """FlashAttention-3 as it was and is: the keyword that makes it return the LSE came later, or has another name."""
    with_lse, without = (varlen_stand_in(calls, -math.inf, returns) for returns in (True, False))
    common = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False"
    given = (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal"
    )
    if keyword is None:
        source = f"lambda {common}: with_lse({given})[:2]"
    else:
        source = f"lambda {common}, {keyword}=False: with_lse({given})[:2] if {keyword} else without({given})"
    install(monkeypatch, "flash_attn_interface", eval(source, {"with_lse": with_lse, "without": without}))


def install_torch_flash(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    stand_in = varlen_stand_in(calls, math.inf)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        assert dropout_p == 0.0 and not return_debug_mask
        rest = {"softmax_scale": scale, "causal": is_causal}
        return (*stand_in(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, **rest), None, None)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)


def install_cudnn(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0 and not return_debug_mask
        assert scale is not None
        calls.append({"q": query, "k": key, "v": value})
        output, lse = reference.attention(query, key, value, scale, None, is_causal)
        return output, lse[..., None], None, None, 0, 0, None, None, None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", attend)


VARLEN = ("flash_attn_3", "flash_attn_2", "torch_flash")
INSTALL: dict[str, Callable[[pytest.MonkeyPatch, Calls], None]] = {
    "flash_attn_3": lambda m, calls: install_flash_attn_3(m, calls, "return_attn_probs"),
    "flash_attn_2": lambda m, calls: install(m, "flash_attn", varlen_stand_in(calls, math.inf)),
    "torch_flash": install_torch_flash,
    "cudnn": install_cudnn,
}


def assert_is_the_definition(name: str, problem: Packed) -> None:
    output, lse = BY_NAME[name].run(problem)
    expected, expected_lse = prefill_backends.definition(problem)
    assert lse.dtype == torch.float32 and lse.shape == (HEADS, problem.q.shape[0])
    assert_close_fp32(output, expected)
    assert_close_fp32(lse, expected_lse)


@pytest.mark.parametrize("name", VARLEN)
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [([5, 0, 1, 9], [5, 0, 1, 9]), ([2, 3], [7, 30]), ([1, 1], [4, 9]), ([1, 0], [4, 9]), ([3, 2], [0, 1])],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_varlen_backend_is_called_once_for_all_requests(monkeypatch, name, q_lengths, k_lengths, is_causal):
    calls: Calls = []
    INSTALL[name](monkeypatch, calls)
    assert_is_the_definition(name, packed(q_lengths, k_lengths, is_causal=is_causal))
    assert len(calls) == 1
    assert calls[0]["max_rows"] >= max(q_lengths)
    assert calls[0]["max_keys"] == max(k_lengths)
    assert calls[0]["softmax_scale"] == SCALE
    assert calls[0]["causal"] is is_causal
    if name == "flash_attn_2":
        assert calls[0]["return_attn_probs"] is True


@pytest.mark.parametrize("keyword", ["return_attn_probs", "return_softmax_lse", None])
def test_flash_attn_3_returns_the_lse_whatever_its_keyword(monkeypatch, keyword):
    calls: Calls = []
    install_flash_attn_3(monkeypatch, calls, keyword)
    assert_is_the_definition("flash_attn_3", packed([4, 2], [4, 6]))


@pytest.mark.parametrize("name", VARLEN)
def test_rows_that_a_kernel_cannot_load_are_copied(monkeypatch, name):
    """16 bytes at a time, from 16-byte boundaries, with neighbours in the last dimension."""
    calls: Calls = []
    INSTALL[name](monkeypatch, calls)
    plain = packed([5], [5])
    fused = torch.randn(5, HEADS + 2 * KV_HEADS, DIM)  # one projection for q, k and v: a view is good enough
    assert_is_the_definition(name, replace(plain, q=fused[:, :HEADS]))
    assert calls[-1]["q"].data_ptr() == fused.data_ptr()
    odd_start = torch.randn(5 * HEADS * DIM + 1)[1:].view(5, HEADS, DIM)
    odd_rows = torch.randn(5, HEADS, DIM + 1)[..., :DIM]
    odd_columns = torch.randn(5, HEADS, 2 * DIM)[..., ::2]
    for q in (odd_start, odd_rows, odd_columns):
        assert_is_the_definition(name, replace(plain, q=q))
        assert calls[-1]["q"].is_contiguous() and calls[-1]["q"].data_ptr() % 16 == 0


def test_cudnn_takes_one_prompt_at_a_time_padded_with_zeros(monkeypatch):
    calls: Calls = []
    install_cudnn(monkeypatch, calls)
    lengths = [3, 0, 512, 513]
    assert_is_the_definition("cudnn", packed(lengths, lengths))
    assert [list(call["q"].shape) for call in calls] == [[1, HEADS, n, DIM] for n in (512, 512, 1024)]
    assert [list(call["k"].shape) for call in calls] == [[1, KV_HEADS, n, DIM] for n in (512, 512, 1024)]
    for name in ("q", "k", "v"):
        assert not calls[0][name][:, :, 3:].any()
        assert len({call[name].transpose(1, 2).is_contiguous() for call in calls}) == 1  # strides are part of a plan


def test_cudnn_sees_one_layout_whatever_the_strides(monkeypatch):
    calls: Calls = []
    install_cudnn(monkeypatch, calls)
    plain = packed([512], [512])
    strided = torch.randn(HEADS, 512, DIM).transpose(0, 1)
    assert_is_the_definition("cudnn", plain)
    assert_is_the_definition("cudnn", replace(plain, q=strided))
    assert calls[0]["q"].stride() == calls[1]["q"].stride()


def test_one_request_that_fills_the_tensors_is_not_read_on_the_host(monkeypatch):
    calls: Calls = []
    install_cudnn(monkeypatch, calls)
    problem = packed([7], [7])
    hidden = torch.empty(2, dtype=torch.int32, device="meta")  # reading it raises
    output, lse = BY_NAME["cudnn"].run(replace(problem, cu_seqlens_q=hidden, cu_seqlens_k=hidden))
    expected, expected_lse = prefill_backends.definition(problem)
    assert_close_fp32(output, expected)
    assert_close_fp32(lse, expected_lse)


def test_bucketed_lengths_grow_by_512_and_then_by_1024():
    assert [bucket_length(n) for n in (1, 512, 513, 4000, 4096, 4097, 5120, 5121)] == [
        512, 512, 1024, 4096, 4096, 5120, 5120, 6144,
    ]  # fmt: skip
    assert len({bucket_length(n) for n in range(1, 20_481)}) == 24


def test_every_layout_of_an_lse_becomes_ours():
    ours = torch.randn(3, 5)
    ours[1, 2] = -math.inf
    for layout, given in (("HT", ours), ("1HT", ours[None]), ("1HT1", ours[None, ..., None])):
        assert_bitwise_equal(natural_lse(given.clone(), LseForm(layout=layout), 3, 5), ours)
    positive = ours.masked_fill(ours == -math.inf, math.inf)
    assert_bitwise_equal(natural_lse(positive, LseForm(layout="HT", empty=math.inf), 3, 5), ours)


@pytest.mark.parametrize(
    ("lse", "words"),
    [(torch.zeros(5, 3), r"shape \[5, 3\], expected \[3, 5\]"), (torch.zeros(3, 5).half(), "torch.float16")],
)
def test_an_lse_of_another_form_is_not_guessed_at(lse, words):
    with pytest.raises(AssertionError, match=words):
        natural_lse(lse, LseForm(layout="HT"), 3, 5)


def test_weights_that_ask_for_a_gradient_do_not_matter(monkeypatch):
    calls: Calls = []
    install_torch_flash(monkeypatch, calls)
    problem = packed([3, 2], [1, 4])
    problem.q.requires_grad_()
    output, lse = BY_NAME["torch_flash"].run(problem)
    assert not output.requires_grad and not lse.requires_grad
    assert lse[:, :2].isneginf().all()
