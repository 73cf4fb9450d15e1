"""Rows become samples that are scored as their task says; what is wrong with a row is said by line and field.

Guards against answers scored by the wrong rule, contexts cut at the wrong place, and halves that share rows.
"""

import json
import sys
import types

import pytest

from evals.tasks import catalog
from evals.tasks.hub_rows import HubRow
from evals.tasks.longbench import longbench, scored
from evals.tasks.samples import CHOICE, EXACT, NLL
from hf_sparsekv.errors import ConfigError, InputError

ROW = {
    "context": "One sentence. Another one.",
    "question": "Question: What is said?\n",
    "answer_prefix": "Answer: ",
    "answers": ["something", "a thing"],
    "all_classes": None,
    "task": "qasper",
}


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def many(count, **changes):
    return [ROW | {"context": f"Row {i} says so. " * 40} | changes for i in range(count)]


def test_a_row_becomes_a_sample_for_each_protocol(tmp_path, text, tokenizer):
    path = written(tmp_path / "rows.jsonl", *many(12))
    task = longbench(path, num_questions=5, lengths=(300, 2000), seeds=(0, 1))
    samples = list(task.samples(text))
    assert samples == list(task.samples(text))
    assert len({sample.id for sample in samples}) == len(samples) == 2 * 2 * 5 * 2
    for sample in samples:
        number, document = int(sample.variant[1:]), tokenizer.decode(sample.document)
        assert sample.half == ("tune", "report")[number % 2]
        assert sample.task == "longbench:qasper"
        context = f"Row {number} says so. " * 40
        assert tokenizer.decode(sample.question) == "\nQuestion: What is said?\nAnswer:"
        assert [tokenizer.decode(ids) for ids in sample.continuations] == [" something"]
        cut = sample.facts["num_cut_tokens"]
        assert len(document) == len(context) - cut
        if sample.budget_tokens == 300:
            assert sample.num_tokens == 300
            half = len(document) // 2
            assert document == context[: len(document) - half] + context[-half:]
        else:
            assert (document, cut) == (context, 0)
    for aware, agnostic in zip(samples[::2], samples[1::2], strict=True):
        assert (aware.document, aware.question) == (agnostic.document, agnostic.question)


def row(**changes):
    values = ROW | changes
    names = ("task", "context", "question", "answer_prefix")
    classes = tuple(values["all_classes"] or ())
    return HubRow(
        place="here", answers=tuple(values["answers"]), classes=classes, **{name: values[name] for name in names}
    )


def test_the_task_says_how_an_answer_is_scored():
    free = scored(row())
    assert (free.scorer, free.texts) == (NLL, ("something",))
    number = scored(row(task="passage_retrieval_en_e", answers=["Paragraph 3"]))
    assert (number.scorer, number.texts) == (EXACT, ("Paragraph 3",))
    kind = scored(row(task="trec", answers=["Food"], all_classes=["City", "Food", "City"]))
    assert (kind.scorer, kind.texts, kind.gold) == (CHOICE, ("City", "Food"), 1)
    with pytest.raises(InputError, match="here: field 'all_classes' must hold the answer 'Food'"):
        scored(row(task="trec", answers=["Food"], all_classes=["City"]))
    with pytest.raises(InputError, match="all_classes"):
        scored(row(task="lsht", answers=["Food"]))


def test_the_authors_own_fields_are_read(tmp_path, text, tokenizer):
    own = {"context": "Long text.", "input": "Why?", "answers": ["So."], "all_classes": None, "dataset": "hotpotqa"}
    path = written(tmp_path / "own.jsonl", own, own)
    first = next(iter(longbench(path, num_questions=1, lengths=(100,), seeds=(0,)).samples(text)))
    assert first.task == "longbench:hotpotqa"
    assert tokenizer.decode(first.question) == "\nWhy?\nAnswer:"


