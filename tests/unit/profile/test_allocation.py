"""Allocation is exact, plans keep their size to the byte, and a size that no plan has is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparsekv import LayerPlan, SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.profile import allocate, make_plan, summed_error

LENGTH = 640
SHAPE = ModelShape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
METHOD = SparseKVConfig(num_sink_tokens=4, num_recent_tokens=16, observation_window=16)
CURVES = [(0.9, 0.5, 0.2, 0.1), (0.1, 0.1, 0.1, 0.1), (2.0, 1.5, 1.0, 0.9), (0.4, 0.3, 0.35, 0.1)]


def total(plan, *, element_bytes=2, length=LENGTH):
    config = METHOD.with_(num_full_layers=None, budget_shape="calibrated", plan=plan)
    return LayerPlan.build(config, SHAPE).total_bytes(length, element_bytes=element_bytes)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 5), num_choices=st.integers(1, 5))
def test_no_other_choice_within_the_limit_has_a_smaller_error(data, num_rows, num_choices):
    number = st.integers(0, 30)
    rows = st.lists(st.lists(number, min_size=num_choices, max_size=num_choices), min_size=num_rows, max_size=num_rows)
    errors, costs = data.draw(rows), data.draw(rows)
    cheapest = sum(map(min, costs))
    limit = data.draw(st.integers(cheapest, cheapest + 60))

    found = allocate(errors, costs, limit)

    def sums(choice):
        return sum(e[i] for e, i in zip(errors, choice, strict=True)), sum(
            c[i] for c, i in zip(costs, choice, strict=True)
        )

    possible = [sums(c) for c in itertools.product(range(num_choices), repeat=num_rows)]
    best = min(error_cost for error_cost in possible if error_cost[1] <= limit)
    assert sums(found) == best  # of equal errors the cheapest


def test_a_limit_below_the_cheapest_choices_is_refused():
    with pytest.raises(ConfigError, match="cheapest choices cost 7, more than the limit 6"):
        allocate([[1.0, 0.0], [1.0, 0.0]], [[3, 9], [4, 9]], 6)


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("share", [0.15, 0.25, 0.5, 0.8])
def test_a_plan_takes_the_bytes_it_was_given_but_for_less_than_a_token(share, element_bytes, profile_of):
    target = int(share * 2 * 4 * 2 * 16 * element_bytes * LENGTH)
    plan = make_plan(profile_of(CURVES), target_bytes=target, element_bytes=element_bytes)
    token_bytes = 2 * (2 * 16 * element_bytes + 8)
    used = total(plan, element_bytes=element_bytes)
    assert target - token_bytes < used <= target
    assert used == plan.measured["cache_bytes"]


def test_a_plan_is_no_worse_than_equal_budgets_and_beats_them_where_layers_differ(profile_of):
    profile = profile_of(CURVES)
    equal = SparseKVConfig(num_full_layers=0, budget=160)
    target = LayerPlan.build(equal, SHAPE).total_bytes(LENGTH, element_bytes=2)
    plan = make_plan(profile, target_bytes=target, element_bytes=2)
    assert plan.measured["summed_error"] < summed_error(profile, [160] * 4) - 0.3
    tokens = [LENGTH if b is None else b for b in plan.budgets]
    assert summed_error(profile, tokens) == pytest.approx(plan.measured["summed_error"])
    assert plan.budgets[1] == 40  # more tokens would not help this layer


def test_a_layer_that_needs_everything_stays_full(profile_of):
    curves = [(5.0, 5.0, 5.0, 5.0), (0.1, 0.05, 0.02, 0.01), (0.1, 0.05, 0.02, 0.01), (0.1, 0.05, 0.02, 0.01)]
    target = int(0.4 * 2 * 4 * 2 * 16 * 2 * LENGTH)
    plan = make_plan(profile_of(curves), target_bytes=target, element_bytes=2)
    assert plan.full_layers == (0,)


def test_fractions_come_to_the_same_tokens_at_the_measured_length(profile_of):
    target = int(0.3 * 2 * 4 * 2 * 16 * 2 * LENGTH)
    tokens = make_plan(profile_of(CURVES), target_bytes=target, element_bytes=2)
    shares = make_plan(profile_of(CURVES), target_bytes=target, element_bytes=2, unit="fraction")
    assert shares.unit == "fraction"
    assert total(shares) == total(tokens)
    assert all(isinstance(budget, float) for budget in shares.window_budgets)
    twice = total(shares, length=2 * LENGTH) / total(shares)
    assert twice == pytest.approx(2.0, rel=0.01)


def test_objectives_lead_to_different_plans_and_one_that_was_not_measured_is_refused(profile_of):
    profile = profile_of(CURVES)
    one, other = (
        make_plan(profile, target_bytes=40_000, element_bytes=2, objective=name)
        for name in ("output_error", "residual_error")
    )
    assert one.budgets != other.budgets
    with pytest.raises(ConfigError, match="'logit_kl' was not measured: measure"):
        make_plan(profile, target_bytes=40_000, element_bytes=2, objective="logit_kl")
    with pytest.raises(ConfigError, match="unknown objective 'error': choose one of output_error"):
        make_plan(profile, target_bytes=40_000, element_bytes=2, objective="error")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (20_000, "no plan takes 20,000 bytes at 640 tokens: with the smallest measured budget, 40 tokens"),
        (500_000, "500,000 bytes at 640 tokens hold every layer in full"),
        (0, "target_bytes must be an int from 1"),
    ],
)
def test_a_size_that_no_plan_has_is_refused(target, message, profile_of):
    with pytest.raises(ConfigError, match=message):
        make_plan(profile_of(CURVES), target_bytes=target, element_bytes=2)


def test_many_layers_and_fine_budgets_are_solved_exactly_against_a_table():
    """The same optimum from the textbook's table over every cost, for a problem too large to enumerate."""
    rng = np.random.default_rng(0)
    errors = np.sort(rng.random((12, 20)))[:, ::-1]
    costs = np.sort(rng.integers(1, 40, (12, 20)))
    limit = 150
    best = np.full(limit + 1, np.inf)
    best[0] = 0.0
    for row_errors, row_costs in zip(errors, costs, strict=True):
        new = np.full(limit + 1, np.inf)
        for error, cost in zip(row_errors, row_costs, strict=True):
            new[cost:] = np.minimum(new[cost:], best[: limit + 1 - cost] + error)
        best = new
    found = allocate(errors.tolist(), costs.tolist(), limit)
    assert sum(errors[i][c] for i, c in enumerate(found)) == pytest.approx(best.min(), abs=1e-12)
    assert sum(int(costs[i][c]) for i, c in enumerate(found)) <= limit
