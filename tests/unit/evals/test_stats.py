"""Intervals hold what they say, and pairs stay pairs.

Guards against a bootstrap that breaks pairs or has the wrong width, and against agreement that counts the wrong way.
"""

import numpy as np
import pytest

from evals.tasks.stats import agreement, bootstrap, mean, mean_difference, perplexity


def test_the_interval_of_a_share_is_the_normal_one():
    values = np.repeat([0.0, 1.0], [120, 280])
    found = bootstrap(values, mean)
    expected = 1.96 * np.sqrt(0.7 * 0.3 / 400)
    assert found.value == pytest.approx(0.7)
    assert found.value - found.low == pytest.approx(expected, rel=0.1)
    assert found.high - found.value == pytest.approx(expected, rel=0.1)
    assert found == bootstrap(values, mean)
    assert found != bootstrap(values, mean, seed=1)


def test_pairs_stay_pairs():
    noise = np.random.default_rng(0).normal(size=50) * 100
    found = bootstrap(np.stack([noise, noise + 0.5], axis=1), mean_difference)
    assert (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        found = bootstrap(rng.normal(3.0, 1.0, size=60), mean, seed=trial, num_resamples=400)
        covered += found.low <= 3.0 <= found.high
    assert 180 <= covered <= 199  # 95 % of 200 is 190; the bootstrap is a little narrow at 60 samples


def test_what_is_no_number_becomes_none_in_json():
    found = bootstrap(np.zeros(3), lambda values: float("nan"))
    assert found.to_dict() == {"value": None, "low": None, "high": None}


def test_perplexity_is_of_the_mean():
    assert perplexity(np.log([2.0, 8.0])) == pytest.approx(4.0)


def test_agreement_by_hand():
    dense = np.log([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8], [0.9, 0.1]])
    sparse = np.log([[0.7, 0.3], [0.5, 0.5], [0.9, 0.1], [0.2, 0.8]])
    found = agreement(dense + 5.0, sparse - 3.0, [0, 0, 0, 0])  # a common factor says nothing
    kl = [
        0.0,
        0.6 * np.log(0.6 / 0.5) + 0.4 * np.log(0.4 / 0.5),
        0.2 * np.log(0.2 / 0.9) + 0.8 * np.log(0.8 / 0.1),
        0.9 * np.log(0.9 / 0.2) + 0.1 * np.log(0.1 / 0.8),
    ]
    assert found["same_choice"] == 0.5
    assert found["mean_kl"] == pytest.approx(np.mean(kl))
    assert (found["gained"], found["lost"]) == (0.25, 0.25)
