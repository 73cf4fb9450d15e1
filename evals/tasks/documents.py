"""Questions about a long document: facts about invented people, scattered in essay text; four options from it.

Each of several people has a value of the attribute asked for, all different, so the right option and the three wrong
ones stand in the same document, and nothing but the sentence about the person tells them apart. Chance is one quarter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from evals.tasks.essay import EssayTokens
from evals.tasks.samples import (
    CHOICE,
    MODES,
    Sample,
    Tokens,
    check_grid,
    half_of,
    ids_of,
    prefix_ids,
    random_of,
)
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.scorers.checks import check_int

TASK = "document_qa"
LENGTHS = (512, 1024, 2048, 4096, 8192)
NUM_OPTIONS = 4
TEXTS, LETTERS = "texts", "letters"
"""How a choice is scored: the options' own words after the beginning of the answer, or letters of a list."""
_LETTERS = "ABCD"

_FIRST_WORDS = "Alvar Brisa Corwin Delpha Edrik Fenna Gorlan Hesta Ilmar Jorva Kestrin Lunet Merrik Nolwen Orlan Petra"
_FIRST = tuple(_FIRST_WORDS.split())
_LAST_WORDS = "Ashdell Bramwick Corvane Dunmere Eskelt Farrowby Gantrel Holbeck Irvale Jessup Kirrane Lockmoor"
_LAST = tuple(_LAST_WORDS.split())


@dataclass(frozen=True)
class Attribute:
    """Something that each person has one of."""

    name: str
    statement: str
    """A sentence up to the value; takes the person."""
    question: str
    """Takes the person."""
    values: tuple[str, ...]
    """At least as many as people."""


ATTRIBUTES = (
    Attribute(
        "job",
        "{person} works as a",
        "What does {person} work as?",
        ("baker", "carpenter", "dentist", "farmer", "gardener", "lawyer", "nurse", "painter", "sailor", "tailor"),
    ),
    Attribute(
        "colour",
        "The favourite colour of {person} is",
        "What is the favourite colour of {person}?",
        ("black", "blue", "brown", "green", "grey", "orange", "purple", "red", "white", "yellow"),
    ),
    Attribute(
        "instrument",
        "The instrument that {person} plays is the",
        "Which instrument does {person} play?",
        ("cello", "clarinet", "drum", "flute", "guitar", "harp", "piano", "trumpet", "tuba", "violin"),
    ),
    Attribute(
        "year",
        "{person} was born in the year",
        "In which year was {person} born?",
        ("1712", "1734", "1756", "1778", "1791", "1805", "1823", "1847", "1869", "1882"),
    ),
)
"""Chosen among ten for being answered by a 135M model that sees everything: pets, food and cities it guesses."""


@dataclass(frozen=True, kw_only=True)
class DocumentQA:
    """The task on a grid of lengths and seeds."""

    num_people: int = 8
    answers: str = TEXTS
    """`TEXTS` or `LETTERS`."""
    lengths: Sequence[int] = LENGTHS
    """Any that the model reads, 500 tokens or more."""
    seeds: Sequence[int] = tuple(range(10))
    """Any; each asks about every attribute once, and has the right option once in every place."""
    modes: Sequence[str] = MODES

    def __post_init__(self) -> None:
        """Refuse what makes no task.

        Raises:
            ConfigError: names the value and the limit.
        """
        check_int("num_people", self.num_people, at_least=NUM_OPTIONS)
        most = min(len(_LAST), *(len(attribute.values) for attribute in ATTRIBUTES))
        if self.num_people > most:
            raise ConfigError(f"num_people is at most {most}, so that all values differ: got {self.num_people}")
        if self.answers not in (TEXTS, LETTERS):
            raise ConfigError(f"answers are {TEXTS!r} or {LETTERS!r}: got {self.answers!r}")
        check_grid(lengths=self.lengths, seeds=self.seeds, modes=self.modes)

    def samples(self, text: EssayTokens) -> Iterator[Sample]:
        """A question about each attribute for every length and seed, shortest first.

        Raises:
            ConfigError: a length that does not hold the facts and the question.
            InputError: the text is too short.
        """
        for length in self.lengths:
            for seed in self.seeds:
                for index, attribute in enumerate(ATTRIBUTES):
                    rng = random_of(TASK, self.num_people, length, seed, attribute.name)
                    # Every letter equally often: over a seed's attributes, and over the seeds of a half.
                    gold = (index + seed // 2) % NUM_OPTIONS
                    yield from self._about(text, length, seed, attribute, gold, rng)

    def _about(
        self, text: EssayTokens, length: int, seed: int, attribute: Attribute, gold: int, rng: Random
    ) -> Iterator[Sample]:
        named = people(self.num_people, rng)
        values = rng.sample(attribute.values, self.num_people)
        options = rng.sample(values[1:], NUM_OPTIONS - 1)
        options.insert(gold, values[0])
        facts = [
            ids_of(text.tokenizer, f" {attribute.statement.format(person=person)} {value}.")
            for person, value in zip(named, values, strict=True)
        ]
        question, continuations = self._asked(text, attribute, named[0], options)
        head = prefix_ids(text.tokenizer)
        room = length - len(head) - sum(map(len, facts)) - len(question) - max(map(len, continuations))
        if room < 1:
            raise ConfigError(f"{length} tokens do not hold the facts and the question: ask for longer documents")
        window = text.window(half_of(seed), room, rng)
        # Each fact somewhere in a stretch of its own, the one asked for in a random one.
        stretches = rng.sample(range(self.num_people), self.num_people)
        places = [window.boundary((stretch + rng.random()) / self.num_people) for stretch in stretches]
        body, starts = window.with_insertions(list(zip(places, facts, strict=True)))
        place = {"attribute": attribute.name, "depth": starts[0] / len(body), "fact_start": len(head) + starts[0]}
        for mode in self.modes:
            yield Sample(
                task=TASK,
                mode=mode,
                seed=seed,
                budget_tokens=length,
                document=head + body,
                question=question,
                continuations=continuations,
                gold=gold,
                scorer=CHOICE,
                variant=f"{self.answers}/p{self.num_people}/{attribute.name}",
                facts=place | {"person": named[0], "options": options, "question_tokens": len(question)},
            )

    def _asked(
        self, text: EssayTokens, attribute: Attribute, person: str, options: list[str]
    ) -> tuple[Tokens, tuple[Tokens, ...]]:
        """Question and what may follow."""
        asked = f"\n\nQuestion: {attribute.question.format(person=person)}\n"
        if self.answers == TEXTS:
            asked += f"Answer: {attribute.statement.format(person=person)}"
            return ids_of(text.tokenizer, asked), tuple(ids_of(text.tokenizer, f" {option}") for option in options)
        asked += "".join(f"{letter}. {option}\n" for letter, option in zip(_LETTERS, options, strict=True)) + "Answer:"
        return ids_of(text.tokenizer, asked), tuple(ids_of(text.tokenizer, f" {letter}") for letter in _LETTERS)


def people(count: int, rng: Random) -> list[str]:
    """Names of which no two share a part."""
    return [f"{first} {last}" for first, last in zip(rng.sample(_FIRST, count), rng.sample(_LAST, count), strict=True)]
