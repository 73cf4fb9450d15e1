"""Tables are what the results say, documents that say something else are found out, and doubtful figures are marked.

Guards against figures typed by hand or left over, and against comparisons where the dense model itself is guessing.
"""

import json
import re

import pytest

from evals import tables
from evals.row_text import method_and_ratio, origin
from evals.tables import TableError, documents, filled, main
from evals.verdict import doubt

MODEL = {"name": "tiny", "dtype": "float32", "device": "cpu", "weights_sha256": "abcdef0123456789"}
PLACE = {"suite": "offline", "budget_tokens": 1024, "half": "report", "num_samples": 20}


def figure(value, spread=0.1):
    return {"value": value, "low": value - spread, "high": value + spread}


def row(config, *, task="needle", mode="aware", value=0.5, **more):
    values = {"accuracy": figure(value), "difference": figure(value - 1.0)}
    values |= {"compression": 1.0 if config == "dense" else 4.05, "mean_cache_bytes": 1e6 * (1 + len(config))}
    return PLACE | {"config": config, "task": task, "mode": mode} | values | more


def report(rows):
    suites = {"offline": {"model": MODEL, "commits": ["0123456789abcdef0123+"], "commit": None}}
    return {"kind": "eval", "format": 1, "date": "2026-11-30", "suites": suites, "rows": rows}


ROWS = [
    row("dense", value=1.0),
    row("tova-4x", value=0.25, budget=0.2464),
    row("snapkv-4x", value=0.5),
    row("tova-10x", value=0.1),
    row("default-10x") | {"refused": "10x is not possible, at most 7x"},
    row("dense", mode="agnostic", value=0.95),
    row("tova-4x", mode="agnostic"),
    row("dense", task="mmlu", value=0.3, agreement={"same_choice": 1.0}),
    row("tova-4x", task="mmlu", value=0.3, agreement={"same_choice": 0.45}),
]


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "small.json").write_text(json.dumps(report(ROWS)))
    (folder / "other.json").write_text('{"kind": "serving"}')
    return folder


def document(*markers):
    return "".join(f"before\n<!-- table:{m} -->\nold\n<!-- /table -->\nafter\n" for m in markers)


def test_a_table_names_all_that_made_it(results):
    text = filled(document("small task=needle mode=aware"), results)
    assert text.startswith(
        "before\n<!-- table:small task=needle mode=aware -->\nneedle, query-aware, up to 1,024 tokens"
    )
    assert "report half, n = 20. tiny (weights abcdef01, float32, cpu), 2026-11-30, commit 0123456789ab+." in text
    assert "| tova-4x | 24.6% | 4.05x | 0.25 [0.15, 0.35] | -0.75 [-0.85, -0.65] |  |" in text
    assert "10x is not possible, at most 7x" in text
    assert "agnostic" not in text and "old" not in text
    assert text.endswith("<!-- /table -->\nafter\n")


def test_a_table_says_which_intervals_it_has(results):
    def last_line():
        return filled(document("small task=needle mode=aware"), results).split("<!-- /table")[0].splitlines()[-1]

    assert last_line().startswith(
        "Brackets: 95 % intervals, percentiles of resamples, paired by sample for differences;"
    )
    named = report(ROWS)
    named["suites"]["offline"]["intervals"] = "Wilson's"
    (results / "small.json").write_text(json.dumps(named))
    assert last_line() == "Brackets: 95 % intervals, Wilson's."


def test_a_wide_table_has_ratios_as_columns(results):
    text = filled(document("small task=needle mode=aware shape=wide"), results)
    assert "| method | as configured | 4x | 10x |" in text
    assert "| tova | - | 0.25 [0.15, 0.35] at 4.05x | 0.10 [0.00, 0.20] at 4.05x |" in text
    assert "| default | - | - | 10x is not possible, at most 7x |" in text


def test_where_the_dense_model_guesses_no_row_is_valid(results):
    lines = [line for line in filled(document("small task=mmlu"), results).splitlines() if line.startswith("| ")]
    assert lines[0].endswith("| accuracy | difference from dense | same choice as dense | note |")
    assert all(
        "not valid: the dense model is near chance (0.25 lies in or above its interval)" in line for line in lines[2:]
    )
    assert "0.45 | not valid" in lines[3]


