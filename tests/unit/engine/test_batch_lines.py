"""Lines of a batch run: what is read, what is refused and why."""

import pytest

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine import batch_lines
from hf_sparsekv.engine.batch_lines import MAX_CONFIGS, BadLine, Job, LineReader
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


def test_a_line_may_name_a_preset(read):
    (line,) = read('{"prompt": "a", "config": {"preset": "published"}}')
    assert (line.config.num_full_layers, line.config.scorer) == (3, "snapkv")


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
        ('{"prompt": "a", "budget": 40}', 'it is one of the method: give "config": {"budget": ...}'),
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
