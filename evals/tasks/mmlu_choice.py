"""MMLU as paired samples: the letter after a question, with worked examples before it.

Small models are near chance on letters, so accuracy says little about a cache; the share of unchanged choices and the
divergence of the four letters' distribution from the dense model's do (`evals.tasks.stats.agreement`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from evals.tasks.drawing import drawn
from evals.tasks.essay import EssayTokens
from evals.tasks.mmlu import LETTERS, Question, description
from evals.tasks.samples import (
    CHOICE,
    MODES,
    Sample,
    Tokens,
    check_grid,
    ids_of,
    prefix_ids,
    random_of,
)
from hf_sparsekv.scorers.checks import check_int

TASK = "mmlu"


@dataclass(frozen=True, kw_only=True)
class MmluChoice:
    """Questions drawn by seed; even ones of the file belong to one half, odd ones to the other."""

    questions: Sequence[Question]
    examples: Mapping[str, Sequence[Question]]
    num_questions: int = 20
    """Drawn by each seed, without repetition within it."""
    lengths: Sequence[int] = (2048,)
    """As many examples as fit, at most the subject's; a question that does not fit alone is not drawn."""
    seeds: Sequence[int] = (0, 1)
    modes: Sequence[str] = MODES
    """Query-agnostic: the examples are compressed, the question comes after."""

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
            InputError: a half has fewer questions that fit than are drawn.
        """
        letters = tuple(ids_of(text.tokenizer, f" {letter}") for letter in LETTERS)
        for length in self.lengths:
            for seed in self.seeds:
                yield from drawn(
                    len(self.questions),
                    self.num_questions,
                    seed=seed,
                    length=length,
                    rng=random_of(TASK, length, seed),
                    made_of=partial(self._asked, text, length, seed, letters),
                )

    def _asked(
        self, text: EssayTokens, length: int, seed: int, letters: tuple[Tokens, ...], number: int
    ) -> Iterator[Sample]:
        """The samples of a question; none where it does not fit."""
        asked = self.questions[number]
        document = prefix_ids(text.tokenizer) + ids_of(text.tokenizer, description(asked.subject))
        question = ids_of(text.tokenizer, asked.text())
        room = length - len(document) - len(question) - max(map(len, letters))
        if room < 0:
            return
        num_examples = 0
        for example in self.examples.get(asked.subject, ()):
            ids = ids_of(text.tokenizer, f"{example.text()} {LETTERS[example.answer]}\n\n")
            if len(ids) <= room:
                document += ids
                room -= len(ids)
                num_examples += 1
        for mode in self.modes:
            yield Sample(
                task=TASK,
                mode=mode,
                seed=seed,
                budget_tokens=length,
                document=document,
                question=question,
                continuations=letters,
                gold=asked.answer,
                scorer=CHOICE,
                variant=f"q{number}",
                facts={"subject": asked.subject, "num_examples": num_examples, "question_tokens": len(question)},
            )
