"""CI runs what the package says it supports: transformers from the oldest release to the newest, signatures first.

Guards against a bound that is widened without a run, and a page that promises what nobody tries.
"""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
FAKE_PYTHON = """#!/bin/sh
echo "$PYTHONPATH $@" >> log
case "$*" in *tests/seam*) exit {status};; esac
"""


def tried():
    """Releases of transformers that CI runs, the oldest first: those laid over the environment, and its own."""
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    laid_over = re.findall(r"^with_transformers (\S+)", CI, re.MULTILINE)
    return sorted(map(Version, [*laid_over, pinned[1]]))


def test_ci_runs_the_oldest_and_the_newest_release_and_one_between():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = next(r for r in map(Requirement, project["dependencies"]) if r.name == "transformers").specifier
    oldest, *between, newest = tried()
    assert len({release.release[:2] for release in tried()}) >= 3
    assert all(release in supported for release in tried())
    assert f">={oldest.major}.{oldest.minor}" in str(supported)
    assert f"<{newest.major}.{newest.minor + 1}" in str(supported)
    assert f"CI runs {oldest} and {newest}, and a sample on {between[0]} |" in README


def run_in_ci(tmp_path, status):
    """Commands that `with_transformers` gives, where the tests of signatures end so; and its own exit status."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON.format(status=status))
    python.chmod(0o755)
    overlay = tmp_path / ".venv" / "transformers-5.17.0"
    overlay.mkdir()
    (overlay / ".ready").touch()  # installed
    function = re.search(r"^with_transformers\(\) .*?^}$", CI, re.MULTILINE | re.DOTALL)[0]
    code = f"set -euo pipefail\n{function}\nwith_transformers 5.17.0 -m compat"
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    lines = (tmp_path / "log").read_text().splitlines()
    return [line for line in lines if "-m pytest" in line], done.returncode


def test_a_signature_that_moved_fails_before_anything_else_is_run(tmp_path):
    commands, status = run_in_ci(tmp_path / "moved", 1)
    assert status == 1
    assert commands == [".venv/transformers-5.17.0 -m pytest tests/seam"]
    commands, status = run_in_ci(tmp_path / "same", 0)
    assert status == 0
    assert commands[1:] == [".venv/transformers-5.17.0 -m pytest -m compat"]
