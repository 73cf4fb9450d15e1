"""The tables of attention backends in README.md and the documentation say what the code's table says."""

import re
from pathlib import Path

import pytest

from hf_sparsekv.ops.prefill_table import BACKENDS, Backend

ROOT = Path(__file__).parents[2]
LSE = {"natural": "natural", "hidden": "hidden: scorers compute theirs"}


def row(backend: Backend) -> str:
    cells = (f"`{backend.name}`", backend.package, LSE[backend.lse_text], backend.dtypes_text, backend.dims_text)
    return "| " + " | ".join((*cells, backend.status)) + " |"


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/attention-backends.md"])
def test_every_backend_has_its_row_in_order_and_nobody_else_has_one(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text.split("| backend | package | LSE |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `.*$", table, re.MULTILINE) == [row(backend) for backend in BACKENDS]


def test_the_packages_say_the_versions_that_the_probes_want():
    from hf_sparsekv.ops import prefill_probes as probes

    by_name = {backend.name: backend.package for backend in BACKENDS}
    oldest, beyond = (".".join(map(str, version)) for version in probes.KNOWN_FLASHINFER)
    assert by_name["flashinfer"] == f"flashinfer-python>={oldest},<{beyond}"
    assert by_name["flash_attn_2"] == f"flash-attn>={'.'.join(map(str, probes.MINIMUM_FLASH_ATTN_2))}"
