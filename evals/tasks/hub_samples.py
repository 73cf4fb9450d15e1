"""Samples out of rows of the hub's data sets. No text is generated: answers are scored as they are given.

Published tables of these data sets come from generated text, and often with another prompt: figures that are measured
here compare caches with each other and with the dense one, not with those tables.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from evals.tasks.drawing import drawn
from evals.tasks.essay import EssayTokens
from evals.tasks.hub_rows import HubRow
from evals.tasks.samples import MODES, Sample, Tokens, check_grid, ids_of, prefix_ids, random_of
from hf_sparsekv.errors import InputError, shown
from hf_sparsekv.scorers.checks import check_int


@dataclass(frozen=True)
class Scored:
    """What is scored after a question, and how."""

    scorer: str
    """One of `evals.tasks.samples.SCORERS`."""
    texts: tuple[str, ...]
    gold: int = 0


@dataclass(frozen=True, kw_only=True)
class HubQuestions:
    """Rows drawn by seed; even ones belong to one half, odd ones to the other."""

    name: str
    """Of the data set, before the name of the row's own task."""
    rows: Sequence[HubRow]
    scored: Callable[[HubRow], Scored]
    """Raises an InputError for a row that its task cannot be scored by."""
    num_questions: int = 20
    """Drawn by each seed, without repetition within it."""
    lengths: Sequence[int] = (4096,)
    """A context that is longer loses its middle, as the authors of LongBench do it."""
    seeds: Sequence[int] = (0, 1)
    modes: Sequence[str] = MODES

    def __post_init__(self) -> None:
        """Refuse what makes no task.

        Raises:
            ConfigError: names the value and the limit.
        """
        check_int("num_questions", self.num_questions, at_least=1)
        check_grid(lengths=self.lengths, seeds=self.seeds, modes=self.modes)

    def samples(self, text: EssayTokens) -> Iterator[Sample]:
        """Every sample; of `text` only the tokenizer matters.

        Raises:
            InputError: a half has fewer rows than are drawn, or a row that cannot be scored.
        """
        for length in self.lengths:
            for seed in self.seeds:
                yield from drawn(
                    len(self.rows),
                    self.num_questions,
                    seed=seed,
                    length=length,
                    rng=random_of(self.name, length, seed),
                    made_of=partial(self._asked, text, length, seed),
                )

    def _asked(self, text: EssayTokens, length: int, seed: int, number: int) -> Iterator[Sample]:
        """The samples of a row; none where question and answer alone are too long."""
        row = self.rows[number]
        scored = self.scored(row)
        # Blanks before an answer belong to its first token.
        asked = f"{row.question}{row.answer_prefix}".rstrip(" ")
        blank = "" if asked.endswith("\n") or not asked[-1:].isascii() else " "
        question = ids_of(text.tokenizer, f"\n{asked}")
        continuations = tuple(ids_of(text.tokenizer, f"{blank}{answer.strip()}") for answer in scored.texts)
        head = prefix_ids(text.tokenizer)
        context = ids_of(text.tokenizer, row.context)
        room = length - len(head) - len(question) - max(map(len, continuations))
        if room < 1:
            return
        document = head + without_middle(context, room)
        for mode in self.modes:
            yield Sample(
                task=f"{self.name}:{row.task}",
                mode=mode,
                seed=seed,
                budget_tokens=length,
                document=document,
                question=question,
                continuations=continuations,
                gold=scored.gold,
                scorer=scored.scorer,
                variant=f"r{number}",
                facts={"num_cut_tokens": max(len(context) - room, 0), "question_tokens": len(question)},
            )


def of_task(rows: Sequence[HubRow], task: str | None) -> list[HubRow]:
    """The rows of one task, or all.

    Raises:
        InputError: there is no such task.
    """
    if task is None:
        return list(rows)
    kept = [row for row in rows if row.task == task]
    if not kept:
        tasks = ", ".join(sorted({row.task for row in rows}))
        raise InputError(f"there is no task {shown(task)} among the rows; there are {tasks}")
    return kept


def without_middle(tokens: Tokens, room: int) -> Tokens:
    """A text's beginning and end, at most `room` tokens, at least one."""
    if len(tokens) <= room:
        return tokens
    num_last = room // 2
    return tokens[: room - num_last] + tokens[len(tokens) - num_last :]
