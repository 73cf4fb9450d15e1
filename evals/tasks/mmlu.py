"""MMLU without the hub: all test questions from a package, worked examples from lm-eval's own prompts, local tasks.

    folder = build_layout(load_questions(), load_examples())
    evaluate(model, ["mmlu_local_humanities"], config, include_path=str(folder))

The layout is what lm-eval's `include_path` takes: a YAML file for each subject and group beside JSON files with the
questions. Its tasks are called mmlu_local_<subject>, mmlu_local (all of them) and mmlu_local_humanities, and score as
the harness's own do. Each asks for as many examples as its subject has: five, or fewer where some do not have
four options or are not there; so leave `num_fewshot` to the tasks.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evals.tasks.fetch import Progress, data_folder, fetched
from hf_sparsekv.errors import InputError, shown

GROUP = "mmlu_local"
LETTERS = "ABCD"
NUM_SUBJECTS = 57
HUMANITIES = (
    "formal_logic",
    "high_school_european_history",
    "high_school_us_history",
    "high_school_world_history",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "moral_disputes",
    "moral_scenarios",
    "philosophy",
    "prehistory",
    "professional_law",
    "world_religions",
)
NUM_EXAMPLES = 5

_FIELDS = ("question", "answer_a", "answer_b", "answer_c", "answer_d", "correct_answer", "topic")
_EXAMPLES_FILE = Path("tasks", "mmlu", "flan_cot_fewshot", "_cot_prompts.json")
_EXAMPLE_START = re.compile(r"^Q: ", re.MULTILINE)
_EXAMPLE = re.compile(
    r"(?P<question>.+?)\s*\(A\)(?P<a>.+?)\(B\)(?P<b>.+?)\(C\)(?P<c>.+?)\(D\)(?P<d>.+?)\nA: (?P<worked>.+)", re.DOTALL
)
_ANSWER = re.compile(r"[Tt]he answer is \(([A-D])\)")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One multiple-choice question."""

    subject: str
    """As the harness spells it: high_school_us_history."""
    question: str
    choices: tuple[str, str, str, str]
    answer: int
    """Index of the right choice."""

    def to_dict(self) -> dict[str, Any]:
        """The fields of the hub's data set."""
        return {
            "question": self.question,
            "subject": self.subject,
            "choices": list(self.choices),
            "answer": self.answer,
        }

    def text(self) -> str:
        """The question as the harness writes it, up to the letter."""
        options = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return f"{self.question.strip()}\n{options}Answer:"


