"""The tasks by name, with their usual lengths and seeds."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from evals.tasks import cloze, copying, documents, longbench, mmlu_choice, perplexity, retrieval, ruler
from evals.tasks.essay import EssayTokens
from evals.tasks.facts import load_facts
from evals.tasks.mmlu import load_examples, load_questions
from evals.tasks.samples import HALVES, MODES, Sample
from hf_sparsekv.errors import ConfigError, InputError, shown


class Task(Protocol):
    """What makes samples."""

    def samples(self, text: EssayTokens) -> Iterator[Sample]:
        """Every sample, always the same ones."""


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _mmlu(**grid: Any) -> Task:
    """All questions; fetched if need be."""
    questions, examples = load_questions(progress=_say), load_examples(progress=_say)
    return mmlu_choice.MmluChoice(questions=questions, examples=examples, **grid)


TASKS: dict[str, Callable[..., Task]] = {
    retrieval.NEEDLE: lambda **grid: retrieval.Retrieval(**grid),
    retrieval.NEEDLE_LONG: lambda **grid: retrieval.Retrieval(task=retrieval.NEEDLE_LONG, num_digits=14, **grid),
    retrieval.MULTI_KEY: lambda **grid: retrieval.Retrieval(task=retrieval.MULTI_KEY, num_keys=4, **grid),
    retrieval.KEY_VALUE: lambda **grid: retrieval.Retrieval(task=retrieval.KEY_VALUE, num_keys=8, num_digits=4, **grid),
    copying.TASK: lambda **grid: copying.Copying(**grid),
    documents.TASK: lambda **grid: documents.DocumentQA(**grid),
    cloze.TASK: lambda **grid: cloze.Cloze(facts=load_facts(progress=_say), **grid),
    perplexity.TASK: lambda **grid: perplexity.Perplexity(**{k: v for k, v in grid.items() if k != "modes"}),
    mmlu_choice.TASK: _mmlu,
}
"""Each takes `lengths`, `seeds` and `modes`, or leaves them at their usual values."""
HUB_TASKS: dict[str, Callable[..., Task]] = {longbench.NAME: longbench.longbench, ruler.NAME: ruler.ruler}
"""Likewise, after what follows the name and a colon: `longbench:qasper`, `ruler:mine.jsonl`."""


def _task(name: str, grid: dict[str, Any]) -> Task:
    kind, _, argument = name.partition(":")
    return HUB_TASKS[kind](argument, **grid) if kind in HUB_TASKS else TASKS[name](**grid)


def samples_of(
    names: Sequence[str],
    text: EssayTokens,
    *,
    lengths: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    modes: Sequence[str] = MODES,
    half: str | None = None,
) -> list[Sample]:
    """The samples of some tasks.

    Args:
        names: of tasks, those of `HUB_TASKS` with a colon and what they read.
        text: what documents are made of, and the tokenizer that counts.
        lengths, seeds: in place of each task's own.
        modes: protocols; perplexity knows one only.
        half: "tune" or "report"; None = both.
    Raises:
        InputError: a task that is not there, or no sample at all.
        ConfigError: a grid that spans no sample.
    """
    unknown = [name for name in names if name not in TASKS and name.partition(":")[0] not in HUB_TASKS]
    if unknown or not names:
        known = ", ".join([*TASKS, *(f"{name}:..." for name in HUB_TASKS)])
        raise InputError(f"tasks are {known}: got {shown(unknown[0] if unknown else list(names))}")
    if half is not None and half not in HALVES:
        raise ConfigError(f"half is {' or '.join(HALVES)}: got {shown(half)}")
    grid: dict[str, Any] = {"modes": modes}
    grid |= {name: value for name, value in (("lengths", lengths), ("seeds", seeds)) if value is not None}
    made = [sample for name in dict.fromkeys(names) for sample in _task(name, grid).samples(text)]
    chosen = [sample for sample in made if half in (None, sample.half)]
    if not chosen:
        raise InputError(f"no sample is left: no seed belongs to the {half} half; even seeds are tune, odd ones report")
    assert len({sample.id for sample in chosen}) == len(chosen)
    return chosen
