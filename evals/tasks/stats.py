"""Paired statistics: what a difference between two caches on the same samples is worth.

Shapes: N sample, C column, O option, R resample.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

NUM_RESAMPLES = 5_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure and the interval that holds it."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """JSON-able; there is no NaN in JSON, so None stands for it."""
        return {name: value if np.isfinite(value) else None for name, value in asdict(self).items()}


def bootstrap(
    values_NC: Any,
    statistic: Callable[[np.ndarray], float],
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """A statistic of samples with its percentile interval: rows are drawn whole, so that pairs stay pairs.

    Args:
        values_NC: float [N] or [N, C], at least one row.
        statistic: takes such an array.
        seed: of the resamples.
        num_resamples, level: how many, and what share of them the interval holds.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    values_NC = np.asarray(values_NC, dtype=np.float64)
    num = len(values_NC)
    drawn_RN = np.random.default_rng(seed).integers(num, size=(num_resamples, num))
    found_R = np.array([statistic(values_NC[drawn_N]) for drawn_N in drawn_RN])
    found_R = found_R[np.isfinite(found_R)]
    if len(found_R) == 0:
        return Interval(statistic(values_NC), float("nan"), float("nan"))
    low, high = np.quantile(found_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(statistic(values_NC), float(low), float(high))


def mean(values_N: np.ndarray) -> float:
    """Arithmetic mean."""
    return float(values_N.mean())


def mean_difference(values_N2: np.ndarray) -> float:
    """Mean of second minus first column."""
    return float((values_N2[:, 1] - values_N2[:, 0]).mean())


def perplexity(nll_N: np.ndarray) -> float:
    """Of samples of equal length, from their mean negative log-likelihoods."""
    return float(np.exp(nll_N.mean()))


def agreement(dense_NO: Any, sparse_NO: Any, gold_N: Any) -> dict[str, float]:
    """How much of a dense model's choices a compressed cache leaves unchanged.

    Args:
        dense_NO, sparse_NO: float [N, O], log-likelihoods of the options.
        gold_N: int [N], the right options.
    Returns:
        `same_choice` (share), `mean_kl` (nats, from the dense to the sparse distribution over the options), `lost` and
        `gained` (shares of samples that the dense model alone, and the sparse cache alone, has right).
    """
    dense_NO, sparse_NO, gold_N = (np.asarray(values) for values in (dense_NO, sparse_NO, gold_N))
    log_p_NO, log_q_NO = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (dense_NO, sparse_NO))
    chosen_N, other_N = dense_NO.argmax(axis=1), sparse_NO.argmax(axis=1)
    return {
        "same_choice": float((chosen_N == other_N).mean()),
        "mean_kl": float((np.exp(log_p_NO) * (log_p_NO - log_q_NO)).sum(axis=1).mean()),
        "lost": float(((chosen_N == gold_N) & (other_N != gold_N)).mean()),
        "gained": float(((chosen_N != gold_N) & (other_N == gold_N)).mean()),
    }
