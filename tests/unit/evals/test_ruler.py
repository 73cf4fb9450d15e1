"""Rows become samples that are scored as their task says, and a configuration's tasks can be told apart.

Guards against several answers taken for one, and a task that is not there taken for an empty one.
"""

import json

import pytest

from evals.tasks import ruler as module
from evals.tasks.ruler import FIELDS, ruler
from evals.tasks.samples import EXACT, NLL, TOKENS
from hf_sparsekv.errors import InputError

ROW = {
    "context": "Noise. The special number for the pond is 417. Noise.",
    "question": "What is the special number for the pond? ",
    "answer_prefix": "The special number for the pond is",
    "answer": ["417"],
    "task": "niah_single_1",
    "max_new_tokens": 32,
}


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def first(path, text):
    return next(iter(ruler(path, num_questions=1, lengths=(400,), seeds=(0,)).samples(text)))


@pytest.mark.parametrize(
    ("changes", "scorer", "answer"),
    [
        ({}, EXACT, " 417"),
        ({"task": "niah_multivalue", "answer": ["417", "88"]}, TOKENS, " 417, 88"),
        ({"task": "vt", "answer": ["AB", "CD"]}, TOKENS, " AB, CD"),
        ({"task": "qa_1", "answer": ["Rome", "the city of Rome"]}, NLL, " Rome"),
    ],
)
def test_the_task_says_how_answers_are_scored(tmp_path, text, tokenizer, changes, scorer, answer):
    sample = first(written(tmp_path / "rows.jsonl", ROW | changes), text)
    assert sample.scorer == scorer
    assert [tokenizer.decode(ids) for ids in sample.continuations] == [answer]
    assert tokenizer.decode(sample.document) == ROW["context"]
    assert tokenizer.decode(sample.question) == f"\n{ROW['question']}{ROW['answer_prefix']}"
    assert sample.task == f"ruler:{(ROW | changes)['task']}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answer": ["417", "88"]}, "line 1: field 'answer' must have one text in niah_single_1"),
        ({"answer": "417"}, "line 1: field 'answer' must be a list of texts"),
        ({"answer_prefix": None}, "line 1: field 'answer_prefix' must be a text"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(tmp_path, text, changes, words):
    with pytest.raises(InputError, match=words):
        first(written(tmp_path / "rows.jsonl", ROW | changes), text)


def test_a_prefix_is_needed_and_a_name_too(tmp_path, text):
    bare = {name: value for name, value in ROW.items() if name != "answer_prefix"}
    with pytest.raises(InputError, match="line 1: field 'answer_prefix' is missing"):
        ruler(written(tmp_path / "rows.jsonl", bare))
    with pytest.raises(InputError, match="give ruler:4096/niah_single_2"):
        ruler("")


def test_a_task_of_a_configuration_is_picked_or_refused(monkeypatch, tmp_path):
    path = written(tmp_path / "rows.jsonl", ROW, ROW | {"task": "vt"}, ROW)
    read = module.load_rows
    asked = []

    def from_file(source, config, fields):
        asked.append((source, config))
        return read(path, None, FIELDS)

    monkeypatch.setattr(module, "load_rows", from_file)
    assert len(ruler("4096").rows) == 3
    assert [row.task for row in ruler("8192/vt").rows] == ["vt"]
    assert asked == [("simonjegou/ruler", "4096"), ("simonjegou/ruler", "8192")]
    with pytest.raises(InputError, match="no task 'cwe' among the rows; there are niah_single_1, vt"):
        ruler("4096/cwe")