@pytest.mark.parametrize(
    ("dense", "is_doubtful"),
    [
        ({"accuracy": figure(0.5, 0.2), "agreement": {}}, False),
        ({"accuracy": figure(0.5, 0.25), "agreement": {}}, True),
        ({"accuracy": figure(0.2, 0.15)}, True),
        ({"accuracy": figure(0.2, 0.05)}, False),
        ({"accuracy": figure(0.6, 0.15), "chance": 0.5}, True),
        ({"accuracy": figure(0.6, 0.05), "chance": 0.5}, False),
        ({"accuracy": {"value": 0.9, "low": None, "high": None}}, True),
        ({"perplexity": figure(40.0), "perplexity_without_context": 39.0}, True),
        ({"perplexity": figure(30.0), "perplexity_without_context": 39.0}, False),
        ({"perplexity": figure(30.0)}, False),
    ],
)
def test_when_dense_figures_are_doubted(dense, is_doubtful):
    assert (doubt(dense) is not None) == is_doubtful


def test_written_tables_pass_the_check_and_edited_ones_do_not(results, tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text(document("small", "small task=mmlu"))
    arguments = [str(path), "--results", str(results)]
    assert main([*arguments, "--check"]) == tables.STALE
    assert "page.md does not say" in capsys.readouterr().err
    assert path.read_text() == document("small", "small task=mmlu")
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    path.write_text(path.read_text().replace("0.25 [", "0.35 [", 1))
    assert main([*arguments, "--check"]) == tables.STALE
    assert main(arguments) == 0
    (results / "small.json").write_text(json.dumps(report(ROWS[:2])))
    assert main([*arguments, "--check"]) == tables.USAGE_ERROR  # mmlu has no row any more
    assert "no row is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (document("absent"), "cannot read .*absent.json"),
        (document("other"), "no report of `hf-sparsekv eval"),
        (document("small task=niddle"), "no row is left"),
        (document("small colour=red"), "a table takes"),
        (document("small shape=round"), "a table takes"),
        ("<!-- table:small -->\n", "has no <!-- /table -->"),
        ("<!-- table:small -->\n<!-- table:small -->\n<!-- /table -->", "has no <!-- /table -->"),
    ],
)
def test_markers_that_lead_nowhere(results, text, words):
    with pytest.raises(TableError, match=words):
        filled(text, results)


def test_the_documents_of_this_project_say_what_its_results_say():
    assert any(path.name == "README.md" for path in documents())
    assert main(["--check"]) == 0


def test_methods_and_ratios_are_told_apart():
    assert method_and_ratio("snapkv-4x") == ("snapkv", "4x")
    assert method_and_ratio("ours-2.5x") == ("ours", "2.5x")
    for name in ("dense", "published-22of32-1536", "a-x", "-x"):
        assert method_and_ratio(name) == (name, None)


def test_a_picture_for_each_valid_group(results, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need it: pip install 'hf-sparsekv[plots]'")
    assert main(["--results", str(results), "--plots", str(tmp_path), "--check", str(write_empty(tmp_path))]) == 0
    made = sorted(path.name for path in tmp_path.glob("*.png"))
    assert made == ["small_needle_1024_agnostic_report.png", "small_needle_1024_aware_report.png"]
    assert all((tmp_path / name).stat().st_size > 5_000 for name in made)


def write_empty(folder):
    path = folder / "empty.md"
    path.write_text("no table\n")
    return path


def test_lines_of_a_picture_rise_in_bytes():
    from evals.plots import lines_of

    found = lines_of(ROWS[:4], "accuracy")
    assert set(found) == {"tova", "snapkv"}
    assert [point[1] for point in found["tova"]] == [0.25, 0.1]
    assert all(sorted(points) == points for points in found.values())
    assert not re.search("dense", "".join(found))


@pytest.mark.parametrize(
    ("facts", "where"),
    [
        ({"device": "cuda", "device_name": "NVIDIA H200"}, "NVIDIA H200"),
        ({"device": "cpu", "device_name": "x86_64"}, "cpu"),
        ({"device": "cuda"}, "cuda"),  # results made before devices were named
    ],
)
def test_a_table_says_on_which_device_its_figures_were_made(facts, where):
    made = report(ROWS)
    made["suites"]["offline"]["model"] = MODEL | facts

    assert f"float32, {where})" in origin(made)
