"""BatchFiles: three files that are none another, whatever they are called, checked before anything else."""

import io
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_sparsekv.cli.batch_files import BatchFiles
from hf_sparsekv.errors import InputError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with an input."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    return tmp_path


def files_of(file="in.jsonl", output="out.jsonl", errors=None):
    return BatchFiles.of(Path(file), Path(output), None if errors is None else Path(errors))


def test_no_two_outputs_have_one_file_of_errors_by_default(folder):
    outputs = ("out.jsonl", "out.txt", "out", "out.JSONL", "out.errors", "out-errors.jsonl", "sub.out.jsonl")
    errors = {name: str(files_of(output=name).errors) for name in outputs}
    assert errors["out.jsonl"] == "out.errors.jsonl"
    assert errors["out.txt"] == "out.txt-errors.jsonl"
    assert len(set(errors.values())) == len(outputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "nowhere.jsonl"}, "no such file"),
        ({"file": "."}, "a folder: give a file, or - for standard input"),
        ({"file": "/dev/null"}, "a device or a socket: give a file"),
        ({"file": "loop"}, "Too many levels of symbolic links"),
        ({"output": ""}, "names no file: give one"),
        ({"output": "."}, "names no file"),
        ({"output": ".."}, "it is a folder"),
        ({"output": "-"}, "results need a file of their own"),
        ({"output": "loop"}, "Too many levels of symbolic links"),
        ({"output": "/dev/null"}, "a device or a socket"),
        ({"output": "/dev/full"}, "a device or a socket"),
        ({"output": "/dev/fd/no"}, "a name of a stream"),
        ({"output": "no/out.jsonl"}, "-o no/out.jsonl: no such folder"),
        ({"output": "in.jsonl/out.jsonl"}, "no such folder"),
        ({"output": "x" * 300}, "File name too long"),
        ({"output": "x\0y"}, "null"),
        ({"errors": ""}, "--errors '.' names no file"),
        ({"errors": "loop"}, "Too many levels of symbolic links"),
        ({"errors": "no/e.jsonl"}, "--errors no/e.jsonl: no such folder"),
        ({"errors": "/dev/null"}, "a device or a socket"),
        ({"output": "in.jsonl"}, "in.jsonl and in.jsonl are one"),
        ({"output": "hard.jsonl"}, "in.jsonl and hard.jsonl are one"),
        ({"output": "soft.jsonl"}, "in.jsonl and soft.jsonl are one"),
        ({"errors": "hard.jsonl"}, "in.jsonl and hard.jsonl are one"),
        ({"errors": "out.jsonl"}, "out.jsonl and out.jsonl are one"),
        ({"errors": "../{folder}/out.jsonl"}, "are one"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_nothing_is_made(folder, changes, message):
    os.link("in.jsonl", "hard.jsonl")
    Path("soft.jsonl").symlink_to("in.jsonl")
    Path("loop").symlink_to("loop2")
    Path("loop2").symlink_to("loop")
    before = sorted(os.listdir())
    with pytest.raises(InputError, match=message):
        files_of(**{name: text.format(folder=folder.name) for name, text in changes.items()})
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("kind", ["standard input", "a pipe"])
def test_what_can_be_read_once_is_stored_and_taken_away_again(folder, monkeypatch, kind):
    content = b'{"prompt": "a"}\n' * 1000
    if kind == "a pipe":
        os.mkfifo("pipe")
        writer = threading.Thread(target=lambda: Path("pipe").write_bytes(content))
        writer.start()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    with files_of(file="pipe" if kind == "a pipe" else "-").readable() as files:
        assert files.input.read_bytes() == content
        assert files.output == Path("out.jsonl")
    assert not files.input.exists()


def test_a_file_is_read_where_it_is(folder):
    with files_of().readable() as files:
        assert files == files_of()


def test_replicas_cannot_share_a_pipe(tmp_path):
    piped, stored = (BatchFiles(name, tmp_path / "out.jsonl", tmp_path / "e") for name in (Path("-"), tmp_path / "in"))
    piped.check_readers(1)
    stored.check_readers(2)
    with pytest.raises(InputError, match="2 replicas cannot share the pipe -: write it to a file"):
        piped.check_readers(2)
