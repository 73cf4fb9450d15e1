"""How well a text is continued when its beginning has been compressed, and what of the beginning's worth is kept.

For each stretch of an essay three figures are needed: with the whole context, with the compressed one, and without any
(one token stays, since something must come before the first scored token). The share of the context's benefit that is
kept is (ppl_without - ppl) / (ppl_without - ppl_dense).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evals.tasks.essay import EssayTokens
from evals.tasks.samples import AGNOSTIC, NLL, NO_CONTEXT, Sample, check_grid, half_of, prefix_ids, random_of
from hf_sparsekv.scorers.checks import check_int

TASK = "perplexity"
LENGTHS = (2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Stretches of an essay."""

    lengths: Sequence[int] = LENGTHS
    """Of the contexts, tokens."""
    num_scored: int = 256
    """Tokens after the context."""
    seeds: Sequence[int] = tuple(range(12))

    def __post_init__(self) -> None:
        """Refuse what makes no task.

        Raises:
            ConfigError: names the value and the limit.
        """
        check_int("num_scored", self.num_scored, at_least=1)
        check_grid(lengths=self.lengths, seeds=self.seeds)

    def samples(self, text: EssayTokens) -> Iterator[Sample]:
        """Each stretch as a sample with its context, and as one without.

        Raises:
            InputError: the text is too short.
        """
        prefix = prefix_ids(text.tokenizer)
        for length in self.lengths:
            for seed in self.seeds:
                num_read = max(length - len(prefix), 1)
                window = text.window(half_of(seed), num_read + self.num_scored, random_of(TASK, length, seed))
                tokens, _ = window.with_insertions(())
                for mode, start in ((AGNOSTIC, 0), (NO_CONTEXT, num_read - 1)):
                    yield Sample(
                        task=TASK,
                        mode=mode,
                        seed=seed,
                        budget_tokens=length + self.num_scored,
                        document=prefix + tokens[start:num_read],
                        question=(),
                        continuations=(tokens[num_read:],),
                        scorer=NLL,
                        facts={"num_scored": self.num_scored},
                    )


def kept_share(nll_NC: np.ndarray) -> float:
    """Share of the context's benefit that is kept.

    Args:
        nll_NC: float [samples, 3], mean negative log-likelihoods: without context, dense, sparse.
    Returns:
        1 = all of it, 0 = as if there were no context; nan where the context is worth nothing.
    """
    without, dense, sparse = np.exp(nll_NC.mean(axis=0))
    return float((without - sparse) / (without - dense)) if without > dense else float("nan")