def load_questions(
    path: Path | None = None, *, cache_dir: Path | None = None, progress: Progress = print
) -> list[Question]:
    """The test questions, in the order of the file.

    Args:
        path: a file in the package's format; default: the package's own, fetched if need be.
        cache_dir, progress: see `evals.tasks.fetch.fetched`.
    Raises:
        InputError: a line that is no question, by number, field and reason; or the file cannot be had.
    """
    path = fetched("mmlu.jsonl", cache_dir=cache_dir, progress=progress) if path is None else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read questions from {path}: {error}") from error
    questions = [_question(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    kept = [question for question in questions if question is not None]
    if not kept:
        raise InputError(f"{path} has no question: a line is a JSON object with {', '.join(_FIELDS)}")
    return kept


def _question(path: Path, number: int, line: str) -> Question | None:
    """The question of a line; None for a header that was left among the questions."""

    def refused(reason: str) -> InputError:
        return InputError(f"{path}, line {number}: {reason}")

    try:
        values = json.loads(line)
    except ValueError as error:
        raise refused(f"no JSON ({error})") from error
    if not isinstance(values, dict):
        raise refused(f"a JSON object is needed: got {shown(values)}")
    for name in _FIELDS:
        if name not in values:
            raise refused(f"field {name!r} is missing; there are {shown(sorted(values))}")
        if not isinstance(values[name], str) or not values[name].strip():
            raise refused(f"field {name!r} must be a text that is not empty: got {shown(values[name])}")
    if values["question"] == "question" and values["correct_answer"] == "answer":
        return None
    if values["correct_answer"] not in LETTERS or len(values["correct_answer"]) != 1:
        raise refused(
            f"field 'correct_answer' must be one of {', '.join(LETTERS)}: got {shown(values['correct_answer'])}"
        )
    a, b, c, d = (values[f"answer_{letter.lower()}"] for letter in LETTERS)
    return Question(
        subject=values["topic"].strip().replace(" ", "_"),
        question=values["question"],
        choices=(a, b, c, d),
        answer=LETTERS.index(values["correct_answer"]),
    )


def load_examples(
    path: Path | None = None, *, cache_dir: Path | None = None, progress: Progress = print
) -> dict[str, list[Question]]:
    """Worked examples by subject, their reasoning left out; three to five of each.

    Args:
        path: a JSON file with a prompt for each subject; default: the one in lm-eval's package, which is fetched where
            it is not installed.
        cache_dir, progress: see `evals.tasks.fetch.fetched`.
    Raises:
        InputError: the file is not what it was, or cannot be had.
    """
    if path is None:
        spec = find_spec("lm_eval")  # does not import it
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin).parent / _EXAMPLES_FILE
        else:
            path = fetched("mmlu_examples.json", cache_dir=cache_dir, progress=progress)
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read examples from {path}: {error}") from error
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise InputError(f"{path}: a JSON object with a text for each subject is needed")
    found = {subject: _examples(subject, prompt) for subject, prompt in prompts.items()}
    if empty := [subject for subject, examples in found.items() if not examples]:
        raise InputError(f"{path}: the prompt of {shown(empty[0])} has no example with four options and an answer")
    return found


def _examples(subject: str, prompt: str) -> list[Question]:
    """Those of a prompt that have four options; a fifth one would have been read into the fourth."""
    examples = []
    for part in _EXAMPLE_START.split(prompt)[1:]:
        found = _EXAMPLE.fullmatch(part.strip())
        answers = _ANSWER.findall(found["worked"]) if found else []
        if found and answers and "(E)" not in found["d"]:
            a, b, c, d = (found[letter].strip() for letter in "abcd")
            answer = LETTERS.index(answers[-1])
            examples.append(Question(subject=subject, question=found["question"], choices=(a, b, c, d), answer=answer))
    return examples


def build_layout(
    questions: Sequence[Question],
    examples: Mapping[str, Sequence[Question]],
    folder: Path | None = None,
) -> Path:
    """Write the folder that `include_path` takes; what was there is replaced once the new one is whole.

    Args:
        questions: of all subjects.
        examples: by subject; a subject without any is asked without examples.
        folder: default: in the user's cache.
    Raises:
        InputError: no questions, or the folder cannot be written.
    """
    folder = data_folder() / "mmlu_layout" if folder is None else folder
    if not questions:
        raise InputError("no questions to lay out")
    by_subject: dict[str, list[Question]] = {}
    for question in questions:
        by_subject.setdefault(question.subject, []).append(question)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mmlu-", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "fresh"
            (fresh / "data").mkdir(parents=True)
            for subject, some in by_subject.items():
                _write_subject(fresh, folder, subject, some, list(examples.get(subject, ()))[:NUM_EXAMPLES])
            for name, subjects in _groups(by_subject):
                _write_yaml(fresh / f"_{name}.yaml", _group(name, subjects))
            if folder.exists():
                if not (folder / f"_{GROUP}.yaml").is_file():
                    raise InputError(f"{folder} holds something else: give a folder that does not exist yet")
                shutil.move(folder, Path(scratch) / "replaced")
            fresh.rename(folder)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _groups(by_subject: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    yield GROUP, sorted(by_subject)
    if humanities := [subject for subject in HUMANITIES if subject in by_subject]:
        yield f"{GROUP}_humanities", humanities


def _group(name: str, subjects: Sequence[str]) -> dict[str, Any]:
    return {
        "group": name,
        "task": [f"{GROUP}_{subject}" for subject in subjects],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 1},
    }


def _write_subject(
    fresh: Path, folder: Path, subject: str, questions: Sequence[Question], examples: Sequence[Question]
) -> None:
    """Data and task of a subject; the task names the files where they will lie."""
    files = {}
    for split, some in (("test", questions), ("dev", examples)):
        if some:
            name = Path("data", f"{subject}_{split}.json")
            text = "".join(json.dumps(question.to_dict(), ensure_ascii=False) + "\n" for question in some)
            (fresh / name).write_text(text, encoding="utf-8")
            files[split] = str(folder.absolute() / name)
    task = {
        "task": f"{GROUP}_{subject}",
        "task_alias": subject,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "output_type": "multiple_choice",
        "description": description(subject),
        "doc_to_text": "{{question.strip()}}\n"
        + "".join(f"{letter}. {{{{choices[{i}]}}}}\n" for i, letter in enumerate(LETTERS))
        + "Answer:",
        "doc_to_choice": list(LETTERS),
        "doc_to_target": "answer",
        "num_fewshot": len(examples),
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    if examples:
        task |= {"fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}}
    _write_yaml(fresh / f"{GROUP}_{subject}.yaml", task)


def description(subject: str) -> str:
    """What stands before the examples."""
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def _write_yaml(path: Path, values: Mapping[str, Any]) -> None:
    """JSON is YAML too, and needs no library."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
