"""Results and errors of a batch run: what a crash, a full disk or somebody else leaves of them."""

import errno
import json
import math
from pathlib import Path

import pytest

from hf_sparsekv.engine.batch_results import ErrorFile, LineFile, ResultFile
from hf_sparsekv.errors import InputError


def answer(text):
    """The values of a result, as a run writes them."""
    return {"text": text, "token_ids": [5], "finish_reason": "length", "error": None, "report": {"ttft_s": 0.5}}


def line_of(name):
    return json.dumps({"id": name, **answer("x")}).encode() + b"\n"


def test_results_are_cut_to_whole_lines_wherever_the_write_was_torn(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        assert results.done == set()
        results.write("a", answer("é"))
        results.write(2, answer("\n\u2028"))
    whole = path.read_bytes()
    assert whole.count(b"\n") == 2
    first = whole.index(b"\n") + 1
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with ResultFile(path) as results:
            assert results.done == ({"a"} if size >= first else set())
            for name, text in (("a", "é"), (2, "\n\u2028")):
                if str(name) not in results.done:
                    results.write(name, answer(text))
        assert path.read_bytes() == whole


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path):
    path = tmp_path / "out.jsonl"
    for before in (b"", line_of("a"), line_of("a") + b'{"i'):
        path.write_bytes(before + bytes(4096))
        with ResultFile(path) as results:
            assert len(results.done) == before.count(b"\n")
        assert path.read_bytes() == before[: before.rfind(b"\n") + 1]


@pytest.mark.parametrize(
    "content",
    [
        b"my notes",
        b"my notes\n",
        b'{"id": 1}\n{"name": 2}\n{"id"',
        b"[1]\n",
        b"5\n",
        b'{"id": "a", "prompt": "Hello"}\n',  # prompts
        b'{"id": "a", "prompt": "Hello"}',  # a line of them alone, without its end
        b'{"id": "a", "prom',
        b'{"id": "a", "text": "Hello", "finish_reason": "stop"}\n',  # some other tool's answers
        line_of("a") + b'{"id": "b"}\n',
        b'{"line": 1, "name": "x"}\n',
        b"[" * 100_000 + b"\n",
    ],
    ids=lambda content: str(content[:40]),
)
def test_a_file_of_somebody_elses_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match="holds something else: line"), ResultFile(path):
        pass
    assert path.read_bytes() == content
    errors = tmp_path / "errors.jsonl"
    errors.write_bytes(content)
    with pytest.raises(InputError, match="give another --errors"):
        ErrorFile(errors)
    assert errors.read_bytes() == content


def test_one_file_has_one_writer_by_whatever_name(tmp_path):
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    with ResultFile(path):
        for name in (path, link):
            with pytest.raises(InputError, match="another process is writing"), ResultFile(name):
                pass
    with ResultFile(link):
        pass


def test_a_folder_that_is_not_there_or_a_folder_in_place_of_a_file(tmp_path):
    for path in (tmp_path / "no" / "out.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot write"), ResultFile(path):
            pass


class FullDisk:
    """Takes a part of a line, then nothing."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, data):
        if self._room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self._room])
        self._room -= written
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_full_disk_leaves_whole_lines(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = LineFile(path)
    lines.write({"id": 1})
    whole = path.read_bytes()
    lines._file = FullDisk(lines._file, room=5)
    with pytest.raises(InputError, match="No space left"):
        lines.write({"id": 2})
    assert path.read_bytes() == whole
    lines.close()


def test_a_line_that_takes_several_writes_is_whole(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = LineFile(path)

    class Slow(FullDisk):
        def write(self, data):
            return self._file.write(data[:3])

    lines._file = Slow(lines._file, math.inf)
    lines.write({"id": "abcdef"})
    lines.close()
    assert json.loads(path.read_text()) == {"id": "abcdef"}


def test_lines_reach_the_disk_every_so_often_and_at_the_end(tmp_path, monkeypatch):
    now, synced = [0.0], []
    monkeypatch.setattr("os.fsync", lambda handle: synced.append(now[0]))
    lines = LineFile(tmp_path / "out.jsonl", sync_every_s=5.0, clock=lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        lines.write({"id": second})
    lines.close()
    assert synced == [5.0, 10.0, 11.0]


def test_errors_are_written_anew_and_without_any_there_is_no_file(tmp_path):
    path = tmp_path / "out.errors.jsonl"
    for reasons in (["first", "second"], ["third"], []):
        errors = ErrorFile(path)
        for line, reason in enumerate(reasons, start=1):
            errors.write(line, None, reason)
        errors.close()
        written = path.read_text().splitlines() if path.exists() else []
        assert [json.loads(line) for line in written] == [
            {"line": line, "id": None, "error": reason} for line, reason in enumerate(reasons, start=1)
        ]
    assert not path.exists()


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("has_next", [False, True])
def test_a_file_that_goes_away_is_noticed_before_the_next_line_and_at_the_end(tmp_path, is_replaced, has_next):
    path = tmp_path / "out.jsonl"
    results = ResultFile(path)
    results.__enter__()
    results.write("a", answer("x"))
    path.unlink()
    if is_replaced:
        path.write_bytes(b"")
    if has_next:
        with pytest.raises(InputError, match="deleted, moved or replaced"):
            results.write("b", answer("y"))
    with pytest.raises(InputError, match="deleted, moved or replaced"):
        results.__exit__(None, None, None)
    path.unlink(missing_ok=True)
    with ResultFile(path) as again:  # the lock was let go
        assert again.done == set()


def test_a_device_that_takes_nothing_gives_one_error():
    lines = LineFile(Path("/dev/full"))
    with pytest.raises(InputError, match=r"cannot write /dev/full: No space left.*run the same command again"):
        lines.write({"id": 1})
    with pytest.raises(InputError):
        lines.close()


def test_one_error_file_has_one_writer(tmp_path):
    path = tmp_path / "errors.jsonl"
    errors = ErrorFile(path)
    with pytest.raises(InputError, match=r"another process is writing to .* give another --errors"):
        ErrorFile(path)
    errors.close()
    ErrorFile(path).close()


@pytest.mark.parametrize("content", [b"", b'{"li', b'{"line": 3, "id": nu', b'{"line": 1, "id": null, "error": "x"}\n'])
def test_what_an_earlier_run_left_of_its_errors_is_removed(tmp_path, content):
    path = tmp_path / "errors.jsonl"
    path.write_bytes(content)
    ErrorFile(path).close()
    assert not path.exists()
