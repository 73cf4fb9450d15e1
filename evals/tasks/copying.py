"""A list in an essay, to be said again word for word.

It breaks before retrieval does: every token of a long passage is needed (eight things are about 45 tokens), and one
that is missing anywhere spoils the answer. An answer counts when all of its tokens are right (`EXACT`); the share of
right tokens is in every result beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from evals.tasks.documents import people
from evals.tasks.essay import EssayTokens
from evals.tasks.retrieval import things
from evals.tasks.samples import (
    EXACT,
    MODES,
    Sample,
    check_depths,
    check_grid,
    half_of,
    ids_of,
    prefix_ids,
    random_of,
)
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.scorers.checks import check_int

TASK = "copy"
LENGTHS = (1024, 2048, 4096)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
MAX_ITEMS = 20
_COUNTS = range(11, 100)
"""Numbers before the things: names alone a 135M model mixes up, though it sees them."""


@dataclass(frozen=True, kw_only=True)
class Copying:
    """The task on a grid of lengths, depths and seeds."""

    num_items: int = 8
    """Things in the list."""
    lengths: Sequence[int] = LENGTHS
    depths: Sequence[float] = DEPTHS
    """Where the list lies: 0 = at the beginning, 1 = at the end."""
    seeds: Sequence[int] = (0, 1)
    modes: Sequence[str] = MODES

    def __post_init__(self) -> None:
        """Refuse what makes no task.

        Raises:
            ConfigError: names the value and the limit.
        """
        check_int("num_items", self.num_items, at_least=2)
        if self.num_items > MAX_ITEMS:
            raise ConfigError(f"num_items is at most {MAX_ITEMS}: got {self.num_items}")
        check_grid(lengths=self.lengths, seeds=self.seeds, modes=self.modes)
        check_depths(self.depths)

    def samples(self, text: EssayTokens) -> Iterator[Sample]:
        """Every sample, shortest first; the two modes of one are neighbours.

        Raises:
            ConfigError: a length that does not hold the list, the question and the answer.
            InputError: the text is too short.
        """
        for length in self.lengths:
            for seed in self.seeds:
                for depth in self.depths:
                    rng = random_of(TASK, self.num_items, length, seed, depth)
                    yield from self._asked(text, length, seed, depth, rng)

    def _asked(self, text: EssayTokens, length: int, seed: int, depth: float, rng: Random) -> Iterator[Sample]:
        beginning = f"The secret list of {people(1, rng)[0]} is:"
        counts = rng.sample(_COUNTS, self.num_items)
        items = [f"{count} {thing}" for count, thing in zip(counts, things(self.num_items, rng), strict=True)]
        listed = f" {', '.join(items)}."
        passage = ids_of(text.tokenizer, f" {beginning}{listed}")
        question = ids_of(text.tokenizer, f"\n\nWhat is the list? Repeat it word for word. {beginning}")
        answer = ids_of(text.tokenizer, listed)
        head = prefix_ids(text.tokenizer)
        room = length - len(head) - len(passage) - len(question) - len(answer)
        if room < 1:
            raise ConfigError(f"{length} tokens do not hold the list and the question: ask for longer documents")
        window = text.window(half_of(seed), room, rng)
        body, starts = window.with_insertions([(window.boundary(depth), passage)])
        for mode in self.modes:
            yield Sample(
                task=TASK,
                mode=mode,
                seed=seed,
                budget_tokens=length,
                document=head + body,
                question=question,
                continuations=(answer,),
                scorer=EXACT,
                variant=f"i{self.num_items}/d{depth:g}",
                facts={
                    "depth": depth,
                    "passage_start": len(head) + starts[0],
                    "items": items,
                    "answer_tokens": len(answer),
                    "question_tokens": len(question),
                },
            )
