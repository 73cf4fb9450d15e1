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


FINDINGS = " ".join(STUDY.split("\n## Findings\n")[1].split("\n## ")[0].split())
RETRIEVAL, WORDS, LONG, MMLU = (f"comparison_{name}" for name in ("retrieval", "words", "long_answers", "mmlu"))


def cells(name, task, mode):
    report = json.loads((ROOT / "evals" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return {row["config"]: row for row in report["rows"] if (row["task"], row["mode"]) == (task, mode)}


def short(value):
    return "1.00" if value == 1 else f"{value:.2f}".removeprefix("0")


def kept(name, task, mode, method, figure=lambda row: short(row["accuracy"]["value"])):
    """What a method keeps at 2x / 4x / 10x, as the text writes it."""
    found = cells(name, task, mode)
    return " / ".join(figure(found[f"{method}-{ratio}x"]) for ratio in (2, 4, 10))


def dense(name, task, mode="aware"):
    row = cells(name, task, mode)["dense"]
    return short(row["accuracy"]["value"]), row["num_samples"]


def test_the_findings_on_digits():
    def both(task, method):
        return " and ".join(kept(RETRIEVAL, task, mode, method) for mode in ("aware", "agnostic"))

    assert f"(n = {dense(RETRIEVAL, 'needle')[1]} a cell; 2x / 4x / 10x," in FINDINGS
    for task, head in (("needle", "One key"), ("multi_key", "Four keys"), ("key_value", "A list of keys and values")):
        assert f"{head}, dense {dense(RETRIEVAL, task)[0]}: the defaults {both(task, 'balanced')}" in FINDINGS
        assert f"`kv_diversity` {both(task, 'kv_diversity')}" in FINDINGS
        assert f"KeyDiff{',' if task == 'needle' else ''} {both(task, 'keydiff')}" in FINDINGS


def test_the_findings_on_people():
    known = "(dense {}, n = {}): the defaults keep".format(*dense(WORDS, "document_qa"))
    assert f"{known} {kept(WORDS, 'document_qa', 'aware', 'balanced')}, " in FINDINGS
    methods = {"`question-in-window`": "question-in-window", "TOVA": "tova", "SnapKV": "snapkv"}
    for name, method in methods.items():
        assert f"{name} {kept(WORDS, 'document_qa', 'aware', method)}" in FINDINGS
    later = {name: kept(WORDS, "document_qa", "agnostic", name) for name in ("balanced", "expected_attention")}
    assert (
        f"(the defaults {later['balanced']}, ExpectedAttention, the best at 4x, {later['expected_attention']}"
        in FINDINGS
    )
    assert f"; dense {dense(WORDS, 'document_qa', 'agnostic')[0]}), ours included" in FINDINGS
    rows = cells(WORDS, "document_qa", "agnostic")
    at_4x = {name: row["accuracy"]["value"] for name, row in rows.items() if name.endswith("-4x")}
    assert at_4x["expected_attention-4x"] == max(at_4x.values())


def test_the_findings_on_long_answers():
    share, count = dense(LONG, "needle_long")
    digits = [kept(LONG, "needle_long", mode, "balanced") for mode in ("aware", "agnostic")]
    assert (
        f"(n = {count}): of fourteen digits (dense {share}) the defaults keep {digits[0]}, asked later {digits[1]}"
        in (FINDINGS)
    )
    assert f"(`kv_diversity` {kept(LONG, 'needle_long', 'agnostic', 'kv_diversity')})" in FINDINGS
    assert f"of fourteen digits it keeps {kept(LONG, 'needle_long', 'aware', 'question-in-window')}." in FINDINGS
    copied = "(dense {}, n = {})".format(*dense(LONG, "copy"))
    ours, diverse = (kept(LONG, "copy", "aware", method) for method in ("balanced", "kv_diversity"))
    peer = kept(LONG, "copy", "aware", "rkv")
    assert f"{copied}: {ours}, `kv_diversity` {diverse}, the best peer, R-KV, {peer}." in FINDINGS


def test_the_findings_on_perplexity_and_mmlu():
    def figure(row):
        return f"{row['perplexity']['value']:.1f}"

    rows = cells("comparison_perplexity", "perplexity", "agnostic")
    assert f"(dense {figure(rows['dense'])}, n = {rows['dense']['num_samples']})" in FINDINGS
    for name, method in {"the defaults": "balanced", "H2O": "h2o", "R-KV": "rkv", "SnapKV": "snapkv"}.items():
        assert f"{name} {kept('comparison_perplexity', 'perplexity', 'agnostic', method, figure)}" in FINDINGS
    above = [
        rows[f"balanced-{n}x"]["perplexity"]["value"] / rows["dense"]["perplexity"]["value"] - 1 for n in (2, 4, 10)
    ]
    shares = " / ".join(f"{100 * share:.1f}" for share in above)
    assert f"Perplexity after 2,048 tokens is {shares} % above the dense cache's" in FINDINGS
    assert f"(n = {cells(MMLU, 'mmlu', 'aware')['dense']['num_samples']}, 2x / 4x / 10x)" in FINDINGS
    for mode in ("aware", "agnostic"):
        for name, method in {"TOVA": "tova", "SnapKV": "snapkv", "the defaults": "balanced"}.items():
            found = kept(MMLU, "mmlu", mode, method, lambda row: short(row["agreement"]["same_choice"]))
            assert f"{name} {found}" in FINDINGS


def test_what_to_choose_for_worked_examples():
    def same(mode, method):
        return short(cells(MMLU, "mmlu", mode)[f"{method}-4x"]["agreement"]["same_choice"])

    tova, snapkv = same("aware", "tova"), same("agnostic", "snapkv")
    known, later = same("aware", "balanced"), same("agnostic", "balanced")
    text = f"dense choice on MMLU in {tova} and {snapkv} of the cases, the defaults in {known} and {later}"
    assert text in " ".join(CHOICE.split())
