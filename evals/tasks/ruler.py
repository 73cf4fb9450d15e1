"""RULER for those who reach the hub: `ruler:4096`, `ruler:4096/niah_single_2`, or `ruler:FILE.jsonl` in that schema.

A row has `context`, `question`, `answer_prefix`, `answer` (a list) and `task`. One answer is right or wrong (`EXACT`);
where several are asked for they are listed in the row's order, and the share of right tokens counts (`TOKENS`); of
answers in free text (`qa_*`) the first one's likelihood (`NLL`). `lengths` should be a little above the
configuration's: a context that does not fit loses its middle.

Source: RULER (arXiv 2404.06654); the schema is that of the copy on the hub.
"""

from typing import Any

from evals.tasks.hub_rows import Fields, HubRow, load_rows
from evals.tasks.hub_samples import HubQuestions, Scored, of_task
from evals.tasks.samples import EXACT, NLL, TOKENS
from hf_sparsekv.errors import InputError, shown

NAME = "ruler"
HUB_ID = "simonjegou/ruler"
FIELDS = Fields(answers="answer")
_SEVERAL = ("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe")


def ruler(argument: str, **grid: Any) -> HubQuestions:
    """The task of a configuration of the data set, or of a file.

    Args:
        argument: "4096", "4096/niah_single_2", or a path that ends in .jsonl.
        grid: see `HubQuestions`.
    Raises:
        InputError: see `evals.tasks.hub_rows.load_rows`; or a task that is not there.
    """
    if not argument:
        raise InputError(f"{NAME} needs a configuration or a .jsonl file: give {NAME}:4096/niah_single_2")
    if argument.endswith(".jsonl"):
        return HubQuestions(name=NAME, rows=load_rows(argument, None, FIELDS), scored=scored, **grid)
    config, _, task = argument.partition("/")
    rows = of_task(load_rows(HUB_ID, config, FIELDS), task or None)
    return HubQuestions(name=NAME, rows=rows, scored=scored, **grid)


def scored(row: HubRow) -> Scored:
    """How a row's task is scored.

    Raises:
        InputError: several answers where the task has one.
    """
    if row.task.startswith("qa"):
        return Scored(NLL, row.answers[:1])
    if row.task in _SEVERAL:
        return Scored(TOKENS, (", ".join(row.answers),))
    if len(row.answers) > 1:
        raise InputError(f"{row.place}: field 'answer' must have one text in {row.task}: got {shown(row.answers)}")
    return Scored(EXACT, row.answers)
