"""FlashInfer as a backend: what it is called with, that its LSE is not used, and what the probe asks of a machine.

The stand-in has the signature of `flashinfer.single_prefill_with_kv_cache` (0.6.8) and gives what that is documented to
give; FlashInfer itself is tested in tests/gpu, where it is installed.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_sparsekv.ops import prefill_backends, prefill_probes, reference
from hf_sparsekv.ops.prefill_backends import Packed
from hf_sparsekv.ops.prefill_table import BACKENDS
from hf_sparsekv.testing.compare import assert_close_fp32

FLASHINFER = next(backend for backend in BACKENDS if backend.name == "flashinfer")
HEADS, KV_HEADS, DIM = 4, 2, 64
Calls = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _fresh_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in prefill_probes.NVCC_FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    prefill_probes.import_module.cache_clear()
    yield
    prefill_probes.import_module.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, calls: Calls | None = None, version: str = "0.6.8.post1") -> None:
    """A module `flashinfer` that computes through the definition."""
    taken: Calls = [] if calls is None else calls

    def single_prefill_with_kv_cache(
        q: Tensor, k: Tensor, v: Tensor, scale_q: None = None, scale_k: None = None, scale_v: None = None,
        o_dtype: None = None, custom_mask: None = None, packed_custom_mask: None = None, causal: bool = False,
        kv_layout: str = "NHD", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, backend: str = "auto",
        return_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        assert not return_lse, "its LSE is too rough to be of use"
        assert (kv_layout, pos_encoding_mode, window_left, backend) == ("NHD", "NONE", -1, "fa2")
        assert all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0 for t in (q, k, v))
        taken.append({"q": q, "k": k, "causal": causal, "sm_scale": sm_scale})
        scale = 1.0 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
        dense = (t.transpose(0, 1)[None] for t in (q, k, v))
        return reference.attention(*dense, scale, None, causal)[0][0].transpose(0, 1).contiguous()

    module = ModuleType("flashinfer")
    module.__version__ = version
    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def packed(q_lengths: list[int], k_lengths: list[int], *, is_causal: bool = True, scale: float = 0.3) -> Packed:
    bounds = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (q_lengths, k_lengths)]
    return Packed(
        q=torch.randn(sum(q_lengths), HEADS, DIM),
        k=torch.randn(sum(k_lengths), KV_HEADS, DIM),
        v=torch.randn(sum(k_lengths), KV_HEADS, DIM),
        cu_seqlens_q=bounds[0],
        cu_seqlens_k=bounds[1],
        max_rows=max(q_lengths),
        max_keys=max(k_lengths),
        scale=scale,
        is_causal=is_causal,
    )


def assert_is_the_definition(problem: Packed) -> None:
    output, lse = FLASHINFER.run(problem)
    expected, _ = prefill_backends.definition(problem)
    assert lse.dtype == torch.float32 and lse.shape == (HEADS, problem.q.shape[0])
    assert lse.isnan().all()  # of rows that the definition took too: an LSE is there for all rows or for none
    assert_close_fp32(output, expected)


@pytest.mark.parametrize("is_causal", [True, False])
def test_each_request_is_one_call_with_its_past(monkeypatch, is_causal):
    calls: Calls = []
    install(monkeypatch, calls)
    assert_is_the_definition(packed([5, 1, 0, 9], [5, 40, 3, 12], is_causal=is_causal))
    assert [(len(call["q"]), len(call["k"])) for call in calls] == [(5, 5), (1, 40), (9, 12)]
    assert {(call["causal"], call["sm_scale"]) for call in calls} == {(is_causal, 0.3)}


def test_rows_that_see_nothing_are_not_given_to_it(monkeypatch):
    calls: Calls = []
    install(monkeypatch, calls)
    assert_is_the_definition(packed([4, 2, 3], [2, 0, 3]))
    assert [(len(call["q"]), len(call["k"])) for call in calls] == [(3, 3)]


def test_rows_that_it_cannot_load_are_copied(monkeypatch):
    calls: Calls = []
    install(monkeypatch, calls)
    plain = packed([5], [5])
    assert_is_the_definition(replace(plain, q=torch.randn(5, HEADS, 2 * DIM)[..., ::2]))
    assert_is_the_definition(replace(plain, q=torch.randn(5 * HEADS * DIM + 1)[1:].view(5, HEADS, DIM)))
    assert all(call["q"].is_contiguous() for call in calls)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.6.8.post1", None),
        ("0.7.4", None),
        ("0.5.3", "0.5.3 is not a version that is known: install flashinfer-python>=0.6,<0.8"),
        ("0.8.0", "0.8.0 is not a version that is known"),
        ("nightly", "nightly is not a version that is known"),
    ],
)
def test_only_versions_that_are_known_are_called(monkeypatch, tmp_path, version, words):
    install(monkeypatch, version=version)
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("nvcc", "ninja"):
        (tmp_path / tool).touch(mode=0o755)
    found = prefill_probes.flashinfer_missing()
    assert found is None if words is None else words in str(found)


def test_what_it_needs_to_compile_is_asked_for_first(monkeypatch, tmp_path):
    install(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    assert "finds no nvcc" in str(prefill_probes.flashinfer_missing())
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert "finds no ninja" in str(prefill_probes.flashinfer_missing())
    (tmp_path / "bin" / "ninja").touch(mode=0o755)
    assert prefill_probes.flashinfer_missing() is None
    (tmp_path / "bin" / "ninja").unlink()
    (tmp_path / "flashinfer_jit_cache.py").touch()  # a package of compiled kernels
    monkeypatch.syspath_prepend(str(tmp_path))
    assert prefill_probes.flashinfer_missing() is None


def test_an_installation_that_contradicts_itself_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('flashinfer-cubin does not match')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert prefill_probes.flashinfer_missing() == "cannot be imported: flashinfer-cubin does not match"
