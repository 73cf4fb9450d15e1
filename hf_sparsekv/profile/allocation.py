"""From a profile to a plan: which layers stay full and what the others keep, for a given number of bytes.

The sum of a measured error over the layers is made as small as the bytes allow. That is a multiple-choice knapsack, and
it is solved exactly.
"""

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from hf_sparsekv.budget_plan import UNITS, BudgetPlan
from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.plan import LayerPlan, LayerSpec, ModelShape
from hf_sparsekv.profile.result import Curve, Profile
from hf_sparsekv.scorers.checks import check_int

OBJECTIVES = ("output_error", "residual_error", "logit_kl")
DEFAULT_OBJECTIVE = "residual_error"
"""With recited texts among the measured ones it spares layers that look things up more than the output error does."""
NUM_STEPS = 64
"""Into which the budgets of a layer are divided, from nothing to the whole prompt."""


def allocate(errors: Sequence[Sequence[float]], costs: Sequence[Sequence[int]], limit: int) -> list[int]:
    """One choice for each row, so that the errors' sum is least and the costs' sum at most `limit`: exactly.

    Rows are added one after another. What is remembered are the best errors for every attainable cost, without those
    that cost no less than a smaller error: whatever the later rows choose, these would never be part of the best.

    Args:
        errors: of each row's choices.
        costs: of the same choices, whole numbers.
        limit: on the sum.
    Returns:
        The index of each row's choice; of equal errors the cheapest.
    Raises:
        ConfigError: even the cheapest choices cost more, a row whose errors and costs do not match, or an error that is
            no number.
    """
    if len(errors) != len(costs) or any(not row or len(row) != len(of) for row, of in zip(errors, costs, strict=False)):
        raise ConfigError(
            f"errors and costs must have the same rows of choices: got {shown([len(row) for row in errors])} and "
            f"{shown([len(row) for row in costs])} choices"
        )
    error_rows = [np.asarray(row, dtype=np.float64) for row in errors]
    cost_rows = [np.asarray(row, dtype=np.int64) for row in costs]
    if not all(np.isfinite(row).all() for row in error_rows):
        raise ConfigError("errors must be finite: one is NaN or infinite")
    cheapest = [int(row.min()) for row in cost_rows]
    if sum(cheapest) > limit:
        raise ConfigError(f"the cheapest choices cost {sum(cheapest)}, more than the limit {limit}")
    cost: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
    error: NDArray[np.float64] = np.zeros(1)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for i, (row_error, row_cost) in enumerate(zip(error_rows, cost_rows, strict=True)):
        all_costs = (cost[:, None] + row_cost).ravel()
        all_errors = (error[:, None] + row_error).ravel()
        possible = np.flatnonzero(all_costs <= limit - sum(cheapest[i + 1 :]))
        order = possible[np.lexsort((all_errors[possible], all_costs[possible]))]
        best = np.minimum.accumulate(all_errors[order])
        is_better = np.concatenate([[True], all_errors[order][1:] < best[:-1]])
        chosen = order[is_better]
        steps.append((chosen // len(row_cost), chosen % len(row_cost)))
        cost, error = all_costs[chosen], all_errors[chosen]
    place, choices = len(cost) - 1, []
    for came_from, choice in reversed(steps):
        choices.append(int(choice[place]))
        place = int(came_from[place])
    return choices[::-1]


def make_plan(
    profile: Profile,
    *,
    target_bytes: int,
    element_bytes: int,
    unit: str = "tokens",
    objective: str = DEFAULT_OBJECTIVE,
) -> BudgetPlan:
    """The plan of least summed error whose cache takes no more than so many bytes.

    Errors between two measured budgets are interpolated along the logarithm of the budget; a full layer has none.
    Budgets go in steps of 1/64 of the prompt; what the last step leaves over goes to the layer that gains most by it.

    Args:
        profile: of the model.
        target_bytes: of one request's cache at the profile's prompt length, tables, positions and scores included.
        element_bytes: size of one key or value element.
        unit: "tokens": the same budgets for every prompt; "fraction": the same shares.
        objective: which measured error is summed, see `OBJECTIVES`.
    Raises:
        ConfigError: no profile, a size that no plan has, an unknown objective, or one that was not measured.
    """
    check_int("element_bytes", element_bytes, at_least=1)
    if unit not in UNITS:
        raise ConfigError(f"unit must be one of {', '.join(UNITS)}: got {shown(unit)}")
    _check_objective(profile, objective)
    curves = [_curve(profile, i, objective) for i in range(profile.shape.num_layers)]
    length, num_layers, shape = profile.prompt_length, profile.shape.num_layers, profile.shape
    choices = _choices(profile.budgets[0], length)
    costs = [_layer_bytes(shape, tokens, length, element_bytes) for tokens in choices]
    check_target(target_bytes, shape, length=length, least=choices[0], element_bytes=element_bytes)
    errors = [[_error_at(curve, profile, tokens) for tokens in choices] for curve in curves]
    tokens = [choices[i] for i in allocate(errors, [costs] * num_layers, target_bytes)]
    _spend_rest(tokens, curves, profile, target_bytes, element_bytes)
    budgets = tuple(None if t == length else t if unit == "tokens" else t / length for t in tokens)
    plan_bytes = sum(_layer_bytes(shape, t, length, element_bytes) for t in tokens)
    return BudgetPlan(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        unit=unit,
        budgets=budgets,
        prompt_length=length,
        measured={
            "objective": objective,
            "summed_error": summed_error(profile, tokens, objective),
            "cache_bytes": plan_bytes,
            "dense_bytes": 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element_bytes * length,
            "element_bytes": element_bytes,
            "num_texts": profile.num_texts,
            "num_held_out": profile.num_held_out,
            "config": profile.config.to_dict(must_be_registered=False),
            **profile.facts,
        },
    )


def check_target(target_bytes: int, shape: ModelShape, *, length: int, least: int, element_bytes: int) -> None:
    """Refuse a size that no plan has; worth doing before anything is measured.

    Args:
        target_bytes, element_bytes: as in `make_plan`.
        shape: of the model.
        length: of the prompts.
        least: tokens, the smallest budget that will be measured.
    Raises:
        ConfigError: it is too small, or holds every layer in full.
    """
    check_int("target_bytes", target_bytes, at_least=1, at_most=2**63 - 1)
    low = shape.num_layers * _layer_bytes(shape, least, length, element_bytes)
    high = shape.num_layers * _layer_bytes(shape, length, length, element_bytes)
    if target_bytes < low:
        raise ConfigError(
            f"no plan takes {target_bytes:,} bytes at {length:,} tokens: with the smallest measured budget, {least} "
            f"tokens, in every layer it is {low:,}; allow more bytes, or measure smaller budgets and longer prompts"
        )
    if target_bytes >= high:
        raise ConfigError(
            f"{target_bytes:,} bytes at {length:,} tokens hold every layer in full ({high:,} bytes): nothing is left "
            "to plan, allow fewer"
        )


def summed_error(profile: Profile, tokens: Sequence[int], objective: str = DEFAULT_OBJECTIVE) -> float:
    """What `make_plan` makes small: the error of every layer with its budget, summed.

    Args:
        profile: of the model.
        tokens: per layer, from the profile's first budget to its prompt's length.
        objective: see `OBJECTIVES`.
    Raises:
        ConfigError: as in `make_plan`, or numbers of tokens that the profile says nothing of.
    """
    _check_objective(profile, objective)
    if len(tokens) != profile.shape.num_layers:
        raise ConfigError(
            f"tokens must have one entry for each of {profile.shape.num_layers} layers: got {len(tokens)}"
        )
    for i, kept in enumerate(tokens):
        check_int(f"tokens of layer {i}", kept, at_least=profile.budgets[0], at_most=profile.prompt_length)
    return sum(_error_at(_curve(profile, i, objective), profile, t) for i, t in enumerate(tokens))


def _check_objective(profile: Profile, objective: str) -> None:
    if not isinstance(profile, Profile):
        raise ConfigError(f"profile must be a Profile, as measure() returns it: got {shown(profile)}")
    if objective not in OBJECTIVES:
        raise ConfigError(f"unknown objective {shown(objective)}: choose one of {', '.join(OBJECTIVES)}")


def _curve(profile: Profile, layer_idx: int, objective: str) -> Curve:
    curve: Curve | None = getattr(profile.layers[layer_idx], objective)
    if curve is None:
        raise ConfigError(f"objective {objective!r} was not measured: measure(..., with_logits=True)")
    return curve


def _choices(least: int, length: int) -> list[int]:
    """Budgets of a layer, ascending; the last one keeps the whole prompt."""
    step = max(1, length // NUM_STEPS)
    return [least, *range((least // step + 1) * step, length, step), length]


def _error_at(curve: Curve, profile: Profile, tokens: int) -> float:
    """The error with this many tokens, none with the whole prompt."""
    places = [log(budget) for budget in (*profile.budgets, profile.prompt_length)]
    return float(np.interp(log(tokens), places, (*curve, 0.0)))


def _layer_bytes(shape: ModelShape, tokens: int, length: int, element_bytes: int) -> int:
    """Of one layer at the end of the prompt, as `LayerPlan` counts; a layer that keeps the whole prompt is full."""
    is_full = tokens == length
    layers = tuple(
        LayerSpec(layer_idx=i, is_full=is_full, budget=None if is_full else tokens, num_protected=1)
        for i in range(shape.num_layers)
    )
    return LayerPlan(shape=shape, layers=layers).layer_bytes(0, length, element_bytes=element_bytes)


def _spend_rest(tokens: list[int], curves: list[Curve], profile: Profile, target: int, element_bytes: int) -> None:
    """Give what is left of the bytes, less than a step, to the window layer whose error it lowers most."""
    shape, length, least = profile.shape, profile.prompt_length, profile.budgets[0]
    left = target - sum(_layer_bytes(shape, t, length, element_bytes) for t in tokens)
    windows = [i for i, t in enumerate(tokens) if t < length]
    at_least = _layer_bytes(shape, least, length, element_bytes)
    token_bytes = _layer_bytes(shape, least + 1, length, element_bytes) - at_least
    if not windows or left < token_bytes:
        return

    def more(i: int) -> int:
        return min(left // token_bytes, length - 1 - tokens[i])

    def gain(i: int) -> float:
        curve = curves[i]
        return _error_at(curve, profile, tokens[i]) - _error_at(curve, profile, tokens[i] + more(i))

    best = max(windows, key=gain)
    tokens[best] += more(best)
