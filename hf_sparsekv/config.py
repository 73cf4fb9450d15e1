"""SparseKVConfig: every user-facing option of the method, checked once and then frozen.

A configuration knows no model: which layers exist and what they cost is `hf_sparsekv.plan`'s business.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from hf_sparsekv.errors import ConfigError
from hf_sparsekv.scorers import Pooling, Scorer, build_scorer, describe_scorer

BUDGET_SHAPES = ("uniform", "pyramid")
DECODE_MODES = ("replace_lowest", "ring", "grow")
POOLINGS = ("avg", "max", "forward", "none")
REDUCTIONS = ("mean", "max")
MAX_POOL_WIDTH = 41
DEFAULT_NUM_FULL_LAYERS = 3

Budget = int | float | tuple[int | float, ...]


@dataclass(frozen=True, kw_only=True)
class SparseKVConfig:
    """How a sparse KV cache decides what to keep.

    Options left at None take the scorer's published setting; an option that would have no effect raises.

    Raises:
        ConfigError: an unknown, impossible, contradictory or ineffective option.
    """

    num_full_layers: int | None = None
    """Layers that keep everything, counted from the bottom; 0 = none. Default 3, unless `full_layers` is given."""
    full_layers: tuple[int, ...] | None = None
    """The full layers by index, in place of a count."""
    budget: Budget = 1024
    """Tokens that a window layer keeps per request: an int; a float in (0, 1) = that fraction of the prompt; or a
    sequence with one of these for each window layer, from the bottom."""
    budget_shape: str = "uniform"
    """"uniform", or "pyramid": budgets fall linearly with depth, their sum unchanged (PyramidKV, 2406.02069)."""
    pyramid_beta: float | None = None
    """Steepness of the pyramid: the top layer's scored tokens are the mean divided by it. Default 20."""
    num_sink_tokens: int = 4
    """First tokens of a request, never evicted."""
    num_recent_tokens: int = 32
    """Last tokens, the current one included, never evicted."""
    observation_window: int = 32
    """Last query rows of a prompt whose attention is scored; at most `num_recent_tokens`."""
    scorer: str | Scorer = "snapkv"
    """Name of a registered scorer, or an object of your own."""
    scorer_options: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of a named scorer."""
    pooling: str | None = None
    """How scores spread before selection: "avg", "max", "forward" or "none"."""
    pool_kernel_size: int | None = None
    """Width of the pooling, odd, 1 to 41 (7 for the default scorer)."""
    row_reduction: str | None = None
    """How the observed rows' weights are reduced: "mean" or "max"."""
    group_reduction: str | None = None
    """How the query heads of a KV head are reduced: "mean" or "max"."""
    decode: str | None = None
    """"replace_lowest": a new token takes the place of the lowest-scored one; "ring": of the oldest recent one, the
    prompt's selection stays; "grow": nothing is evicted after the prompt. Default: the scorer's (replace_lowest)."""
    decay: float | None = None
    """Weight of the old score in each decode step, in [0, 1]. Default 1 - 1 / observation_window."""

    def __post_init__(self) -> None:
        """Normalise sequences, resolve the scorer, and check every option."""
        set_ = object.__setattr__
        if self.full_layers is not None:
            set_(self, "full_layers", _int_tuple("full_layers", self.full_layers))
        if isinstance(self.budget, Sequence) and not isinstance(self.budget, str):
            set_(self, "budget", tuple(self.budget))
        if not isinstance(self.scorer_options, Mapping):
            raise ConfigError(f"scorer_options must be a mapping of names to values: got {self.scorer_options!r}")
        set_(self, "scorer_options", dict(self.scorer_options))
        set_(self, "_scorer", build_scorer(self.scorer, self.scorer_options))
        self._check_layers()
        self._check_tokens()
        self._check_budget()
        self._check_scoring()
        self._check_decode()

    # --- what the options amount to -------------------------------------------------------------------------------

    @property
    def scorer_object(self) -> Scorer:
        """The scorer that `scorer` and `scorer_options` name."""
        scorer: Scorer = self._scorer  # type: ignore[attr-defined]
        return scorer

    @property
    def pool(self) -> Pooling:
        """Pooling in force: the options', or the scorer's own."""
        default = self.scorer_object.default_pooling
        kind = self.pooling or (default.kind if default.kind != "none" or self.pool_kernel_size is None else "avg")
        width = self.pool_kernel_size or (default.width if default.width > 1 else 7)
        return Pooling(kind, 1 if kind == "none" else width)

    @property
    def rows(self) -> str:
        """Row reduction in force."""
        return self.row_reduction or self.scorer_object.default_row_reduction

    @property
    def groups(self) -> str:
        """Group reduction in force."""
        return self.group_reduction or "mean"

    @property
    def decode_mode(self) -> str:
        """Decode mode in force."""
        return self.decode or self.scorer_object.default_decode

    @property
    def decode_weights(self) -> tuple[float, float]:
        """(decay, gain): score = decay * score + gain * softmax weight, at each decode step."""
        scorer = self.scorer_object
        if self.decay is not None:
            return self.decay, 1.0 - self.decay
        decay = 1.0 - 1.0 / self.observation_window if scorer.decode_decay is None else scorer.decode_decay
        return decay, 1.0 - decay if scorer.decode_gain is None else scorer.decode_gain

    @property
    def num_protected(self) -> int:
        """Sinks and recent tokens together: the smallest possible budget."""
        return self.num_sink_tokens + self.num_recent_tokens

    # --- JSON -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All options as JSON-able values; an own scorer object must be registered first."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["scorer_options"] = dict(self.scorer_options)  # the caller may change what it gets
        if not isinstance(self.scorer, str):
            described = describe_scorer(self.scorer)
            values["scorer"], values["scorer_options"] = described["name"], described["options"]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def effective(self) -> dict[str, Any]:
        """What is in force, defaults resolved, as JSON-able values; an unregistered scorer appears by its repr."""
        scorer, (decay, gain) = self.scorer_object, self.decode_weights
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {
            "scorer": scorer.name,
            "scorer_options": repr(scorer),
            "pooling": self.pool.kind,
            "pool_kernel_size": self.pool.width,
            "row_reduction": self.rows if scorer.uses_row_reduction else None,
            "group_reduction": self.groups if scorer.uses_group_reduction else None,
            "decode": self.decode_mode,
            "decay": decay if self.decode_mode == "replace_lowest" else None,
            "gain": gain if self.decode_mode == "replace_lowest" else None,
        }
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SparseKVConfig":
        """The inverse of `to_dict`; unknown names raise ConfigError."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"options are {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}: {hint}")
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "SparseKVConfig":
        """The inverse of `to_json`."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"not a configuration: invalid JSON ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"not a configuration: a JSON object is needed, got {type(values).__name__}")
        return cls.from_dict(values)

    def with_(self, **changes: Any) -> "SparseKVConfig":
        """A copy with some options changed, checked again."""
        return replace(self, **changes)

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check_layers(self) -> None:
        if self.num_full_layers is not None and self.full_layers is not None:
            raise ConfigError(
                f"give num_full_layers or full_layers, not both: got {self.num_full_layers=} and {self.full_layers=}"
            )
        if self.num_full_layers is None and self.full_layers is None:
            object.__setattr__(self, "num_full_layers", DEFAULT_NUM_FULL_LAYERS)
        if self.num_full_layers is not None:
            _check_int("num_full_layers", self.num_full_layers, at_least=0)
        elif self.full_layers and (min(self.full_layers) < 0 or len(set(self.full_layers)) != len(self.full_layers)):
            raise ConfigError(f"full_layers must be distinct layer indices from 0 up: got {list(self.full_layers)}")

    def _check_tokens(self) -> None:
        _check_int("num_sink_tokens", self.num_sink_tokens, at_least=0)
        _check_int("num_recent_tokens", self.num_recent_tokens, at_least=1)
        _check_int("observation_window", self.observation_window, at_least=1)
        if self.observation_window > self.num_recent_tokens:
            raise ConfigError(
                f"observation_window={self.observation_window} is larger than num_recent_tokens="
                f"{self.num_recent_tokens}: the observed tokens must themselves be kept, so raise num_recent_tokens "
                f"to {self.observation_window} or lower observation_window"
            )

    def _check_budget(self) -> None:
        if self.budget_shape not in BUDGET_SHAPES:
            raise ConfigError(f"unknown budget_shape {self.budget_shape!r}: choose one of {', '.join(BUDGET_SHAPES)}")
        if self.pyramid_beta is not None:
            if self.budget_shape != "pyramid":
                raise ConfigError(f"pyramid_beta={self.pyramid_beta} has no effect with budget_shape='uniform'")
            if not _is_number(self.pyramid_beta) or not self.pyramid_beta >= 1:  # NaN is not
                raise ConfigError(f"pyramid_beta must be a number >= 1: got {self.pyramid_beta!r}")
        budgets = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        if isinstance(self.budget, tuple):
            if not self.budget:
                raise ConfigError("budget is an empty list: give one entry for each window layer")
            if self.budget_shape != "uniform":
                raise ConfigError(f"budget_shape={self.budget_shape!r} has no effect with a list of budgets")
        for budget in budgets:
            self._check_one_budget(budget)

    def _check_one_budget(self, budget: object) -> None:
        if isinstance(budget, float):
            if not 0.0 < budget < 1.0:
                raise ConfigError(
                    f"budget={budget} is not a fraction in (0, 1): give a fraction of the prompt, "
                    "or whole tokens as an int (to keep everything, use full layers)"
                )
            return
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise ConfigError(f"budget must be an int (tokens), a float (fraction) or a list of these: got {budget!r}")
        if budget < self.num_protected:
            raise ConfigError(
                f"budget={budget} is smaller than num_sink_tokens + num_recent_tokens = {self.num_protected}: "
                f"raise the budget to at least {self.num_protected}, or protect fewer tokens"
            )

    def _check_scoring(self) -> None:
        _check_choice("pooling", self.pooling, POOLINGS)
        _check_choice("row_reduction", self.row_reduction, REDUCTIONS)
        _check_choice("group_reduction", self.group_reduction, REDUCTIONS)
        scorer = self.scorer_object
        if self.row_reduction is not None and not scorer.uses_row_reduction:
            raise ConfigError(f"row_reduction={self.row_reduction!r} has no effect with scorer {scorer.name!r}")
        if self.group_reduction is not None and not scorer.uses_group_reduction:
            raise ConfigError(f"group_reduction={self.group_reduction!r} has no effect with scorer {scorer.name!r}")
        width = self.pool_kernel_size
        if width is not None:
            _check_int("pool_kernel_size", width, at_least=1)
            if width % 2 == 0 or width > MAX_POOL_WIDTH:
                raise ConfigError(f"pool_kernel_size must be odd and at most {MAX_POOL_WIDTH}: got {width}")
            if self.pooling == "none" and width > 1:
                raise ConfigError(f"pool_kernel_size={width} has no effect with pooling='none'")

    def _check_decode(self) -> None:
        _check_choice("decode", self.decode, DECODE_MODES)
        if self.decay is not None:
            if not _is_number(self.decay) or not 0.0 <= self.decay <= 1.0:
                raise ConfigError(f"decay must be a number in [0, 1]: got {self.decay!r}")
            if self.decode_mode != "replace_lowest":
                raise ConfigError(f"decay={self.decay} has no effect with decode={self.decode_mode!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_int(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an int: got {value!r}")
    if value < at_least:
        raise ConfigError(f"{name} must be at least {at_least}: got {value}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")


def _int_tuple(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"{name} must be a list of layer indices: got {values!r}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must hold ints: got {value!r}")
    return tuple(values)
