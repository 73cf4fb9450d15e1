"""Which backend takes which call: the table, the order, the reasons, the environment variable."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_sparsekv import ops
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.ops import prefill, prefill_choice, prefill_probes
from hf_sparsekv.ops.prefill_table import BACKENDS, Problem

PROMPT = Problem(
    device="cuda",
    compute_capability=9,
    dtype=torch.bfloat16,
    head_dim=128,
    is_causal=True,
    is_whole=True,
    has_mask=False,
    is_empty=False,
)
"""A whole prompt of a Llama on a Hopper."""
BY_NAME = {backend.name: backend for backend in BACKENDS}


@pytest.fixture(autouse=True)
def _fresh_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No override, and nothing remembered of modules that other tests pretend to have."""
    monkeypatch.delenv(prefill_choice.BACKEND_VARIABLE, raising=False)
    prefill_probes.import_module.cache_clear()
    yield
    prefill_probes.import_module.cache_clear()


def have(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Pretend that of the backends for GPUs exactly these are installed."""

    def pretended(name: str) -> Any:
        return prefill_probes.nothing_missing if name in names else lambda: "not installed"

    rows = [b if b.device != "cuda" else replace(b, missing=pretended(b.name)) for b in BACKENDS]
    monkeypatch.setattr(prefill_choice, "BACKENDS", tuple(rows))


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


def chosen(**changes: Any) -> str:
    return prefill_choice.choose(replace(PROMPT, **changes)).name


def test_names_are_unique_and_the_definition_comes_last_and_alone():
    assert len(BY_NAME) == len(BACKENDS)
    assert [backend.is_definition for backend in BACKENDS] == [False] * (len(BACKENDS) - 1) + [True]
    on_gpus = ["flash_attn_3", "cudnn", "flash_attn_2", "torch_flash", "flashinfer"]
    assert [backend.name for backend in BACKENDS if backend.device == "cuda"] == on_gpus


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("flash_attn_3", "flash_attn_2", "cudnn", "torch_flash"), "flash_attn_3"),
        (("flash_attn_2", "cudnn", "torch_flash"), "cudnn"),
        (("flash_attn_2", "torch_flash"), "flash_attn_2"),
        (("torch_flash",), "torch_flash"),
        ((), "reference"),
    ],
)
def test_the_first_that_is_there_takes_a_whole_prompt(monkeypatch, names, expected):
    have(monkeypatch, *names)
    assert chosen() == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"is_whole": False}, "torch_flash"),
        ({"is_single": False}, "torch_flash"),
        ({"is_causal": False}, "torch_flash"),
        ({"compute_capability": 8}, "torch_flash"),
        ({"compute_capability": 10}, "torch_flash"),
        ({"head_dim": 256}, "torch_flash"),
        ({"dtype": torch.float16}, "cudnn"),
        ({"head_dim": 64}, "cudnn"),
        ({"compute_capability": 7}, "reference"),
        ({"dtype": torch.float32}, "reference"),
        ({"dtype": None}, "reference"),
        ({"head_dim": 100}, "reference"),
        ({"head_dim": 264}, "reference"),
        ({"has_mask": True}, "reference"),
        ({"is_empty": True}, "reference"),
        ({"device": "cpu", "compute_capability": None}, "torch_cpu"),
        ({"device": "cpu", "compute_capability": None, "dtype": torch.float32, "is_whole": False}, "torch_cpu"),
        ({"device": "cpu", "compute_capability": None, "dtype": torch.float64}, "reference"),
        ({"device": "cpu", "compute_capability": None, "head_dim": 16}, "reference"),
        ({"device": "cpu", "compute_capability": None, "is_empty": True}, "reference"),
        ({"device": "meta", "compute_capability": None}, "reference"),
    ],
)
def test_what_torch_alone_does_with_a_problem(monkeypatch, changes, expected):
    have(monkeypatch, "cudnn", "torch_flash")
    assert chosen(**changes) == expected


def test_only_a_hopper_is_given_to_flash_attn_3(monkeypatch):
    have(monkeypatch, "flash_attn_3", "torch_flash")
    assert [chosen(compute_capability=major) for major in (8, 9, 10)] == ["torch_flash", "flash_attn_3", "torch_flash"]


def test_the_environment_names_a_backend(monkeypatch):
    have(monkeypatch, "flash_attn_3", "flash_attn_2", "cudnn", "torch_flash")
    for name in ("flash_attn_2", "cudnn", "torch_flash", "reference"):
        monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, name)
        assert chosen() == name
        assert chosen(has_mask=True) == chosen(is_empty=True) == "reference"  # nobody else can
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "")
    assert chosen() == "flash_attn_3"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("flash_attn_4", {}, ["flash_attn_4", "no such backend", *BY_NAME]),
        ("flash_attn_4", {"has_mask": True}, ["no such backend"]),
        (
            "flash_attn_3",
            {},
            [
                "flash_attn_3 not installed",
                "one of: cudnn, torch_flash, sdpa, eager, reference (not flash_attn_2, flashinfer: not installed",
            ],
        ),
        ("cudnn", {"is_whole": False}, ["whole prompts only", "one of: torch_flash, sdpa, eager, reference"]),
        ("cudnn", {"is_causal": False}, ["causal attention only"]),
        ("cudnn", {"compute_capability": 8}, ["9.x", "8.x", "one of: torch_flash, sdpa, eager, reference"]),
        ("torch_flash", {"compute_capability": 7}, ["8.0 or later", "7.x", "one of: sdpa, eager, reference"]),
        ("torch_flash", {"dtype": torch.float32}, ["bf16, fp16", "torch.float32", "one of: sdpa, eager, reference"]),
        ("torch_flash", {"dtype": None}, ["mixed dtypes"]),
        ("torch_flash", {"head_dim": 100}, ["8 to 256 in steps of 8", "100"]),
        (
            "torch_flash",
            {"device": "cpu", "compute_capability": None},
            ["runs on cuda", "one of: torch_cpu, sdpa, eager, reference"],
        ),
        ("torch_cpu", {}, ["runs on cpu", "one of: cudnn, torch_flash, sdpa, eager, reference"]),
    ],
)
def test_an_impossible_wish_names_the_reason_and_what_there_is(monkeypatch, name, changes, words):
    have(monkeypatch, "cudnn", "torch_flash")
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, name)
    with pytest.raises(ConfigError) as raised:
        chosen(**changes)
    for word in (prefill_choice.BACKEND_VARIABLE, *words):
        assert word in str(raised.value)


def test_the_ops_obey_the_environment(monkeypatch):
    q, k = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 3, 64)
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "torch_flash")
    with pytest.raises(ConfigError, match="torch_flash runs on cuda, the tensors are on cpu"):
        ops.attention(q, k, k, 0.5, None, True)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ConfigError, match="one of: torch_cpu, sdpa, eager, reference"):
        ops.attention_varlen(*(t[0].transpose(0, 1) for t in (q, k, k)), bounds, bounds, 3, 3, 0.5, True)
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    assert ops.attention(q, k, k, 0.5, mask, False)[0].isfinite().all()


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"__version__": "2.8.3.post2", "flash_attn_varlen_func": print}, None),
        ({"__version__": "3.0", "flash_attn_varlen_func": print}, None),
        ({"__version__": "2.5.9", "flash_attn_varlen_func": print}, "2.5.9 is too old: install flash-attn>=2.8"),
        ({"flash_attn_varlen_func": print}, "unknown is too old"),
        ({"__version__": "2.8.3"}, "flash_attn has no flash_attn_varlen_func"),  # FlashAttention-4 alone
    ],
)
def test_flash_attn_2_is_probed_by_what_it_offers(monkeypatch, attributes, reason):
    monkeypatch.setitem(sys.modules, "flash_attn", module("flash_attn", **attributes))
    found = prefill_probes.flash_attn_2_missing()
    assert found is None if reason is None else reason in found


def test_a_module_that_is_not_there_or_does_not_load_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # importing it raises ModuleNotFoundError
    assert prefill_probes.flash_attn_3_missing() == "not installed"
    prefill_probes.import_module.cache_clear()
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert prefill_probes.flash_attn_3_missing() == "cannot be imported: undefined symbol: _ZN3c10"
    prefill_probes.import_module.cache_clear()
    (tmp_path / "flash_attn_interface.py").write_text("import module_that_flash_attn_needs")
    assert "module_that_flash_attn_needs" in str(prefill_probes.flash_attn_3_missing())


def test_operators_of_torch_are_probed_by_their_schema(monkeypatch):
    missing = prefill_probes._operator_missing
    varlen = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    dense = "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask"
    assert missing("_flash_attention_forward", varlen) is None
    assert missing("_scaled_dot_product_cudnn_attention", dense) is None
    assert "changed the arguments" in str(missing("_flash_attention_forward", dense))
    assert "has no aten::_no_such_attention" in str(missing("_no_such_attention", dense))
    if torch.version.cuda is None:
        assert prefill_probes.cudnn_missing() == prefill_probes.torch_flash_missing() == "torch was built without CUDA"
    assert prefill_probes.torch_cpu_missing() is None


def test_a_cpu_operator_that_does_not_group_heads_is_not_used(monkeypatch):
    def something_else(q, k, v, dropout, is_causal, *, scale):
        del dropout, is_causal, k, v
        return q * scale, q.sum(-1)

    name = "_scaled_dot_product_flash_attention_for_cpu"
    monkeypatch.setattr(torch.ops.aten, name, _Operator(getattr(torch.ops.aten, name), something_else))
    assert "does not group the heads" in str(prefill_probes.torch_cpu_missing.__wrapped__())


def test_the_probe_of_the_cpu_operator_does_not_depend_on_defaults_in_force():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as while transformers builds a model
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            assert prefill_probes.torch_cpu_missing.__wrapped__() is None
    finally:
        torch.set_default_dtype(before)


class _Operator:
    """An aten operator's schema with another function behind it."""

    def __init__(self, operator: Any, function: Any) -> None:
        self.default, self._function = operator.default, function

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._function(*args, **keywords)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": torch.zeros(1, 2, 4, 64)}, ["k has shape [1, 2, 3, 64], v [1, 2, 4, 64]"]),
        ({"q": torch.zeros(1, 4, 3, 32)}, ["q has head dimension 32, k 64"]),
        ({"q": torch.zeros(1, 3, 3, 64)}, ["q has 3 heads", "2 of k and v"]),
        ({"q": torch.zeros(1, 4, 3, 64, device="meta")}, ["q is on meta", "k on cpu"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, words):
    tensors = {"q": torch.zeros(1, 4, 3, 64), "k": torch.zeros(1, 2, 3, 64), "v": torch.zeros(1, 2, 3, 64)} | change
    with pytest.raises(InputError) as raised:
        prefill.attention(*tensors.values(), 0.5, None, True)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("q_bounds", "k_bounds", "words"),
    [
        (torch.tensor([0, 3]), torch.tensor([0, 3], dtype=torch.int32), "cu_seqlens_q is torch.int64"),
        (torch.tensor([0, 3], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32), r"cu_seqlens_k is .* \[2, 2\]"),
        (torch.tensor([0, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32), "cu_seqlens_q has 2 .* 3"),
        (
            torch.zeros(2, dtype=torch.int32, device="meta"),
            torch.zeros(2, dtype=torch.int32),
            "cu_seqlens_q is on meta",
        ),
    ],
)
def test_bounds_that_do_not_fit_are_named(q_bounds, k_bounds, words):
    q, k = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64)
    with pytest.raises(InputError, match=words):
        prefill.attention_varlen(q, k, k, q_bounds, k_bounds, 3, 3, 0.5, True)
