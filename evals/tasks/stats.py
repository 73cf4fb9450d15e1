"""Paired statistics: what a difference between two caches on the same samples is worth.

Samples are few, and percentiles of resamples are then too narrow: a point where all answers are alike, and for the mean
of four numbers they hold the truth in 79 % of the cases. So shares of right answers have score intervals, means have
Student's, and what is neither is resampled and widened.

Shapes: N sample, C column, O option, R resample.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import atan, cos, pi, sin, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

NUM_RESAMPLES = 5_000
LEVEL = 0.95
INTERVALS = "Wilson's; of differences Newcombe's, paired by sample; of means and perplexity Student's"
"""What a report says of its intervals; one without such a line has percentiles of resamples."""


@dataclass(frozen=True)
class Interval:
    """A figure and the interval that holds it."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """JSON-able; there is no NaN in JSON, so None stands for it."""
        return {name: value if np.isfinite(value) else None for name, value in asdict(self).items()}


ITSELF = Interval(0.0, 0.0, 0.0)
"""The difference of what is compared with itself: no other samples would change it."""


def bootstrap(
    values_NC: Any,
    statistic: Callable[[np.ndarray], float],
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """A statistic of samples with its expanded percentile interval: rows are drawn whole, so that pairs stay pairs.

    It reaches further out than plain percentiles by what a sample's spread is too small by, and by what Student's t is
    wider than the normal distribution by; at most to the lowest and the highest resample.

    Args:
        values_NC: float [N] or [N, C], at least one row. One row alone says nothing of its spread: no interval.
        statistic: takes such an array.
        seed: of the resamples.
        num_resamples, level: how many, and how often the interval should hold the truth.
    Source: Hesterberg, What Teachers Should Know about the Bootstrap (arXiv 1411.5279): the expanded
        percentile interval.
    """
    values_NC = np.asarray(values_NC, dtype=np.float64)
    num = len(values_NC)
    drawn_RN = np.random.default_rng(seed).integers(num, size=(num_resamples, num))
    found_R = np.array([statistic(values_NC[drawn_N]) for drawn_N in drawn_RN])
    found_R = found_R[np.isfinite(found_R)]
    if len(found_R) == 0 or num == 1:
        return Interval(statistic(values_NC), float("nan"), float("nan"))
    reach = sqrt(num / (num - 1)) * student_t(num - 1, level)
    tail = NormalDist().cdf(-reach)
    low, high = np.quantile(found_R, [tail, 1 - tail])
    return Interval(statistic(values_NC), float(low), float(high))


def mean_interval(values_N: Any) -> Interval:
    """The mean with Student's interval.

    Args:
        values_N: float [N], at least one. One alone says nothing of its spread: no interval.
    """
    values_N = np.asarray(values_N, dtype=np.float64)
    num, value = len(values_N), mean(values_N)
    if num == 1:
        return Interval(value, float("nan"), float("nan"))
    reach = student_t(num - 1) * float(values_N.std(ddof=1)) / sqrt(num)
    return Interval(value, value - reach, value + reach)


def perplexity(nll_N: Any) -> Interval:
    """Of samples of equal length, from their mean negative log-likelihoods."""
    found = mean_interval(nll_N)
    return Interval(*(float(np.exp(bound)) for bound in (found.value, found.low, found.high)))


def share(values_N: Any) -> Interval:
    """The mean of what is 1 or 0, with Wilson's interval; of other values in [0, 1] with Student's.

    Args:
        values_N: float [N], at least one.
    Source: Wilson, Probable Inference (1927); Brown, Cai and DasGupta, Interval Estimation for a Binomial Proportion
        (2001), who recommend it for few samples.
    """
    values_N = np.asarray(values_N, dtype=np.float64)
    if not _is_binary(values_N):
        found = mean_interval(values_N)
        return Interval(found.value, max(found.low, 0.0), min(found.high, 1.0))
    return Interval(mean(values_N), *_wilson(mean(values_N), len(values_N)))


def share_difference(values_N2: Any) -> Interval:
    """Mean of second minus first column, of what is 1 or 0 with Newcombe's paired interval; of others with Student's.

    Args:
        values_N2: float [N, 2], at least one row.
    Source: Newcombe, Improved Confidence Intervals for the Difference between Binomial Proportions based on Paired Data
        (1998), method 10.
    """
    values_N2 = np.asarray(values_N2, dtype=np.float64)
    if not _is_binary(values_N2):
        return mean_interval(values_N2[:, 1] - values_N2[:, 0])
    num = len(values_N2)
    first, second = (mean(column_N) for column_N in values_N2.T)
    (low_1, high_1), (low_2, high_2) = (_wilson(p, num) for p in (first, second))
    phi, difference = _phi(values_N2), second - first

    def reach(a: float, b: float) -> float:
        return sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    low = difference - reach(second - low_2, high_1 - first)
    return Interval(difference, low, difference + reach(high_2 - second, first - low_1))


def _is_binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _wilson(proportion: float, num: int, level: float = LEVEL) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = (proportion + z * z / (2 * num)) / (1 + z * z / num)
    reach = z / (1 + z * z / num) * sqrt(proportion * (1 - proportion) / num + z * z / (4 * num * num))
    # Rounding must not leave a bound beside the 0 or 1 that it belongs to.
    return max(0.0, middle - reach) if proportion else 0.0, min(1.0, middle + reach) if proportion < 1 else 1.0


def _phi(values_N2: np.ndarray) -> float:
    """Correlation of two columns of 1 and 0, corrected for continuity where it is positive; 0 where one is constant."""
    num, (first_N, second_N) = len(values_N2), values_N2.T
    both, neither = float((first_N * second_N).sum()), float(((1 - first_N) * (1 - second_N)).sum())
    ones = [float(column_N.sum()) for column_N in (first_N, second_N)]
    scale = sqrt(ones[0] * (num - ones[0]) * ones[1] * (num - ones[1]))
    if scale == 0:
        return 0.0
    product = both * neither - (ones[0] - both) * (ones[1] - both)
    return (max(product - num / 2, 0.0) if product > 0 else product) / scale


def student_t(degrees: int, level: float = LEVEL) -> float:
    """The t that holds `level` of Student's distribution between -t and t.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """

    def held(t: float) -> float:
        angle = atan(t / sqrt(degrees))
        odd = degrees % 2
        term, total = (cos(angle) if odd else 1.0), 0.0
        for i in range(odd + 1, degrees, 2):
            total += term
            term *= i / (i + 1) * cos(angle) ** 2
        return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total

    low, high = 0.0, 1.0
    while held(high) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < level else (low, middle)
    return high


def mean(values_N: np.ndarray) -> float:
    """Arithmetic mean."""
    return float(values_N.mean())


def agreement(dense_NO: Any, sparse_NO: Any, gold_N: Any) -> dict[str, float]:
    """How much of a dense model's choices a compressed cache leaves unchanged.

    Args:
        dense_NO, sparse_NO: float [N, O], log-likelihoods of the options, whole or per token: of options of several
            tokens `mean_kl` is then that of the distributions by which a choice is made, not of the texts'.
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
