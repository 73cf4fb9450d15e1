"""`hf-sparsekv doctor` on prefill attention: what is there, what is chosen, where compiled kernels are."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_sparsekv.cli import doctor as doctor_module
from hf_sparsekv.cli.doctor import doctor, machine_facts
from hf_sparsekv.ops import prefill_choice, prefill_probes
from hf_sparsekv.ops.kernels import KERNELS, LIBRARY_VARIABLE
from hf_sparsekv.ops.library import SCHEMAS
from hf_sparsekv.ops.prefill_table import BACKENDS


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing set in the environment, and nothing remembered of modules that tests pretend to have."""
    monkeypatch.delenv(prefill_choice.BACKEND_VARIABLE, raising=False)
    monkeypatch.setenv(LIBRARY_VARIABLE, "off")
    prefill_probes.import_module.cache_clear()
    yield
    prefill_probes.import_module.cache_clear()


def facts_on_a_gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> dict[str, Any]:
    """The facts as they would be with one GPU of this compute capability."""
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "a GPU",
        "get_device_capability": (major, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    attention: dict[str, Any] = machine_facts()["attention"]
    return attention


def test_every_backend_has_a_row_that_is_json(capsys):
    doctor(as_json=True)
    facts = json.loads(capsys.readouterr().out)["attention"]
    assert list(facts["backends"]) == [backend.name for backend in BACKENDS]
    assert facts["backends"]["reference"]["here"] == "yes"
    assert facts["backends"]["torch_cpu"] == {
        "title": "torch's flash attention for the CPU",
        "here": "yes",
        "package": "torch",
        "status": "run on CPU",
        "lse": "natural",
        "dtypes": "fp32, bf16, fp16",
        "head dims": "32-256 by 8",
        "packed": "one by one",
        "past": "yes",
    }
    assert facts["backends"]["sdpa"]["here"] == "yes, by name"
    assert facts["backends"]["sdpa"]["lse"] == "hidden"
    assert facts["backends"]["flashinfer"]["lse"] == "hidden"
    assert facts["chosen"]["cpu"] == {
        "whole prompts": "torch_cpu",
        "prompts after a past": "torch_cpu",
        "with a mask": "reference",
    }


def test_the_table_is_printed(capsys):
    doctor()
    out = capsys.readouterr().out
    for backend in BACKENDS:
        assert backend.name in out
    for text in ("cpu, whole prompts: torch_cpu", f"{prefill_choice.BACKEND_VARIABLE}: not set", "not run"):
        assert text in out


@pytest.mark.parametrize(("major", "expected"), [(9, "flash_attn_3"), (8, "flash_attn_2"), (7, "reference")])
def test_what_is_installed_is_chosen_where_the_gpu_can_run_it(monkeypatch, major, expected):
    for name in ("flash_attn", "flash_attn_interface"):
        module = ModuleType(name)
        module.__version__ = "2.8.3"
        module.flash_attn_varlen_func = print
        monkeypatch.setitem(sys.modules, name, module)
    facts = facts_on_a_gpu(monkeypatch, major)
    assert facts["chosen"]["cuda"]["whole prompts"] == expected
    assert facts["chosen"]["cuda"]["with a mask"] == "reference"
    assert (facts["backends"]["flash_attn_3"]["here"] == "yes") == (major == 9)
    assert (facts["backends"]["flash_attn_2"]["here"] == "yes") == (major >= 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_what_a_machine_without_a_gpu_lacks_is_said(monkeypatch):
    module = ModuleType("flash_attn")
    module.__version__ = "2.8.3"
    module.flash_attn_varlen_func = print
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    backends = machine_facts()["attention"]["backends"]
    assert backends["flash_attn_3"]["here"] == "not installed"
    assert backends["flash_attn_2"]["here"] == "no GPU that torch sees"


def test_a_wish_that_cannot_be_had_is_shown_not_raised(monkeypatch):
    monkeypatch.setenv(prefill_choice.BACKEND_VARIABLE, "flash_attn_2")
    facts = machine_facts()["attention"]
    assert facts[prefill_choice.BACKEND_VARIABLE] == "flash_attn_2"
    assert "runs on cuda, the tensors are on cpu" in facts["chosen"]["cpu"]["whole prompts"]
    assert facts["chosen"]["cpu"]["with a mask"] == "reference"


def test_each_op_says_where_its_kernel_is(monkeypatch, tmp_path):
    kernels = machine_facts()["kernels"]
    assert set(kernels) == set(SCHEMAS) - {"attention", "attention_varlen"}
    assert {op for op, kernel in kernels.items() if kernel == "not found"} == set(KERNELS)
    library = tmp_path / "kernels.so"
    library.touch()
    monkeypatch.setattr(doctor_module, "find_library", lambda: Path(library))
    kernels = machine_facts()["kernels"]
    assert {op for op, kernel in kernels.items() if kernel == str(library)} == set(KERNELS)
    assert set(kernels.values()) == {str(library), "none is written"}


def test_the_table_of_backends_fits_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    doctor()
    printed = capsys.readouterr().out.split("prefill attention")[1].split("whole prompts")[0].splitlines()
    head = next(line for line in printed if line.startswith("backend"))
    assert head.split() == ["backend", "here", "status", "lse", "dtypes", "head", "dims", "past"]
    assert "…" not in "".join(printed), "something is cut off"
    rows = [line for line in printed if line.split(" ")[0] in {backend.name for backend in BACKENDS}]
    assert len(rows) == len(BACKENDS)
    for row, backend in zip(rows, BACKENDS, strict=True):
        assert row.split()[-1] == ("yes" if backend.allows_past else "no")
