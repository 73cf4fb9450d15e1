"""Intervals hold what they say, also of few samples, and pairs stay pairs.

Guards against intervals that shrink to a point where all answers are alike or are too narrow for few samples, against
statistics that break pairs, and against agreement that counts the wrong way.
"""

import math

import numpy as np
import pytest

from evals.tasks.stats import (
    agreement,
    bootstrap,
    mean,
    mean_interval,
    perplexity,
    share,
    share_difference,
    student_t,
)


def pairs(both, first, second, neither):
    """Rows of two columns of 1 and 0."""
    return [[1, 1]] * both + [[1, 0]] * first + [[0, 1]] * second + [[0, 0]] * neither


def test_students_t_is_that_of_the_tables():
    tabulated = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}
    assert {n: round(student_t(n), 3) for n in tabulated} == tabulated
    assert student_t(5, 0.99) == pytest.approx(4.032, abs=5e-4)


@pytest.mark.parametrize("values", [np.linspace(0.1, 0.9, 400), np.repeat([0.0, 1.0], [120, 280])])
def test_of_many_samples_every_interval_is_the_normal_one(values):
    expected = 1.96 * values.std() / np.sqrt(400)
    for found in (bootstrap(values, mean), share(values), mean_interval(values)):
        assert found.value == pytest.approx(values.mean())
        assert found.value - found.low == pytest.approx(expected, rel=0.1)
        assert found.high - found.value == pytest.approx(expected, rel=0.1)
    assert bootstrap(values, mean) == bootstrap(values, mean) != bootstrap(values, mean, seed=1)


def test_shares_have_wilsons_interval():
    """Newcombe, Two-sided confidence intervals for the single proportion (1998), table I."""
    for right, num, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (1, 29, 0.0061, 0.1718)):
        found = share([1.0] * right + [0.0] * (num - right))
        assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_where_all_answers_are_alike_there_still_is_doubt():
    assert share([1.0] * 20).low == pytest.approx(0.8389, abs=5e-5)
    assert share([1.0] * 20).high == 1.0
    assert (share([0.0] * 5).low, share([0.0] * 5).high) == pytest.approx((0.0, 0.4345), abs=5e-5)
    same = share_difference(pairs(20, 0, 0, 0))
    assert (same.low, same.value, same.high) == pytest.approx((-0.1611, 0.0, 0.1611), abs=5e-5)
    lost = share_difference(pairs(0, 5, 0, 0))
    assert (lost.value, lost.low) == (-1.0, -1.0)
    assert -0.5 < lost.high < 0


def test_differences_of_shares_have_newcombes_interval():
    """His own example of method 10, in the paper that `share_difference` names; and where no answer changes."""
    for counts, low, high in (((36, 12, 2, 0), 0.0569, 0.3404), ((0, 0, 0, 50), -0.0713, 0.0713)):
        found = share_difference(pairs(*counts))
        assert (-found.high, -found.low) == pytest.approx((low, high), abs=5e-5)


def test_an_answer_that_changes_its_place_costs_certainty():
    stays, moves = share_difference(pairs(10, 0, 0, 10)), share_difference(pairs(5, 5, 5, 5))
    assert stays.value == moves.value == 0
    assert stays.high < 0.5 * moves.high


def test_parts_of_right_tokens_stay_between_0_and_1():
    found = share([1.0, 1.0, 0.9])
    assert found.high == 1.0 and 0.8 < found.low < found.value
    difference = share_difference([[1.0, 0.5], [0.9, 0.5], [0.8, 0.3]])
    assert difference.value == pytest.approx(-7 / 15)
    assert difference.low < difference.value < difference.high < 0


def test_pairs_stay_pairs():
    noise = np.random.default_rng(0).normal(size=50) * 100
    found = bootstrap(np.stack([noise, noise + 0.5], axis=1), lambda values: mean(values[:, 1] - values[:, 0]))
    assert (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize("num", [4, 60])
def test_intervals_hold_the_truth_as_often_as_they_say(num):
    rng, trials = np.random.default_rng(1), 400
    drawn = rng.normal(3.0, 1.0, size=(trials, num))
    found = [mean_interval(values) for values in drawn]
    assert 0.92 * trials <= sum(interval.low <= 3.0 <= interval.high for interval in found) <= 0.98 * trials
    right = (rng.random((trials, num)) < 0.9).astype(float)
    found = [share(values) for values in right]
    assert sum(interval.low <= 0.9 <= interval.high for interval in found) >= 0.92 * trials


def test_resampling_reaches_further_for_few_samples():
    rng, trials = np.random.default_rng(2), 200
    found = [bootstrap(rng.normal(3.0, 1.0, size=8), mean, seed=t, num_resamples=400) for t in range(trials)]
    assert 0.91 * trials <= sum(interval.low <= 3.0 <= interval.high for interval in found)


def test_one_sample_has_no_interval():
    for found in (bootstrap([2.0], mean), mean_interval([2.0])):
        assert found.value == 2.0
        assert found.to_dict() == {"value": 2.0, "low": None, "high": None}
    assert share([1.0]).low == pytest.approx(0.2065, abs=5e-5)  # what an answer is, 0 or 1, is known


def test_what_is_no_number_becomes_none_in_json():
    found = bootstrap(np.zeros(3), lambda values: float("nan"))
    assert found.to_dict() == {"value": None, "low": None, "high": None}


def test_perplexity_is_of_the_mean():
    found = perplexity(np.log([2.0, 8.0, 4.0]))
    assert found.value == pytest.approx(4.0)
    assert found.low * found.high == pytest.approx(16.0)
    assert math.log(found.high / 4.0) == pytest.approx(student_t(2) * math.log(2.0) / math.sqrt(3))


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