def test_characters_that_part_lines_elsewhere_stay_in_a_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW | {"context": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert longbench(str(path)).rows[0].context == "a\u2028b"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{torn", "line 2: no JSON"),
        ("[1]", "line 2: a JSON object is needed"),
        ({k: v for k, v in ROW.items() if k != "context"}, "line 2: field 'context' is missing; there are"),
        ({k: v for k, v in ROW.items() if k != "question"}, "line 2: field 'question' is missing"),
        (ROW | {"context": " "}, "line 2: field 'context' must be a text that is not empty"),
        (ROW | {"question": 7}, "line 2: field 'question' must be a text: got 7"),
        (ROW | {"answers": "something"}, "line 2: field 'answers' must be a list of texts"),
        (ROW | {"answers": []}, "line 2: field 'answers' must be a list of texts, at least one"),
        (ROW | {"answers": ["a", None]}, "line 2: field 'answers'"),
        (ROW | {"all_classes": "City"}, "line 2: field 'all_classes' must be a list of texts"),
        (ROW | {"task": None}, "line 2: field 'task'"),
    ],
)
def test_a_damaged_row_is_named(tmp_path, bad, words):
    with pytest.raises(InputError, match=words):
        longbench(written(tmp_path / "rows.jsonl", ROW, bad))


def test_no_rows_no_file_and_too_few_rows_are_refused(tmp_path, text):
    with pytest.raises(InputError, match="has no row"):
        longbench(written(tmp_path / "empty.jsonl"))
    with pytest.raises(InputError, match="cannot read rows"):
        longbench(str(tmp_path / "absent.jsonl"))
    with pytest.raises(InputError, match="give longbench:qasper"):
        longbench("")
    path = written(tmp_path / "rows.jsonl", *many(3))
    with pytest.raises(InputError, match="the tune half has 2 questions that fit 500 tokens, 20 are drawn"):
        list(longbench(path, lengths=(500,)).samples(text))
    with pytest.raises(InputError, match="has 0 questions that fit 20 tokens"):
        list(longbench(path, lengths=(20,)).samples(text))
    with pytest.raises(ConfigError, match="num_questions"):
        longbench(path, num_questions=0)


class DatasetsError(Exception):
    """What the library raises."""


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` that gives what it is told to, and its calls."""
    calls = []
    module = types.ModuleType("datasets")
    module.exceptions = types.SimpleNamespace(DatasetsError=DatasetsError)

    def give(result):
        def load_dataset(*place, **options):
            calls.append((*place, options["split"]))
            if isinstance(result, Exception):
                raise result
            return result

        module.load_dataset = load_dataset
        return calls

    monkeypatch.setitem(sys.modules, "datasets", module)
    return give


def test_rows_come_from_the_hub(hub):
    calls = hub([ROW, ROW])
    assert len(longbench("qasper").rows) == 2
    assert calls == [("Xnhyacinth/LongBench", "qasper", "test")]
    hub([ROW, ROW | {"answers": 3}])
    with pytest.raises(InputError, match="Xnhyacinth/LongBench/qasper, row 1: field 'answers'"):
        longbench("qasper")


@pytest.mark.parametrize(
    "error", [ConnectionError("no such host\nmore"), ValueError("no config"), DatasetsError("gone"), RuntimeError()]
)
def test_a_hub_that_does_not_answer_is_said(hub, error):
    hub(error)
    with pytest.raises(
        InputError, match="cannot load Xnhyacinth/LongBench, configuration 'nosuch', from the hub"
    ) as said:
        longbench("nosuch")
    assert (str(error).splitlines() or ["RuntimeError"])[0] in str(said.value)
    assert "more" not in str(said.value)


def test_without_the_library_a_file_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="needs the package datasets: pip install"):
        longbench("qasper")


def test_the_catalog_takes_a_name_and_what_it_reads(tmp_path, text):
    path = written(tmp_path / "rows.jsonl", *many(60))
    samples = catalog.samples_of([f"longbench:{path}"], text, lengths=[400], seeds=[1], modes=["aware"])
    assert len(samples) == 20
    assert {sample.half for sample in samples} == {"report"}
    with pytest.raises(InputError, match=r"longbench:\.\.\., ruler:\.\.\.: got 'longbank:qasper'"):
        catalog.samples_of(["longbank:qasper"], text)
