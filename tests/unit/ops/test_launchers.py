"""What the compiled ops refuse reaches the caller as an InputError that uses our names."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.ops import kernels
from hf_sparsekv.ops.launchers import COMPILED, launcher, launchers


def raising(error: Exception):
    def compiled(*_: object) -> None:
        raise error

    return compiled


@pytest.mark.parametrize(
    ("op", "argument", "expected"),
    [
        ("compact_into", "k_out", "k_pool"),
        ("compact_into", "k_pool", "k"),
        ("compact_into", "out_table", "block_table"),
        ("compact", "in_table", "block_table"),
        ("compact", "k_pool", "k_pool"),
        ("write_packed", "slot_mapping", "slots"),
        ("decode_step", "victims", "victims"),
    ],
)
def test_a_refused_argument_is_named_as_the_caller_knows_it(op, argument, expected):
    name, renamed = COMPILED[op]
    refusal = RuntimeError(f"hf_sparsekv_kernels.{name}: argument `{argument}` must be int32, got int64\nfrom: C++")
    with pytest.raises(InputError, match=f"^{op}: `{expected}` must be int32, got int64$") as caught:
        launcher(op, raising(refusal), renamed)(1, 2)
    assert caught.value.__cause__ is refusal


def test_other_arguments_in_the_message_are_renamed_too():
    refusal = RuntimeError("hf_sparsekv_kernels.compact: argument `k_out` must have the dtype of `k_pool` (bfloat16)")
    with pytest.raises(InputError, match=re.escape("`k_pool` must have the dtype of `k` (bfloat16)")):
        launcher("compact_into", raising(refusal), COMPILED["compact_into"][1])()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of luck"), MemoryError()])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught:
        launcher("compact", raising(error), {})()
    assert caught.value is error


def test_arguments_reach_the_compiled_op():
    seen = []
    launcher("compact", lambda *given: seen.extend(given), {})(1, None, "x")
    assert seen == [1, None, "x"]


def test_every_op_with_a_kernel_has_a_compiled_one():
    assert set(COMPILED) == set(kernels.KERNELS)


def test_a_library_of_other_sources_is_refused():
    old = SimpleNamespace(
        **{name: SimpleNamespace(default=print) for name, _ in COMPILED.values() if name != "write_kv"}
    )
    with pytest.raises(ConfigError, match=r"old\.so has no op write_kv: .*build it anew"):
        launchers(old, "old.so")


def test_a_file_that_is_no_library_is_refused(monkeypatch, tmp_path):
    library = tmp_path / "text.so"
    library.write_text("no machine code")
    monkeypatch.setenv(kernels.LIBRARY_VARIABLE, str(library))
    kernels.load.cache_clear()
    with pytest.raises(ConfigError, match=r"text\.so does not load: .*HF_SPARSEKV_KERNELS=off"):
        kernels.load()
    kernels.load.cache_clear()


def test_a_package_without_a_library_is_no_library(monkeypatch, tmp_path):
    (tmp_path / kernels.PACKAGE).mkdir()
    (tmp_path / kernels.PACKAGE / "__init__.py").touch()
    monkeypatch.delenv(kernels.LIBRARY_VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, kernels.PACKAGE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert kernels.find_library() is None
    finally:
        sys.modules.pop(kernels.PACKAGE, None)


@pytest.mark.parametrize(("q", "pool"), [((2, 8), (2, 2, 4, 8)), ((2, 8, 8), (2, 4, 8)), ((2, 8, 8), (2, 0, 4, 8))])
def test_shapes_without_a_group_are_refused_by_name(q, pool):
    with pytest.raises(InputError, match="`q` must be"):
        kernels.attend_slots(torch.zeros(q), torch.zeros(pool), torch.zeros(pool), torch.zeros(2), 1.0, 4)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(InputError, match="`pooling` is 'median': it must be one of none, avg, max, forward"):
        kernels._code(kernels.POOLINGS, "pooling", "median")
