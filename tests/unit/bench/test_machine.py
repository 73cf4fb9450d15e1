"""Figures say which sources made them, in a checkout and in an archive of one."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hf_sparsekv.bench.machine import commit

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_an_archive_names_the_commit_it_was_made_of(tmp_path):
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert head.stdout.startswith(commit().removesuffix("-dirty").rsplit("-g")[-1])
    archive = tmp_path / "sources.tar"
    subprocess.run(
        ["git", "-C", ROOT, "archive", "-o", archive, "HEAD", "hf_sparsekv", ".git_archival.txt"], check=True
    )
    with tarfile.open(archive) as found:
        found.extractall(tmp_path / "copy", filter="data")
    script = "from hf_sparsekv.bench.machine import commit; print(commit())"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "copy", capture_output=True, text=True, check=True
    )
    assert len(found.stdout.strip()) >= 7
    assert head.stdout.startswith(found.stdout.strip())


def test_an_installed_copy_has_no_commit(tmp_path, monkeypatch):
    package = tmp_path / "hf_sparsekv"
    package.mkdir()
    monkeypatch.setattr("hf_sparsekv.__file__", str(package / "__init__.py"))
    assert commit() is None
    (tmp_path / ".git_archival.txt").write_text("$Format:%h$\n")
    assert commit() is None
    (tmp_path / ".git_archival.txt").write_text("0123abc\n")
    assert commit() == "0123abc"
