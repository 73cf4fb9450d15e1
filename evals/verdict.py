"""Whether a figure may be read at all: a cache can only lose what the dense model has."""

from collections.abc import Mapping
from typing import Any

CHOICE_CHANCE = 0.25
"""Of the tasks with four options."""
EXACT_FLOOR = 0.1
"""An exact answer is never guessed; below this the dense model hardly ever gives it."""


def doubt(dense: Mapping[str, Any]) -> str | None:
    """Why rows beside this dense row say nothing about a cache; None where they do.

    The dense accuracy's interval has to lie above chance, and a context has to lower the dense perplexity.

    Args:
        dense: a row of `evals.tasks.summary.rows`, or of the harness; its `chance` wins over the tasks' usual one.
    """
    if "accuracy" in dense:
        chance = dense.get("chance", CHOICE_CHANCE if "agreement" in dense else EXACT_FLOOR)
        low = dense["accuracy"]["low"]
        if chance is not None and (low is None or low <= chance):
            return f"not valid: the dense model is near chance ({chance:.2f} lies in or above its interval)"
        return None
    without = dense.get("perplexity_without_context")
    if without is not None and without <= dense["perplexity"]["value"]:
        return "not valid: the context does not help the dense model"
    return None


def dense_of(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The dense row beside a row."""
    place = place_of(row)
    return next((other for other in rows if other["config"] == "dense" and place_of(other) == place), None)


def place_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows of one table share: suite, task, length, protocol, half."""
    return tuple(row.get(name) for name in ("suite", "task", "budget_tokens", "mode", "half"))
