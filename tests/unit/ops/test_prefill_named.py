"""Backends that have to be named: how a name is given and refused, and those that hide the LSE."""

import threading
from dataclasses import replace

import pytest
import torch

from hf_sparsekv import ops
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.ops import prefill_choice, reference
from hf_sparsekv.ops.prefill_choice import check_known, check_prompts, choose, gives_lse, named, prompt_problem, using
from hf_sparsekv.ops.prefill_table import BACKENDS
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_fp32, assert_close_policy

HIDING = ("sdpa", "eager")
"""Those of them that run anywhere."""
ON_CPU = ("torch_cpu", *HIDING, "reference")
PROMPT = prompt_problem("cpu", torch.float32, 64)


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch):
    monkeypatch.delenv(prefill_choice.BACKEND_VARIABLE, raising=False)


def qkv(q_lengths, k_lengths, dtype=torch.float32):
    bounds = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (q_lengths, k_lengths)]
    q, k, v = (torch.randn(n, heads, 64).to(dtype) for n, heads in zip(
        (sum(q_lengths), sum(k_lengths), sum(k_lengths)), (8, 2, 2), strict=True))  # fmt: skip
    return q, k, v, *bounds, max(q_lengths), max(k_lengths), 0.125


def test_the_rows_of_this_machine_are_the_ones_tested():
    assert tuple(backend.name for backend in BACKENDS if backend.device != "cuda") == ON_CPU
    assert tuple(backend.name for backend in BACKENDS if backend.lse is None) == ("flashinfer", *HIDING)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_backend_computes_the_definition(name, is_causal, dtype):
    arguments = (*qkv([5, 1, 0, 40, 3], [5, 90, 2, 73, 1], dtype), is_causal)
    with using(name):
        output, lse = ops.attention_varlen(*arguments)
    wide = (*(t.float() for t in arguments[:3]), *arguments[3:])
    expected, expected_lse = reference.attention_varlen(*wide)
    if dtype == torch.float32:
        assert_close_fp32(output, expected)
    else:
        with using("eager"):
            assert_close_policy(output, expected, ops.attention_varlen(*arguments)[0])
    assert lse.shape == expected_lse.shape and lse.dtype == torch.float32
    if name in HIDING:
        assert lse.isnan().all()  # whoever takes it for an LSE gets nothing else
    else:
        assert_close_fp32(lse[:, :-3].flatten(), expected_lse[:, :-3].flatten())


@pytest.mark.parametrize("name", ON_CPU)
def test_a_dense_call_goes_to_it_too(name):
    q, k = torch.randn(2, 8, 9, 64), torch.randn(2, 2, 30, 64)
    with using(name):
        output, lse = ops.attention(q, k, k, 0.125, None, True)
    expected, _ = reference.attention(q, k, k, 0.125, None, True)
    assert_close_fp32(output, expected)
    assert bool(lse.isnan().all()) == (name in HIDING)


def test_the_caller_comes_before_the_environment_and_that_before_the_table(monkeypatch):
    assert named() is None and gives_lse() and choose(PROMPT).name == "torch_cpu"
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "sdpa")
    assert named() == "sdpa" and not gives_lse() and choose(PROMPT).name == "sdpa"
    with using(None):
        assert choose(PROMPT).name == "sdpa"
    with using("reference"):
        assert named() == "reference" and gives_lse() and choose(PROMPT).name == "reference"
        with using("eager"):
            assert choose(PROMPT).name == "eager"
        with using(None):
            assert choose(PROMPT).name == "reference"
    assert named() == "sdpa"


def test_a_name_ends_with_its_block_and_holds_in_its_thread_only():
    seen = []
    with using("eager"):
        thread = threading.Thread(target=lambda: seen.append(named()))
        thread.start()
        thread.join()
    assert seen == [None] and named() is None
    with pytest.raises(ZeroDivisionError), using("eager"):
        seen.append(1 / 0)
    assert named() is None


def test_nobody_gets_a_backend_that_has_to_be_named(monkeypatch):
    asked = [replace(backend, is_on_request=True) if backend.name == "torch_cpu" else backend for backend in BACKENDS]
    monkeypatch.setattr(prefill_choice, "BACKENDS", tuple(asked))
    assert choose(PROMPT).name == "reference"
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "torch_cpu")
    assert choose(PROMPT).name == "torch_cpu"


@pytest.mark.parametrize("name", HIDING)
def test_masks_and_empty_requests_are_the_definitions(name):
    q, k = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 3, 64)
    mask = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    with using(name):
        masked = ops.attention(q, k, k, 0.5, mask, False)
        empty = ops.attention(q, k[:, :, :0], k[:, :, :0], 0.5, None, True)
    for actual, expected in zip(masked, reference.attention(q, k, k, 0.5, mask, False), strict=True):
        assert_bitwise_equal(actual, expected)
    assert not empty[0].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_an_unknown_name_tells_what_there_is_and_why_not_the_others():
    with pytest.raises(ConfigError) as raised:
        check_known("flash")
    words = ["backend 'flash'", "no such backend", f"one of: {', '.join(ON_CPU)}", "flash_attn_3", "flashinfer: "]
    assert all(word in str(raised.value) for word in words), raised.value
    with pytest.raises(ConfigError, match="no such backend"), using("flash"):
        pass
    with pytest.raises(ConfigError, match="backend 3: no such backend"):
        check_known(3)


def test_prompts_are_checked_before_anything_is_computed(monkeypatch):
    check_prompts(None, "cpu", torch.float64, 16, is_whole=True)
    check_prompts("sdpa", "cpu", torch.float64, 16, is_whole=False)
    with pytest.raises(ConfigError, match=r"backend 'torch_cpu': torch_cpu takes fp32, bf16, fp16, not torch\.float64"):
        check_prompts("torch_cpu", "cpu", torch.float64, 64, is_whole=True)
    with pytest.raises(ConfigError, match="one of: sdpa, eager, reference"):
        check_prompts("torch_cpu", "cpu", torch.float32, 16, is_whole=True)
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "torch_flash")
    with pytest.raises(ConfigError, match="HF_SPARSEKV_ATTENTION=torch_flash: torch_flash runs on cuda"):
        check_prompts(None, "cpu", torch.float32, 64, is_whole=True)
