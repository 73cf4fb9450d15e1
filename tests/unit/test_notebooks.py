"""Notebooks in git: prose and code alone, no outputs, nothing of the machine that ran them, and each is listed.

They are executed by `make notebooks` and in CI.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work|opt|var|mnt|usr)/|[A-Z]:\\")


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell):
    return "".join(cell["source"])


def test_the_notebooks_are_numbered_from_one():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{i:02d}_" for i in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) >= 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs(path):
    for cell in cells_of(path):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], source(cell)
            assert cell["execution_count"] is None, source(cell)
        assert set(cell["metadata"]) <= {"tags"}, source(cell)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_nothing_of_the_machine_that_ran_it(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"] == {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    found = [match.group() for cell in notebook["cells"] if (match := MACHINE_PATH.search(source(cell)))]
    assert found == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_picture_is_explained(path):
    cells = cells_of(path)
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code" and "skv.plots." in source(cell):
            beside = [other for other in cells[max(0, i - 1) : i + 2] if other["cell_type"] == "markdown"]
            assert any(len(source(other)) > 80 for other in beside), source(cell)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_readme_names_a_notebook(path):
    assert f"(notebooks/{path.name})" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_between_notebooks_lead_somewhere(path):
    text = "\n".join(source(cell) for cell in cells_of(path) if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#]+\.ipynb)\)", text):
        assert (path.parent / target).is_file(), target
