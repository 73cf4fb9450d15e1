"""What the site's hook puts into pages."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from hf_sparsekv.cli.app import COMMANDS, load_command
from hf_sparsekv.scorers import build_scorer, scorer_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site():
    """The hook, loaded as mkdocs does: by its path."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXT = "# A\n\n## One\n\nfirst\n\n```\n## no heading\n```\n\n### Below\n\nsecond\n\n## Two\n\nthird\n"


def test_a_section_ends_at_the_next_heading_of_its_level(site):
    found = site.section(TEXT, "One", "x.md")
    assert found == "first\n\n```\n## no heading\n```\n\n### Below\n\nsecond"
    assert site.section(TEXT, "Below", "x.md") == "second"
    with pytest.raises(site.SiteError, match=r"x\.md has no heading 'Three'"):
        site.section(TEXT, "Three", "x.md")


@pytest.mark.parametrize(
    ("link", "page", "moved"),
    [
        ("evals/results/a.png", "benchmarks/serving.md", "results/a.png"),
        ("evals/results/a.png", "tutorial.md", "benchmarks/results/a.png"),
        ("docs/concepts/limits.md#models", "benchmarks/index.md", "../concepts/limits.md#models"),
        ("kernels/README.md#install", "concepts/limits.md", "../how-to/build-kernels.md#install"),
        ("https://example.org/a", "tutorial.md", "https://example.org/a"),
    ],
)
def test_links_follow_a_text_to_its_page(site, link, page, moved):
    assert site.moved(f"see [this]({link}).", page) == f"see [this]({moved})."


def test_every_option_of_every_command_is_on_the_page(site):
    page = site.filled("<!-- commands:2 -->", "reference/cli.md")
    for name in COMMANDS:
        part = f"\n{page}".split(f"\n## {name}\n")[1].split("\n## ")[0]
        for param in load_command(name).params:
            for option in (o for o in (*param.opts, *param.secondary_opts) if o.startswith("--")):
                assert option in part, f"{name} {option}"


def test_tables_have_every_run(site):
    report = json.loads((ROOT / "evals" / "results" / "serving_published_h200.json").read_text(encoding="utf-8"))
    rows = site.serving_table(report).split("\n\n")[0].splitlines()[2:]
    assert len(rows) == len(report["runs"])
    for row, run in zip(rows, report["runs"], strict=True):
        assert f"| {run['concurrency']} | {run['whole']['output_tokens_per_s']:,.0f} |" in row
    dense = {run["concurrency"] for run in report["runs"] if run["engine"] == "dense"}
    assert len(site.equal_table(report).splitlines()) == 2 + len(dense)


def test_rows_of_budget_shapes_say_their_length_where_they_have_one(site):
    figure = {"value": 1.0, "low": 0.9, "high": 1.0}
    rows = [{"mode": "aware", "layout": "dense", "accuracy": figure, "num_samples": 5}]
    rows.append(rows[0] | {"budget_tokens": 1024})
    table = site.shapes_table({"rows": rows, "profiles": [], "command": "python -m evals.budget_shapes"})
    assert "| aware | - | - | dense | 1.000" in table
    assert "| aware, up to 1,024 tokens | - | - | dense | 1.000" in table


def test_rows_of_decode_modes_say_what_was_measured(site):
    figure, difference = {"value": 1.0, "low": 0.9, "high": 1.0}, {"value": -0.5, "low": -0.9, "high": 0.1}
    facts = {"config": "ring-128", "cache_bytes": 1234, "num_samples": 5}
    answers = facts | {"measure": "answers", "accuracy": figure, "difference": difference}
    text = facts | {"measure": "decoded text", "perplexity": figure, "nll_difference": difference}
    table = site.modes_table({"rows": [answers, text], "command": "python -m evals.decode_modes"})
    same = "ring-128 | 1,234 | 1.000 [0.900, 1.000] | -0.500 [-0.900, +0.100] | 5 |"
    assert f"| answers, accuracy | {same}\n| decoded text, perplexity | {same}\n" in table


def test_every_scorer_is_in_the_reference_and_in_the_table_to_choose_from(site):
    reference, choice = site.scorers(3), (ROOT / "docs" / "how-to" / "choose-a-budget.md").read_text(encoding="utf-8")
    table = choice.split("## Choose a scorer")[1].split("## ")[0]
    for name in scorer_names():
        assert f".{type(build_scorer(name, {})).__name__}\n" in reference
        assert f"`{name}`" in table


def test_a_marker_without_its_file_is_an_error(site):
    with pytest.raises(site.SiteError, match=r"cannot read .*nothing"):
        site.filled("<!-- serving:nothing -->", "tutorial.md")


def test_every_marker_of_every_page_is_replaced(site):
    for path in sorted((ROOT / "docs").glob("**/*.md")):
        page = path.relative_to(ROOT / "docs").as_posix()
        assert not site._MARKER.search(site.filled(path.read_text(encoding="utf-8"), page)), page


def test_several_gpus_stand_beside_one(site):
    def report(tp, **figures):
        run = {"shape": "tiny", "kind": "sparse", "concurrency": 10, "prefill_tokens_per_s": 1000.0}
        run |= {"decode_tokens_per_s": 100.0, "collectives": {"share": 0.1}} | figures
        big = {"shape": "big", "error": "OutOfMemoryError: too large"}
        facts = {"device": {"name": "card"}, "date": "2026-01-02T00:00", "commit": "abc", "versions": {"torch": "2"}}
        return {"tp": tp, "runs": [run, big], "command": f"speed --tp {tp}", **facts}

    found = site.parallel_table([report(1), report(2, decode_tokens_per_s=150.0, prefill_tokens_per_s=1900.0)])
    assert "| tiny | sparse | 10 | 1,000 | 1,900 (1.90x) | 100 | 150 (1.50x) | 10% |" in found
    assert "speed --tp 1\nspeed --tp 2" in found


def test_formulas_need_nothing_from_the_network(site):
    page = r"""<p>a <span class="arithmatex">\(a &lt; b\)</span>, <div class="arithmatex">\[
x_1
\]</div>"""
    found = site.with_formulas(page, lambda latex, display: f"<math {display}>{latex}</math>")
    assert found == "<p>a <math inline>a < b</math>, <math block>x_1</math>"
    assert "http" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_a_page_that_the_site_fills_says_so_to_those_who_read_it_elsewhere(site):
    for path in sorted((ROOT / "docs").glob("**/*.md")):
        text, page = path.read_text(encoding="utf-8"), path.relative_to(ROOT / "docs").as_posix()
        is_filled = bool(site._MARKER.search(text)) or "\n::: " in text
        assert is_filled == ("<!-- host -->" in text), page
        assert "host -->" not in site.filled(text, page), page
        assert "`make docs` builds" not in site.filled(text, page), page


def test_links_lead_somewhere_for_those_who_read_the_repository():
    made_for_the_site = "results/"
    for path in (ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if not target.startswith(("http", "#", made_for_the_site)):
                assert (path.parent / target.split("#")[0]).exists(), f"{path.name}: {target}"
