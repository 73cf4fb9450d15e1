"""Budgets as options: tokens or fractions of a prompt, for all window layers or one by one."""

from sys import float_info

from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.option_values import is_number
from hf_sparsekv.scorers.checks import MAX_COUNT

Budget = int | float | tuple[int | float, ...]


def check_budgets(budget: Budget, shape: str, pyramid_beta: float | None, *, at_least: int) -> None:
    """Refuse budgets that no layer could have, and what has no effect beside them.

    Args:
        budget: one, or one for each window layer.
        shape: how one is spread over the layers.
        pyramid_beta: steepness, for a pyramid only.
        at_least: sinks and recent tokens, which every layer keeps.
    Raises:
        ConfigError: names the value, the limit and what to do.
    """
    if pyramid_beta is not None:
        if shape != "pyramid":
            raise ConfigError(f"pyramid_beta={shown(pyramid_beta)} has no effect with budget_shape={shape!r}")
        if not is_number(pyramid_beta) or not 1 <= pyramid_beta <= float_info.max:
            raise ConfigError(f"pyramid_beta must be a finite number >= 1: got {shown(pyramid_beta)}")
    if isinstance(budget, tuple):
        if not budget:
            raise ConfigError("budget is an empty list: give one entry for each window layer")
        if shape == "pyramid":
            raise ConfigError(f"budget_shape={shape!r} has no effect with a list of budgets")
    for one in budget if isinstance(budget, tuple) else (budget,):
        _check_one(one, at_least)


def _check_one(budget: object, at_least: int) -> None:
    if isinstance(budget, float):
        if not 0.0 < budget < 1.0:
            raise ConfigError(
                f"budget={budget} is not a fraction in (0, 1): give a fraction of the prompt, "
                "or whole tokens as an int (to keep everything, use full layers)"
            )
        return
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise ConfigError(f"budget must be an int (tokens), a float (fraction) or a list of these: got {shown(budget)}")
    if budget > MAX_COUNT:
        raise ConfigError(
            f"budget must be at most {MAX_COUNT}: got {shown(budget)} (to keep everything, use full layers)"
        )
    if budget < at_least:
        raise ConfigError(
            f"budget={shown(budget)} is smaller than num_sink_tokens + num_recent_tokens = {at_least}: "
            f"raise the budget to at least {at_least}, or protect fewer tokens"
        )
