"""Which rows of a file a seed asks about: even ones belong to one half of the samples, odd ones to the other."""

from collections.abc import Callable, Iterable, Iterator
from random import Random

from evals.tasks.samples import HALVES, Sample, half_of
from hf_sparsekv.errors import InputError


def drawn(
    num_rows: int, count: int, *, seed: int, length: int, rng: Random, made_of: Callable[[int], Iterable[Sample]]
) -> Iterator[Sample]:
    """The samples of some rows, drawn without repetition.

    Args:
        num_rows: all that there are.
        count: rows that are wanted.
        seed, length: of the samples.
        rng: draws.
        made_of: the samples of a row; none where it does not fit, and another row is drawn.
    Raises:
        InputError: the half has fewer rows that fit.
    """
    order = list(range(HALVES.index(half_of(seed)), num_rows, len(HALVES)))
    rng.shuffle(order)
    num_drawn = 0
    for number in order:
        if num_drawn == count:
            return
        made = list(made_of(number))
        num_drawn += bool(made)
        yield from made
    if num_drawn < count:
        raise InputError(
            f"the {half_of(seed)} half has {num_drawn} questions that fit {length} tokens, {count} are drawn: give "
            "fewer, or a greater length"
        )
