"""Lines of a batch run: what is read, what is refused and why, and what a crash leaves of the results."""

import errno
import json
import math

import pytest

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine import batch_lines
from hf_sparsekv.engine.batch_lines import MAX_CONFIGS, BadLine, Job, LineReader
from hf_sparsekv.engine.batch_results import ErrorFile, LineFile, ResultFile
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import InputError


@pytest.fixture
def read(tmp_path):
    """Lines of the given texts, or of bytes as they are."""

    def read(*texts, **options):
        path = tmp_path / "in.jsonl"
        path.write_bytes(texts[0] if isinstance(texts[0], bytes) else "\n".join(texts).encode())
        return list(LineReader(path, **options))

    return read


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_line_becomes_a_job(read):
    base = SparseKVConfig(budget=100, num_full_layers=2)
    (job,) = read(
        '{"id": 7, "token_ids": [3, 4], "max_tokens": 5, "stop_token_ids": [9], "seed": null, '
        '"config": {"full_layers": [0, 3], "scorer": "tova"}}',
        config=base,
    )
    assert (job.number, job.id, job.prompt) == (1, 7, [3, 4])
    assert job.params == SamplingParams(max_tokens=5, stop_token_ids=(9,))
    assert job.config == SparseKVConfig(budget=100, full_layers=(0, 3), scorer="tova")


def test_defaults_hold_where_a_line_says_nothing(read):
    defaults = {"max_tokens": 9, "do_sample": True, "temperature": 0.5, "top_k": 4}
    first, greedy, warm = read(
        '{"prompt": "a"}',
        '{"prompt": "a", "do_sample": false}',
        '{"prompt": "a", "temperature": 2.0, "max_tokens": 1}',
        defaults=defaults,
    )
    assert first.params == SamplingParams(**defaults)
    assert greedy.params == SamplingParams(max_tokens=9)
    assert warm.params == SamplingParams(max_tokens=1, do_sample=True, temperature=2.0, top_k=4)
    assert first.config is None


