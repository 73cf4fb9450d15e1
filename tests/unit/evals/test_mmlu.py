"""Questions become the harness's tasks, field by field; a damaged file is named with line, field and reason.

Guards against answers that shift by one letter, header lines among the questions, and half-written layouts.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from evals.tasks import mmlu
from evals.tasks.mmlu import HUMANITIES, Question, build_layout, load_examples, load_questions
from evals.tasks.mmlu_choice import MmluChoice
from hf_sparsekv.errors import InputError

ROOT = Path(__file__).parents[3]
ROW = {
    "question": "Which number is even?",
    "answer_a": "one",
    "answer_b": "three",
    "answer_c": "four",
    "answer_d": "seven",
    "correct_answer": "C",
    "topic": "formal logic",
}
HEADER = {name: name for name in ROW} | {"correct_answer": "answer", "topic": "formal logic"}


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rows_become_questions_and_headers_go(tmp_path):
    path = written(tmp_path / "q.jsonl", HEADER, ROW, ROW | {"correct_answer": "A", "topic": "anatomy"})
    first, second = load_questions(path)
    assert first == Question(
        subject="formal_logic",
        question="Which number is even?",
        choices=("one", "three", "four", "seven"),
        answer=2,
    )
    assert (second.subject, second.answer) == ("anatomy", 0)
    assert first.text() == "Which number is even?\nA. one\nB. three\nC. four\nD. seven\nAnswer:"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{torn", "line 2: no JSON"),
        ("[1]", "line 2: a JSON object is needed"),
        ({k: v for k, v in ROW.items() if k != "answer_b"}, "line 2: field 'answer_b' is missing"),
        (ROW | {"question": 3}, "line 2: field 'question' must be a text"),
        (ROW | {"topic": " "}, "line 2: field 'topic' must be a text that is not empty"),
        (ROW | {"answer_c": None}, "line 2: field 'answer_c'"),
        (ROW | {"correct_answer": "E"}, "line 2: field 'correct_answer' must be one of A, B, C, D: got 'E'"),
        (ROW | {"correct_answer": "AB"}, "got 'AB'"),
    ],
)
def test_a_damaged_row_is_named(tmp_path, row, words):
    with pytest.raises(InputError, match=words):
        load_questions(written(tmp_path / "q.jsonl", ROW, row))


def test_no_questions_and_no_file_are_refused(tmp_path):
    with pytest.raises(InputError, match="has no question"):
        load_questions(written(tmp_path / "q.jsonl", HEADER))
    with pytest.raises(InputError, match="cannot read questions"):
        load_questions(tmp_path / "absent.jsonl")


def example(question, answer, options="(A) one (B) two (C) three (D) four"):
    return f"Q: {question}\n{options}\nA: Let's think step by step. It is so. The answer is ({answer}).\n\n"


def test_examples_lose_their_reasoning_and_those_with_five_options_go(tmp_path):
    prompt = "The following are questions.\n\n" + example("First?", "B") + example("Two\nlines?", "D")
    prompt += example("Five?", "E", "(A) one (B) two (C) three (D) four (E) five")
    prompt += example("Five again?", "A", "(A) one (B) two (C) three (D) four (E) five")
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"anatomy": prompt}))
    found = load_examples(path)["anatomy"]
    assert [(q.question, q.choices, q.answer) for q in found] == [
        ("First?", ("one", "two", "three", "four"), 1),
        ("Two\nlines?", ("one", "two", "three", "four"), 3),
    ]
    path.write_text(json.dumps({"anatomy": "nothing"}))
    with pytest.raises(InputError, match="'anatomy' has no example"):
        load_examples(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="a JSON object"):
        load_examples(path)


def test_without_the_harness_its_examples_are_fetched_and_never_left_out(tmp_path, monkeypatch):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"anatomy": "Some.\n\n" + example("First?", "B")}))
    asked = []

    def fetched(name, **options):
        asked.append((name, options["cache_dir"]))
        if path.exists():
            return path
        raise InputError("no network")

    monkeypatch.setattr(mmlu, "find_spec", lambda name: None)
    monkeypatch.setattr(mmlu, "fetched", fetched)
    assert [q.question for q in load_examples(cache_dir=tmp_path)["anatomy"]] == ["First?"]
    assert asked == [("mmlu_examples.json", tmp_path)]
    path.unlink()
    with pytest.raises(InputError, match="no network"):
        load_examples()


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'hf-sparsekv[eval]'")
def test_the_harness_own_examples_are_read():
    found = load_examples()
    assert len(found) == 57
    assert set(HUMANITIES) <= set(found)
    assert all(3 <= len(examples) <= 5 for examples in found.values())
    assert sum(map(len, found.values())) >= 280


def questions():
    rows = [("formal_logic", 2), ("formal_logic", 0), ("anatomy", 3)]
    return [
        Question(subject=subject, question=f"Question {i}?", choices=("p", "q", "r", "s"), answer=answer)
        for i, (subject, answer) in enumerate(rows)
    ]


def test_the_layout_names_its_files_and_replaces_only_its_own(tmp_path):
    folder = tmp_path / "layout"
    examples = {"anatomy": questions()[2:] * 7}
    for _ in range(2):
        assert build_layout(questions(), examples, folder) == folder
    task = json.loads((folder / "mmlu_local_anatomy.yaml").read_text())
    files = task["dataset_kwargs"]["data_files"]
    assert task["num_fewshot"] == len(Path(files["dev"]).read_text().splitlines()) == 5
    rows = [json.loads(line) for line in Path(files["test"]).read_text().splitlines()]
    assert rows == [{"question": "Question 2?", "subject": "anatomy", "choices": ["p", "q", "r", "s"], "answer": 3}]
    bare = json.loads((folder / "mmlu_local_formal_logic.yaml").read_text())
    assert bare["num_fewshot"] == 0
    assert "fewshot_split" not in bare
    assert set(bare["dataset_kwargs"]["data_files"]) == {"test"}
    group = json.loads((folder / "_mmlu_local.yaml").read_text())
    assert group["task"] == ["mmlu_local_anatomy", "mmlu_local_formal_logic"]
    humanities = json.loads((folder / "_mmlu_local_humanities.yaml").read_text())
    assert humanities["task"] == ["mmlu_local_formal_logic"]
    assert [path.name for path in tmp_path.iterdir()] == ["layout"]
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="holds something else"):
        build_layout(questions(), examples, other)
    assert (other / "thesis.txt").exists()
    with pytest.raises(InputError, match="no questions"):
        build_layout([], {}, folder)


def many_questions(count):
    return [
        Question(subject="anatomy", question=f"Is it {i}?", choices=("p", "q", "r", "s"), answer=i % 4)
        for i in range(count)
    ]


def test_samples_hold_the_examples_that_fit_and_the_halves_share_no_question(text, tokenizer):
    questions, examples = many_questions(40), {"anatomy": many_questions(5)}
    task = MmluChoice(questions=questions, examples=examples, num_questions=10, lengths=(220, 600), seeds=(0, 1, 2))
    samples = list(task.samples(text))
    assert samples == list(task.samples(text))
    assert len({sample.id for sample in samples}) == len(samples) == 2 * 3 * 10 * 2
    start = "The following are multiple choice questions (with answers) about anatomy.\n\n"
    shown = [f"{example.text()} {'ABCD'[example.answer]}\n\n" for example in examples["anatomy"]]
    for sample in samples:
        number = int(sample.variant[1:])
        assert sample.half == ("tune", "report")[number % 2]
        assert sample.gold == questions[number].answer
        count = 5 if sample.budget_tokens == 600 else sample.facts["num_examples"]
        assert 0 < count == sample.facts["num_examples"]
        assert tokenizer.decode(sample.document) == start + "".join(shown[:count])
        assert tokenizer.decode(sample.question) == questions[number].text()
        if count < 5:
            assert sample.num_tokens + len(shown[count]) > sample.budget_tokens
    few = MmluChoice(questions=questions, examples={"anatomy": many_questions(3)}, lengths=(600,), seeds=(0,))
    assert {sample.facts["num_examples"] for sample in few.samples(text)} == {3}  # some subjects have no more
    with pytest.raises(InputError, match="the tune half has 20 questions that fit 600 tokens, 21 are drawn"):
        list(MmluChoice(questions=questions, examples={}, num_questions=21, lengths=(600,)).samples(text))
    with pytest.raises(InputError, match="has 0 questions that fit 50 tokens"):
        list(MmluChoice(questions=questions, examples={}, lengths=(50,)).samples(text))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'hf-sparsekv[eval]'")
def test_the_harness_asks_the_questions_as_they_are_written(tmp_path):
    folder = build_layout(questions(), {"anatomy": questions()[:2]}, tmp_path / "layout")
    script = """
import json, sys
from lm_eval.tasks import TaskManager
manager = TaskManager(include_path=sys.argv[1], include_defaults=False)
assert {"mmlu_local", "mmlu_local_humanities", "mmlu_local_anatomy"} <= set(manager.all_tasks)
task = manager.load_task_or_group(["mmlu_local_anatomy"])["mmlu_local_anatomy"]
doc = list(task.test_docs())[0]
print(json.dumps([task.fewshot_context(doc, num_fewshot=2), task.doc_to_target(doc), task.doc_to_choice(doc)]))
"""
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=True,
    )
    context, target, choices = json.loads(done.stdout.splitlines()[-1])
    one, two, asked = (question.text() for question in questions())
    start = "The following are multiple choice questions (with answers) about anatomy.\n\n"
    assert context == f"{start}{one} C\n\n{two} A\n\n{asked}"
    assert (target, choices) == (3, ["A", "B", "C", "D"])
