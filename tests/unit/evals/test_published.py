"""Every published figure can be made again, and none stands where the dense model guesses.

Guards against files that do not say what made them, and against losses quoted where there was nothing to lose.
"""

import json
from pathlib import Path

import pytest

from evals.verdict import dense_of, doubt

RESULTS = Path(__file__).parents[3] / "evals" / "results"
FILES = sorted(RESULTS.rglob("*.json"))
QUOTED = [("comparison_retrieval", "needle"), ("comparison_words", "document_qa")]
"""Accuracies in the README; of MMLU it has how often a choice stays the dense one, right or wrong."""


def parts(found):
    """Every mapping in a report."""
    if isinstance(found, dict):
        yield found
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from parts(inner)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_file_says_what_made_its_figures(path):
    report = json.loads(path.read_text(encoding="utf-8"))
    versions = [part["versions"] for part in parts(report) if "versions" in part]
    assert versions
    assert all({"hf_sparsekv", "torch", "transformers"} <= set(found) for found in versions)
    assert any({"command", "settings", "configs"} & set(part) for part in parts(report))


@pytest.mark.parametrize(("name", "task"), QUOTED)
def test_what_the_readme_quotes_has_a_dense_model_that_knows_the_answers(name, task):
    rows = [row for row in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]]
    quoted = [row for row in rows if row["task"] == task]
    assert {row["mode"] for row in quoted} == {"aware", "agnostic"}
    for row in quoted:
        dense = dense_of(row, rows)
        assert dense is not None
        assert doubt(dense) is None, (row["mode"], row["budget_tokens"])
