"""What the study's text sums up over several tables is what the files in evals/results say."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDY = (ROOT / "docs" / "benchmarks" / "study.md").read_text(encoding="utf-8")
CHOICE = STUDY.split("\n## What to choose\n")[1].split("\n## ")[0]
POOLED = {
    "needle": ("comparison_retrieval", *(f"comparison_needle_{n}k" for n in (2, 4, 8)), "second_model_needle"),
    "multi_key": ("comparison_retrieval", "comparison_multi_key_4k"),
    "document_qa": (
        "comparison_words",
        *(f"comparison_documents_{n}k" for n in (2, 4, 8)),
        *(f"second_model_people_{n}k" for n in (1, 4)),
    ),
}
METHODS = {"the defaults": "balanced", "KeyDiff": "keydiff", "R-KV": "rkv", "SnapKV": "snapkv", "TOVA": "tova"}
ROWS = [line.strip("| ").split(" | ") for line in CHOICE.splitlines() if line.startswith("| ") and "/ ." in line]


def rows_of(config, mode):
    for task, names in POOLED.items():
        for name in names:
            report = json.loads((ROOT / "evals" / "results" / f"{name}.json").read_text(encoding="utf-8"))
            (row,) = [r for r in report["rows"] if (r["task"], r["mode"], r["config"]) == (task, mode, config)]
            yield row


def pooled(config, mode):
    rows = list(rows_of(config, mode))
    count = sum(row["num_samples"] for row in rows)
    share = sum(row["accuracy"]["value"] * row["num_samples"] for row in rows) / count
    return count, f"{share:.2f}".removeprefix("0")


def test_all_samples_are_counted():
    (count, known), (_, later) = (pooled("dense", mode) for mode in ("aware", "agnostic"))
    assert f"(n = {count};\ndense: {known}, and {later} where the question comes later)" in CHOICE
    assert len(ROWS) == 7


@pytest.mark.parametrize("cells", ROWS, ids=[row[0] for row in ROWS])
def test_the_pooled_shares(cells):
    name, *found = cells
    method = next((method for text, method in METHODS.items() if text in name), name.strip("`"))
    for mode, cell in zip(("aware", "agnostic"), found, strict=True):
        assert cell == " / ".join(pooled(f"{method}-{ratio}x", mode)[1] for ratio in (4, 10)), mode
