"""SparseKVConfig: every user-facing option of the method, checked once and then frozen.

A configuration knows no model: which layers exist and what they cost is `hf_sparsekv.plan`'s business.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, Self

from hf_sparsekv.budget_plan import BudgetPlan, without_planned_options
from hf_sparsekv.budget_values import Budget, check_budgets
from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.ops.reference.select import MAX_POOL_WIDTH
from hf_sparsekv.option_values import (
    FrozenOptions,
    check_choice,
    check_names,
    int_tuple,
    is_list,
    is_number,
    parse_json_object,
)
from hf_sparsekv.presets import preset_options, without_preset_options
from hf_sparsekv.scorers import Pooling, Scorer, build_scorer, describe_scorer
from hf_sparsekv.scorers.base import DECODE_MODES, POOLINGS, REDUCTIONS
from hf_sparsekv.scorers.checks import check_fraction, check_int

BUDGET_SHAPES = ("uniform", "pyramid", "calibrated")
PREFILLS = ("exact", "bounded")
DEFAULT_NUM_FULL_LAYERS = 0
DEFAULT_BUDGET = 1024
DEFAULT_CHUNK_TOKENS = 2048
MIN_DECAY = 1e-30
"""Less would be 0 in fp32, and a token that decoding must not replace has a score that 0 times is no number."""


@dataclass(frozen=True, kw_only=True)
class SparseKVConfig:
    """How a sparse KV cache decides what to keep.

    Options left at None take the scorer's own setting; an option that would have no effect raises.

    Raises:
        ConfigError: an unknown, impossible, contradictory or ineffective option.
    """

    preset: InitVar[str | None] = None
    """"balanced" (what the defaults are), "question-in-window" or "published", see `hf_sparsekv.presets`: options that
    are not given take the preset's values. It is not stored; the options are."""
    num_full_layers: int | None = None
    """Layers that keep everything, counted from the bottom. Default 0: none, unless `full_layers` is given."""
    full_layers: tuple[int, ...] | None = None
    """The full layers by index, in place of a count."""
    budget: Budget = DEFAULT_BUDGET
    """Tokens that a window layer keeps per request: an int; a float in (0, 1) = that fraction of the prompt; or a
    sequence with one of these for each window layer, from the bottom."""
    budget_shape: str = "uniform"
    """"uniform", or "pyramid": budgets fall linearly with depth, their sum unchanged (PyramidKV, 2406.02069).
    Fractions fall less steeply where the bottom layer would otherwise keep more than the whole prompt. "calibrated":
    `plan` says which layers are full and what the others keep, so neither is given here."""
    plan: BudgetPlan | str | os.PathLike[str] | Mapping[str, Any] | None = None
    """What `hf-sparsekv plan --calibrate` has measured: the path of its file, read at once, or its contents."""
    pyramid_beta: float | None = None
    """Steepness of the pyramid: the top layer's scored tokens are the mean divided by it. Default 20."""
    num_sink_tokens: int = 4
    """First tokens of a request, never evicted."""
    num_recent_tokens: int = 32
    """Last tokens, the current one included, never evicted."""
    observation_window: int = 32
    """Last query rows of a prompt whose attention is scored; at most `num_recent_tokens`."""
    scorer: str | Scorer = "hybrid"
    """Name of a registered scorer, or an object of your own."""
    scorer_options: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of a named scorer."""
    pooling: str | None = None
    """How scores spread before selection: "avg", "max", "forward" or "none"."""
    pool_kernel_size: int | None = None
    """Width of the pooling, odd, 1 to 41 (21 for the default scorer)."""
    row_reduction: str | None = None
    """How the observed rows' weights are reduced: "mean" or "max"."""
    group_reduction: str | None = None
    """How the query heads of a KV head are reduced: "mean" or "max"."""
    decode: str | None = None
    """"replace_lowest": a new token takes the place of the lowest-scored one; "ring": of the oldest recent one, the
    prompt's selection stays; "grow": nothing is evicted after the prompt. Default: the scorer's (replace_lowest)."""
    decay: float | None = None
    """Weight of the old score in each decode step, in [0, 1]. Default 1 - 1 / observation_window."""
    prompt_share: float | None = None
    """In "replace_lowest", the part of the free budget, in [0, 1], that the prompt's best-scored tokens hold for good,
    until a further turn selects anew. Default: the scorer's, 0.5, or 0 for h2o, keyformer and tova, which replace as
    their papers say; and 0 where `decay` comes to 0, as it does with an `observation_window` of 1."""
    prefill: str = "exact"
    """"exact": a window layer selects once, at the prompt's end; "bounded": after every `prefill_chunk_tokens`, so that
    it never holds more than its budget and a chunk: an approximation, what one chunk loses no later one sees."""
    prefill_chunk_tokens: int | None = None
    """Tokens of a prompt between two selections when `prefill` is "bounded". Default 2048."""

    def __new__(cls, *args: object, **options: object) -> Self:
        """Refuse unknown names in the words of `from_dict`: a misspelled option deserves a hint."""
        check_names(options, cls.option_names())
        self = super().__new__(cls)
        object.__setattr__(self, "_given", frozenset(options))
        return self

    def __post_init__(self, preset: str | None) -> None:
        """Take the preset, normalise sequences, resolve the scorer, and check every option."""
        set_ = object.__setattr__
        if preset is not None:
            self._take_preset(preset, self._given)  # type: ignore[attr-defined]
        object.__delattr__(self, "_given")
        if self.full_layers is not None:
            set_(self, "full_layers", int_tuple("full_layers", self.full_layers))
        if is_list(self.budget):
            set_(self, "budget", tuple(self.budget))
        if not isinstance(self.scorer_options, Mapping):
            raise ConfigError(f"scorer_options must be a mapping of names to values: got {shown(self.scorer_options)}")
        set_(self, "scorer_options", FrozenOptions(self.scorer_options))
        set_(self, "_scorer", build_scorer(self.scorer, self.scorer_options))
        self._take_plan()
        self._check_layers()
        self._check_tokens()
        check_budgets(self.budget, self.budget_shape, self.pyramid_beta, at_least=self.num_protected)
        self._check_scoring()
        self._check_decode()
        self._check_prefill()

    def __hash__(self) -> int:
        """By every option but the scorer's, which may hold anything."""
        parts = (getattr(self, f.name) for f in fields(self) if f.name not in ("scorer", "scorer_options"))
        return hash((self.scorer_object.name, *parts))

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
    def pinned_share(self) -> float:
        """`prompt_share` in force; 0 too where decoding keeps no scores, or forgets them at once."""
        if self.decode_mode != "replace_lowest" or self.decode_weights[0] < MIN_DECAY:
            return 0.0
        return self.scorer_object.default_prompt_share if self.prompt_share is None else self.prompt_share

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a prompt between two selections; None = it selects once, at its end."""
        if self.prefill == "exact":
            return None
        return DEFAULT_CHUNK_TOKENS if self.prefill_chunk_tokens is None else self.prefill_chunk_tokens

    @property
    def num_protected(self) -> int:
        """Sinks and recent tokens together: the smallest possible budget."""
        return self.num_sink_tokens + self.num_recent_tokens

    # --- JSON -----------------------------------------------------------------------------------------------------

    def to_dict(self, *, must_be_registered: bool = True) -> dict[str, Any]:
        """All options as JSON-able values, for `from_dict`.

        Args:
            must_be_registered: refuse a scorer object that no name leads back to; else it is named all the same, and
                `from_dict` takes the result once its class is registered.
        Raises:
            ConfigError: a scorer object that had to be registered and is not.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["scorer_options"] = dict(self.scorer_options)  # the caller may change what it gets
        if not isinstance(self.scorer, str):
            described = describe_scorer(self.scorer, must_be_registered=must_be_registered)
            values["scorer"], values["scorer_options"] = described["name"], described["options"]
        return _jsonable(values)

    def effective(self) -> dict[str, Any]:
        """What is in force, defaults resolved, as JSON-able values."""
        scorer, (decay, gain) = self.scorer_object, self.decode_weights
        described = describe_scorer(scorer, must_be_registered=False)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {
            "scorer": described["name"],
            "scorer_options": described["options"],
            "pooling": self.pool.kind,
            "pool_kernel_size": self.pool.width,
            "row_reduction": self.rows if scorer.uses_row_reduction else None,
            "group_reduction": self.groups if scorer.uses_group_reduction else None,
            "decode": self.decode_mode,
            "decay": decay if self.decode_mode == "replace_lowest" else None,
            "gain": gain if self.decode_mode == "replace_lowest" else None,
            "prompt_share": self.pinned_share if self.decode_mode == "replace_lowest" else None,
            "prefill_chunk_tokens": self.chunk_tokens,
        }
        return _jsonable(values)

    @classmethod
    def option_names(cls) -> list[str]:
        """What can be given."""
        return ["preset", *(f.name for f in fields(cls))]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SparseKVConfig":
        """The inverse of `to_dict`; unknown names raise ConfigError."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a configuration is a mapping of option names to values: got {shown(values)}")
        check_names(values, cls.option_names())
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> "SparseKVConfig":
        """The inverse of `to_json`."""
        return cls.from_dict(parse_json_object(text, "a configuration"))

    def with_(self, **changes: Any) -> "SparseKVConfig":
        """A copy with some options changed, checked again; another preset or plan ends what the old ones decided."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if changes.get("preset") is not None:
            values = without_preset_options(values)
        if changes.get("plan", self.plan) is not self.plan:
            values = without_planned_options(values)
        return type(self)(**values | changes)

    # --- checks ---------------------------------------------------------------------------------------------------

    def _take_preset(self, preset: str, given: frozenset[str]) -> None:
        """Take the values of options that are not given and would have an effect beside those that are."""
        options = dict(preset_options(preset))
        if given >= options.keys():
            raise ConfigError(f"preset={preset!r} has no effect: all that it decides is given, {', '.join(options)}")
        if self.full_layers is not None or self.plan is not None:
            del options["num_full_layers"]
        if "scorer" in given and self.scorer != options["scorer"]:
            options = {name: value for name, value in options.items() if name == "num_full_layers"}
        if self.pooling == "none":
            options.pop("pool_kernel_size", None)
        for name in options.keys() - given:
            object.__setattr__(self, name, options[name])

    def _take_plan(self) -> None:
        """Read the plan, and let its layers and budgets be this configuration's."""
        check_choice("budget_shape", self.budget_shape, BUDGET_SHAPES, is_optional=False)
        if self.plan is None and self.budget_shape == "calibrated":
            raise ConfigError("budget_shape='calibrated' needs plan=, a file that hf-sparsekv plan --calibrate writes")
        if self.plan is None:
            return
        if self.budget_shape != "calibrated":
            raise ConfigError(f"plan={shown(self.plan)} has no effect with budget_shape={self.budget_shape!r}")
        plan = BudgetPlan.load(self.plan)
        taken = {"plan": plan, "full_layers": plan.full_layers, "budget": plan.window_budgets or DEFAULT_BUDGET}
        free = {"full_layers": None, "budget": DEFAULT_BUDGET, "num_full_layers": None}
        for name, default in free.items():
            value = getattr(self, name)
            if value not in (default, taken.get(name, default)):
                raise ConfigError(f"{name}={shown(value)} has no effect with budget_shape='calibrated': the plan says")
        for name, value in taken.items():
            object.__setattr__(self, name, value)

    def _check_layers(self) -> None:
        if self.num_full_layers is not None and self.full_layers is not None:
            both = f"num_full_layers={shown(self.num_full_layers)} and full_layers={shown(self.full_layers)}"
            raise ConfigError(f"give num_full_layers or full_layers, not both: got {both}")
        if self.num_full_layers is None and self.full_layers is None:
            object.__setattr__(self, "num_full_layers", DEFAULT_NUM_FULL_LAYERS)
        if self.num_full_layers is not None:
            check_int("num_full_layers", self.num_full_layers, at_least=0)
        elif self.full_layers and (min(self.full_layers) < 0 or len(set(self.full_layers)) != len(self.full_layers)):
            raise ConfigError(f"full_layers must be distinct layer indices from 0 up: got {list(self.full_layers)}")

    def _check_tokens(self) -> None:
        check_int("num_sink_tokens", self.num_sink_tokens, at_least=0)
        check_int("num_recent_tokens", self.num_recent_tokens, at_least=1)
        check_int("observation_window", self.observation_window, at_least=1)
        if self.observation_window > self.num_recent_tokens:
            raise ConfigError(
                f"observation_window={self.observation_window} is larger than num_recent_tokens="
                f"{self.num_recent_tokens}: the observed tokens must themselves be kept, so raise num_recent_tokens "
                f"to {self.observation_window} or lower observation_window"
            )

    def _check_scoring(self) -> None:
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("row_reduction", self.row_reduction, REDUCTIONS)
        check_choice("group_reduction", self.group_reduction, REDUCTIONS)
        scorer = self.scorer_object
        if self.row_reduction is not None and not scorer.uses_row_reduction:
            raise ConfigError(f"row_reduction={self.row_reduction!r} has no effect with scorer {scorer.name!r}")
        if self.group_reduction is not None and not scorer.uses_group_reduction:
            raise ConfigError(f"group_reduction={self.group_reduction!r} has no effect with scorer {scorer.name!r}")
        width = self.pool_kernel_size
        if width is not None:
            check_int("pool_kernel_size", width, at_least=1, at_most=MAX_POOL_WIDTH)
            if width % 2 == 0:
                raise ConfigError(f"pool_kernel_size must be odd and at most {MAX_POOL_WIDTH}: got {width}")
            if self.pooling == "none" and width > 1:
                raise ConfigError(f"pool_kernel_size={width} has no effect with pooling='none'")

    def _check_decode(self) -> None:
        check_choice("decode", self.decode, DECODE_MODES)
        if self.decay is not None:
            if not is_number(self.decay) or not 0.0 <= self.decay <= 1.0:
                raise ConfigError(f"decay must be a number in [0, 1]: got {shown(self.decay)}")
            if self.decode_mode != "replace_lowest":
                raise ConfigError(f"decay={self.decay} has no effect with decode={self.decode_mode!r}")
        if self.prompt_share is None:
            return
        check_fraction("prompt_share", self.prompt_share)
        if self.prompt_share == 0:  # a preset says so, and may be given another mode
            return
        if self.decode_mode != "replace_lowest":
            raise ConfigError(
                f"prompt_share={self.prompt_share} has no effect with decode={self.decode_mode!r}: leave it out, or "
                "take decode='replace_lowest'"
            )
        decay = self.decode_weights[0]
        if decay < MIN_DECAY:
            raise ConfigError(
                f"prompt_share={self.prompt_share} has no effect with decay={decay}, which forgets every score at "
                f"once: give a decay of at least {MIN_DECAY:g}, or leave prompt_share out"
            )

    def _check_prefill(self) -> None:
        check_choice("prefill", self.prefill, PREFILLS, is_optional=False)
        if self.prefill == "exact":
            if self.prefill_chunk_tokens is not None:
                raise ConfigError(
                    f"prefill_chunk_tokens={shown(self.prefill_chunk_tokens)} has no effect with prefill='exact'"
                )
            return
        budgets = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        fractions = [budget for budget in budgets if isinstance(budget, float)]
        if fractions:
            raise ConfigError(
                f"prefill='bounded' selects before the prompt's length is known, so budget={fractions[0]} is a "
                "fraction of nothing yet: give whole tokens as an int"
            )
        if self.prefill_chunk_tokens is not None:
            check_int("prefill_chunk_tokens", self.prefill_chunk_tokens, at_least=1)
            if self.prefill_chunk_tokens < self.observation_window:
                raise ConfigError(
                    f"prefill_chunk_tokens={self.prefill_chunk_tokens} is smaller than observation_window="
                    f"{self.observation_window}: raise it to at least {self.observation_window}"
                )


def _jsonable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists for tuples, and a plan's contents for a plan."""
    return {
        name: list(v) if isinstance(v, tuple) else v.to_dict() if isinstance(v, BudgetPlan) else v
        for name, v in values.items()
    }
