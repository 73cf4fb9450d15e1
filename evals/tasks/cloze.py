"""Facts to complete, with complete ones before them: four options, scored by their own words.

A short prompt (about 12 tokens a fact): what is left of it after compression is less than a usual observation window.
What is lost is the form of the answer, not knowledge: the facts themselves are in the model, so a cache that keeps
nothing useful still does better than chance. Source of the form: few-shot prompting (arXiv 2005.14165, section 2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from evals.tasks.essay import EssayTokens
from evals.tasks.facts import Fact
from evals.tasks.samples import (
    CHOICE,
    HALVES,
    MODES,
    Sample,
    check_grid,
    half_of,
    ids_of,
    prefix_ids,
    random_of,
)
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.scorers.checks import check_int

TASK = "cloze"
NUM_OPTIONS = 4


@dataclass(frozen=True, kw_only=True)
class Cloze:
    """Facts drawn by seed; even ones of the list belong to one half, odd ones to the other."""

    facts: Sequence[Fact]
    num_shots: int = 20
    """Complete facts before the open one, of its kind as far as there are so many; fewer where no more fit."""
    lengths: Sequence[int] = (384,)
    """At most so many tokens; the facts may fill less."""
    seeds: Sequence[int] = tuple(range(40))
    modes: Sequence[str] = MODES
    """Query-agnostic: the complete facts are compressed, the open one comes after."""

    def __post_init__(self) -> None:
        """Refuse what makes no task.

        Raises:
            ConfigError: names the value and the limit.
        """
        check_int("num_shots", self.num_shots, at_least=1)
        check_grid(lengths=self.lengths, seeds=self.seeds, modes=self.modes)

    def samples(self, text: EssayTokens) -> Iterator[Sample]:
        """A question for each length and seed; of `text` only the tokenizer matters.

        Raises:
            InputError: a half has too few facts of a kind for four options and a complete one.
            ConfigError: a length that does not hold the question and a complete fact.
        """
        for length in self.lengths:
            for seed in self.seeds:
                own = self.facts[HALVES.index(half_of(seed)) :: len(HALVES)]
                kinds = sorted({fact.kind for fact in own})
                rng = random_of(TASK, self.num_shots, length, seed)
                # The kinds in turn over the seeds of a half.
                kind = kinds[seed // len(HALVES) % len(kinds)]
                yield from self._asked(text, length, seed, [fact for fact in own if fact.kind == kind], rng)

    def _asked(self, text: EssayTokens, length: int, seed: int, facts: Sequence[Fact], rng: Random) -> Iterator[Sample]:
        asked, *others = rng.sample(facts, len(facts))
        answers = [answer for answer in dict.fromkeys(fact.answer for fact in others) if answer != asked.answer]
        if len(answers) < NUM_OPTIONS:
            raise InputError(
                f"the {half_of(seed)} half has {len(answers) + 1} answers of kind {asked.kind!r}, {NUM_OPTIONS + 1} "
                "are needed: give more facts"
            )
        gold = rng.randrange(NUM_OPTIONS)
        options = rng.sample(answers, NUM_OPTIONS - 1)
        options.insert(gold, asked.answer)
        question = ids_of(text.tokenizer, asked.sentence())
        continuations = tuple(ids_of(text.tokenizer, f" {option}") for option in options)
        document = prefix_ids(text.tokenizer)
        room = length - len(document) - len(question) - max(map(len, continuations))
        num_shots = 0
        for fact in others[: self.num_shots]:
            ids = ids_of(text.tokenizer, f"{fact.sentence()} {fact.answer}.\n")
            if len(ids) > room:
                break
            document += ids
            room -= len(ids)
            num_shots += 1
        if not num_shots:
            raise ConfigError(f"{length} tokens do not hold the question and a complete fact: ask for longer documents")
        for mode in self.modes:
            yield Sample(
                task=TASK,
                mode=mode,
                seed=seed,
                budget_tokens=length,
                document=document,
                question=question,
                continuations=continuations,
                gold=gold,
                scorer=CHOICE,
                variant=f"n{self.num_shots}/{asked.kind}",
                facts={
                    "kind": asked.kind,
                    "subject": asked.subject,
                    "options": options,
                    "num_shots": num_shots,
                    "question_tokens": len(question),
                },
            )
