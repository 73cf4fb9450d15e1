"""The Python of README.md and of docs/ runs as printed: block after block, in one namespace a page, without a warning.

Guards against names that no block defines, arguments that were renamed, and deprecated keywords. What cannot run here
(several processes, a GPU, the hub, lm-eval) is fenced as `py` or not at all.
"""

import re
from pathlib import Path

import pytest

import hf_sparsekv as skv
from hf_sparsekv.scorers import registry

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


PAGES = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").glob("**/*.md")) if python_blocks(path)]


@pytest.fixture
def _left_as_found(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.chdir(tmp_path)
    yield
    skv.unregister()


def run(path):
    """Run a page's blocks; the names that they define."""
    names = {"__name__": path.stem}
    for number, block in enumerate(python_blocks(path)):
        exec(compile(block, f"{path.relative_to(ROOT)}, Python block {number}", "exec"), names)
    return names


@pytest.mark.builtin_model
@pytest.mark.usefixtures("_left_as_found")
def test_the_python_blocks_run_in_order(builtin_model_path, capsys):
    assert len(python_blocks(README)) == 3
    names = run(README)
    assert names["path"] == str(builtin_model_path)
    assert names["out"].text[0] in capsys.readouterr().out
    for report in (names["out"].report, names["cache"].report()):
        assert report["compression"] > 1.5
        assert not report["is_prompt_open"]


@pytest.mark.builtin_model
@pytest.mark.usefixtures("_left_as_found", "builtin_model_path")
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_runs(page):
    run(ROOT / page)


def test_pages_with_python_are_found():
    assert {path.name for path in PAGES} >= {"tutorial.md", "model-generate.md", "write-a-scorer.md"}