def test_blank_lines_line_ends_and_marks_do_not_matter(read):
    lines = read(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n   \n{"prompt": "b"}')
    assert [(line.number, line.prompt, line.num_bytes) for line in lines] == [(1, "a", 20), (4, "b", 15)]
    assert read(b"") == []


def test_a_line_without_an_id_is_named_by_place_and_content(read):
    first, second = read('{"prompt": "a"}', '{"prompt": "a"}')
    changed, same = read('{"prompt": "b"}', '{"prompt": "a"}')
    assert first.id != second.id == same.id
    assert first.id.startswith("line-1-")
    assert changed.id != first.id


def test_messages_go_through_the_template(read):
    (job,) = read(
        '{"messages": [{"role": "user", "content": "hi"}]}', chat_template=lambda messages: [len(messages), 8]
    )
    assert job.prompt == [1, 8]


def test_lines_that_are_done_are_counted_and_nothing_else(read):
    lines = read('{"id": 1, "prompt": 5}', '{"id": "b", "prompt": "x"}', done={"1"})
    assert not isinstance(lines[0], (Job, BadLine))
    assert isinstance(lines[1], Job)


def test_equal_configs_are_one_object(read):
    lines = read(*[f'{{"prompt": "a", "config": {{"budget": {budget}}}}}' for budget in (50, 60, 50)])
    assert lines[0].config is lines[2].config is not lines[1].config


# --- what is refused --------------------------------------------------------------------------------------------------


def refuse(messages):
    raise KeyError("role")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object: got [1]"),
        ("3", "must be a JSON object"),
        ('{"prompt": "a"} {"prompt": "b"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is no JSON number"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' appears twice"),
        ('{"id": "x"}', "the line has none"),
        ('{"prompt": "a", "token_ids": [1]}', "the line has prompt and token_ids"),
        ('{"prompt": null}', "the line has none"),
        ('{"prompt": " \\n"}', "the prompt is empty"),
        ('{"prompt": ["a"]}', "prompt must be a string: got ['a']"),
        ('{"prompt": "a\\ud800"}', "lone surrogate"),
        ('{"prompt": "a", "stop_strings": ["\\ud800"]}', "lone surrogate"),
        ('{"token_ids": []}', "token_ids is empty"),
        ('{"token_ids": [1, true]}', "token_ids must be a list of ints"),
        ('{"token_ids": [1.0]}', "token_ids must be a list of ints"),
        ('{"token_ids": "12"}', "token_ids must be a list of ints"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["hi"]}', "an object with a role and a content"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "the chat template refuses the messages: KeyError"),
        ('{"prompt": "a", "id": true}', "id must be a string"),
        ('{"prompt": "a", "id": ""}', "id must be a string that is not empty"),
        ('{"prompt": "a", "id": 1.5}', "id must be a string"),
        ('{"prompt": "a", "id": {}}', "id must be a string"),
        ('{"prompt": "a", "max_tokens": "5"}', "max_tokens must be an int"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1"),
        ('{"prompt": "a", "temperature": 0.5}', "set do_sample=True"),
        ('{"prompt": "a", "stop_strings": [""]}', "an empty string"),
        ('{"prompt": "a", "max_token": 5}', "did you mean 'max_tokens'?"),
        ('{"prompt": "a", "config": 5}', "config must be an object"),
        ('{"prompt": "a", "config": {"budgets": 5}}', "did you mean 'budget'?"),
        ('{"prompt": "a", "config": {"budget": "x"}}', "budget must be an int"),
    ],
)
def test_a_bad_line_says_why_and_the_next_one_is_read(read, line, reason):
    bad, good = read(line, '{"prompt": "a"}', chat_template=refuse)
    assert isinstance(bad, BadLine)
    assert reason in bad.reason
    assert bad.number == 1
    assert isinstance(good, Job)


def test_messages_without_a_template_are_refused(read):
    (bad,) = read('{"messages": [{"role": "user", "content": "x"}]}')
    assert "does not have" in bad.reason


def test_bytes_that_are_no_text_are_refused(read):
    bad, good = read(b'{"prompt": "\xff"}\n{"prompt": "a"}')
    assert "not UTF-8 text (byte 12" in bad.reason
    assert isinstance(good, Job)


def test_an_id_that_comes_again_is_refused_whatever_its_type(read):
    first, second = read('{"id": 5, "prompt": "a"}', '{"id": "5", "prompt": "b"}')
    assert isinstance(first, Job)
    assert second.reason.startswith("id '5' was used in line 1 already")


def test_a_line_that_is_too_long_is_passed_over_in_pieces(read, monkeypatch):
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 20)
    lines = read(b'{"prompt": "aaaaa"}\n' + b"x" * 95 + b'\n{"prompt": "b"}\n' + b"y" * 41)
    assert [type(line) for line in lines] == [Job, BadLine, Job, BadLine]
    assert [line.num_bytes for line in lines] == [20, 96, 16, 41]
    assert "96 bytes, at most 20" in lines[1].reason


def test_too_many_configs_are_refused(read):
    lines = read(*[f'{{"prompt": "a", "config": {{"budget": {50 + i}}}}}' for i in range(MAX_CONFIGS + 1)])
    assert [type(line) for line in lines] == [Job] * MAX_CONFIGS + [BadLine]
    assert "split the file" in lines[-1].reason


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        LineReader(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match="cannot read"):
        LineReader(tmp_path)


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_are_cut_to_whole_lines_wherever_the_write_was_torn(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        assert results.done == set()
        results.write("a", {"text": "é"})
        results.write(2, {"text": "\n\u2028"})
    whole = path.read_bytes()
    assert whole.count(b"\n") == 2
    first = whole.index(b"\n") + 1
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with ResultFile(path) as results:
            assert results.done == ({"a"} if size >= first else set())
            for name, text in (("a", "é"), (2, "\n\u2028")):
                if str(name) not in results.done:
                    results.write(name, {"text": text})
        assert path.read_bytes() == whole


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path):
    path = tmp_path / "out.jsonl"
    for before in (b"", b'{"id": "a"}\n', b'{"id": "a"}\n{"i'):
        path.write_bytes(before + bytes(4096))
        with ResultFile(path) as results:
            assert len(results.done) == before.count(b"\n")
        assert path.read_bytes() == before[: before.rfind(b"\n") + 1]


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"id": 1}\n{"name": 2}\n{"id"', b"[1]\n", b"5\n"])
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
