"""LongBench for those who reach the hub: `longbench:qasper`, or `longbench:FILE.jsonl` in the same schema.

A row has `context`, `question` (in the authors' own files `input`), `answers` (a list), `all_classes` (a list, or
null), `task` (or `dataset`), and may have `answer_prefix`. Classes are chosen among (`CHOICE`), paragraph numbers and
counts are right or wrong (`EXACT`), and free text is scored by the first reference answer's likelihood (`NLL`), not by
F1 or ROUGE of a generated one.

Source: LongBench (arXiv 2308.14508).
"""

from typing import Any

from evals.tasks.hub_rows import Fields, HubRow, load_rows
from evals.tasks.hub_samples import HubQuestions, Scored
from evals.tasks.samples import CHOICE, EXACT, NLL
from hf_sparsekv.errors import InputError, shown

NAME = "longbench"
HUB_ID = "Xnhyacinth/LongBench"
"""Without a loading script, which today's `datasets` refuses; its contexts hold the instructions."""
FIELDS = Fields(answers="answers", question=("question", "input"), task=("task", "dataset"), answer_prefix="\nAnswer:")
_CLASSES = ("trec", "lsht")
_EXACT = ("passage_count", "passage_retrieval_en", "passage_retrieval_zh")


def longbench(argument: str, **grid: Any) -> HubQuestions:
    """The task of a configuration of the data set, or of a file.

    Args:
        argument: "qasper", or a path that ends in .jsonl.
        grid: see `HubQuestions`.
    Raises:
        InputError: see `evals.tasks.hub_rows.load_rows`.
    """
    if not argument:
        raise InputError(f"{NAME} needs a configuration or a .jsonl file: give {NAME}:qasper")
    is_file = argument.endswith(".jsonl")
    rows = load_rows(argument if is_file else HUB_ID, None if is_file else argument, FIELDS)
    return HubQuestions(name=NAME, rows=rows, scored=scored, **grid)


def scored(row: HubRow) -> Scored:
    """How a row's task is scored.

    Raises:
        InputError: classes that are missing, or do not hold the answer.
    """
    task = row.task.removesuffix("_e")
    answer = row.answers[0]
    if task in _EXACT:
        return Scored(EXACT, (answer,))
    if task not in _CLASSES:
        return Scored(NLL, (answer,))
    classes = tuple(dict.fromkeys(row.classes))
    if answer not in classes:
        raise InputError(f"{row.place}: field 'all_classes' must hold the answer {shown(answer)}: got {shown(classes)}")
    return Scored(CHOICE, classes, classes.index(answer))
