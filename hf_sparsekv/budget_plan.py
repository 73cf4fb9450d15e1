"""BudgetPlan: a budget for each layer of one model, as measured; a file between `hf-sparsekv plan` and a configuration.

It knows neither how it was measured nor what its bytes are: see `hf_sparsekv.profile` and `hf_sparsekv.plan`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Self

from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.scorers.checks import check_int

FORMAT = 1
UNITS = ("tokens", "fraction")
_DECIDES = ("budget", "full_layers", "num_full_layers")
_WHAT = "a budget plan (as hf-sparsekv plan --calibrate writes it)"


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """What every layer of a model keeps.

    Raises:
        ConfigError: a number that no model or cache can have.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """With the number of budgets: the shape of the model that the plan is for."""
    unit: str
    """"tokens": budgets are whole tokens, the same for every prompt. "fraction": shares of the prompt."""
    budgets: tuple[int | float | None, ...]
    """Per layer, bottom first; None = keep everything."""
    prompt_length: int
    """Tokens of the prompts that it was measured with. Its bytes were counted at this length: prompts of another length
    take others, and where layers keep everything another share of the dense cache."""
    measured: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What is worth knowing of the measurement, JSON-able; nothing depends on it."""

    def __post_init__(self) -> None:
        """Every number must be possible: a plan may come from a file."""
        for name in ("num_heads", "num_kv_heads", "head_dim", "prompt_length"):
            check_int(name, getattr(self, name), at_least=1)
        if self.unit not in UNITS:
            raise ConfigError(f"unit must be one of {', '.join(UNITS)}: got {shown(self.unit)}")
        if not isinstance(self.budgets, (list, tuple)) or not self.budgets:
            raise ConfigError(f"budgets must be a list with an entry for each layer: got {shown(self.budgets)}")
        object.__setattr__(self, "budgets", tuple(self.budgets))
        for layer_idx, budget in enumerate(self.budgets):
            self._check_budget(layer_idx, budget)
        if not isinstance(self.measured, Mapping):
            raise ConfigError(f"measured must be a mapping: got {shown(self.measured)}")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.budgets)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that keep everything."""
        return tuple(i for i, budget in enumerate(self.budgets) if budget is None)

    @property
    def window_budgets(self) -> tuple[int | float, ...]:
        """The budgets of the others, bottom first."""
        return tuple(budget for budget in self.budgets if budget is not None)

    def check_shape(self, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Refuse another model than the one that was measured.

        Raises:
            ConfigError: names what differs.
        """
        theirs = {"layers": num_layers, "query heads": num_heads, "KV heads": num_kv_heads, "head dimension": head_dim}
        for (name, value), own in zip(
            theirs.items(), (self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim), strict=True
        ):
            if value != own:
                raise ConfigError(
                    f"the budget plan is of another model: it has {own} {name}, this model {value}; "
                    "measure this one with hf-sparsekv plan --calibrate"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for `from_dict`."""
        return {"format": FORMAT, **asdict(self), "budgets": list(self.budgets), "measured": dict(self.measured)}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: an entry that is missing, unknown or impossible, or a format of another release.
        """
        rest = dict(values)
        form = rest.pop("format", None)
        if form != FORMAT:
            raise ConfigError(f"not {_WHAT}: format is {shown(form)}, this release reads {FORMAT}")
        known = [f.name for f in fields(cls)]
        for name in rest:
            if name not in known:
                raise ConfigError(f"not {_WHAT}: unknown entry {shown(name)}")
        missing = [name for name in known if name not in rest and name != "measured"]
        if missing:
            raise ConfigError(f"not {_WHAT}: it has no {missing[0]}")
        return cls(**rest)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`.

        Raises:
            ConfigError: no JSON, or see `from_dict`.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not {_WHAT}: invalid JSON ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"not {_WHAT}: a JSON object is needed, got {type(values).__name__}")
        return cls.from_dict(values)

    @classmethod
    def load(cls, source: object) -> Self:
        """A plan from whatever a configuration was given: a plan, its dictionary, or the path of its file.

        Raises:
            ConfigError: something else, a file that cannot be read, or one that holds no plan.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, Mapping):
            return cls.from_dict(source)
        if not isinstance(source, (str, os.PathLike)):
            raise ConfigError(f"plan must be a budget plan or the path of its file: got {shown(source)}")
        path = Path(source)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError as error:
            raise ConfigError(f"no such budget plan: {path}; make one with hf-sparsekv plan --calibrate") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the budget plan {path}: {error}") from error
        try:
            return cls.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def _check_budget(self, layer_idx: int, budget: object) -> None:
        if budget is None:
            return
        where = f"the budget of layer {layer_idx}"
        if self.unit == "tokens":
            check_int(where, budget, at_least=1)
        elif not isinstance(budget, float) or not isfinite(budget) or not 0.0 < budget < 1.0:
            raise ConfigError(f"{where} must be a fraction in (0, 1), or null to keep everything: got {shown(budget)}")


def without_planned_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's options but those that a plan decides: what is left when another plan, or none, comes."""
    return {name: value for name, value in values.items() if name not in _DECIDES}
