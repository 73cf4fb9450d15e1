"""What is compared with what: methods by name, and the budgets at which their measured bytes meet a ratio.

Every method keeps the same share of every layer unless it says otherwise: the published ones without full layers, so
that at an equal ratio they differ in what they keep and in nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.plan import LayerPlan, ModelShape

RATIOS = (2.0, 4.0, 10.0)
"""Bytes of the dense cache over bytes of the sparse one, both measured."""

_EVEN = {"num_full_layers": 0}
PEERS: dict[str, dict[str, Any]] = {
    "random": _EVEN | {"scorer": "random"},
    "streaming_llm": _EVEN | {"scorer": "streaming_llm"},
    "tova": _EVEN | {"scorer": "tova"},
    "h2o": _EVEN | {"scorer": "h2o"},
    "keyformer": _EVEN | {"scorer": "keyformer"},
    "snapkv": _EVEN | {"scorer": "snapkv"},
    "pyramidkv": _EVEN | {"scorer": "snapkv", "budget_shape": "pyramid"},
    "keydiff": _EVEN | {"scorer": "keydiff"},
    "expected_attention": _EVEN | {"scorer": "expected_attention"},
    "rkv": _EVEN | {"scorer": "rkv"},
}
OURS: dict[str, dict[str, Any]] = {
    "balanced": {"preset": "balanced"},
    "question-in-window": {"preset": "question-in-window"},
    "kv_diversity": _EVEN | {"scorer": "kv_diversity"},
    "original": {"preset": "published"},
}
"""The presets (the defaults are the first one), and what is new in them alone."""
METHODS = PEERS | OURS
"""Options by the name of the method."""
ALL, PUBLISHED = "all", "published-layers"
"""Names that stand for several: every method; the layers and budgets of `published_configs`, which are not those of the
preset `published` (that one is the method `original`)."""

PUBLISHED_LAYERS = 32
PUBLISHED_WINDOW_LAYERS = (22, 26, 31)
PUBLISHED_BUDGETS = (1536, 1280, 1024)
PUBLISHED_LENGTH = 4096
"""Our choice: the length at which those budgets are taken; other prompts keep the same fraction."""

_STEPS = 100_000
"""Budgets are multiples of one over this."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A configuration to be measured, or the options and the ratio from which it will be made."""

    name: str
    options: Mapping[str, Any]
    ratio: float | None = None
    """Of dense to sparse bytes; the budget is chosen for it. None: the options have the budget."""

    def config(self, shape: ModelShape, prompts: Sequence[Sequence[int]], *, element_bytes: int) -> SparseKVConfig:
        """The configuration; see `fit_budget`."""
        if self.ratio is None:
            return SparseKVConfig.from_dict(self.options)
        return fit_budget(self.options, shape, prompts, self.ratio, element_bytes=element_bytes)


def methods_of(names: Iterable[str], ratios: Sequence[float], overrides: Mapping[str, Any]) -> list[Method]:
    """Methods by name, each at each ratio.

    Args:
        names: of `METHODS`; `ALL` stands for all of them. `PUBLISHED` is no method: see `published_configs`.
        ratios: none = the methods take the budget among the overrides, or their default.
        overrides: options in place of a method's own.
    Raises:
        ConfigError: an unknown name or ratio, a budget beside ratios, an option that has no effect with a method.
    """
    for ratio in ratios:
        if not 1.0 < ratio <= 1_000.0:
            raise ConfigError(f"a compression is dense bytes over sparse bytes, more than 1: got {ratio:g}")
    if ratios and "budget" in overrides:
        raise ConfigError("the compression decides the budget: give one of the two")
    made = []
    for name in dict.fromkeys(name for given in names for name in (METHODS if given == ALL else (given,))):
        if name not in METHODS:
            hint = " (the preset of that name is the method original)" if name == "published" else ""
            raise ConfigError(f"methods are {', '.join([*METHODS, ALL, PUBLISHED])}: got {shown(name)}{hint}")
        options = METHODS[name] | dict(overrides)
        if "full_layers" in overrides:
            options.pop("num_full_layers", None)
        made += at_ratios(name, options, ratios)
    return made


def at_ratios(name: str, options: Mapping[str, Any], ratios: Sequence[float]) -> list[Method]:
    """One set of options at each ratio, or as it is where there is none; the options are checked."""
    try:
        SparseKVConfig.from_dict(options)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not ratios:
        return [Method(name=name, options=options)]
    return [Method(name=f"{name}-{ratio:g}x", options=options, ratio=ratio) for ratio in ratios]


def published_configs(num_layers: int) -> list[Method]:
    """The published table's shape, scaled to a model: so many of its layers are window layers, with such budgets.

    Args:
        num_layers: of the model; the counts for 32 are taken in proportion.
    Source: Novita's table of Llama-3.1-8B with 22, 26 and 31 of 32 window layers and budgets of 1536, 1280 and 1024
        tokens. Prompts differ in length here, so a budget is the fraction that it is of `PUBLISHED_LENGTH`.
    """
    made = {}
    for windows in PUBLISHED_WINDOW_LAYERS:
        num_full = max(round((PUBLISHED_LAYERS - windows) * num_layers / PUBLISHED_LAYERS), 1)
        for budget in PUBLISHED_BUDGETS:
            if num_full < num_layers:
                name = f"published-{num_layers - num_full}of{num_layers}-{budget}"
                made[name] = {"num_full_layers": num_full, "budget": budget / PUBLISHED_LENGTH}
    return [Method(name=name, options=options) for name, options in made.items()]


def fit_budget(
    options: Mapping[str, Any],
    shape: ModelShape,
    prompts: Sequence[Sequence[int]],
    ratio: float,
    *,
    element_bytes: int,
) -> SparseKVConfig:
    """Options with the largest budget, a fraction of the prompt, at which the bytes meet a ratio.

    The bytes are the plan's, which are the measured ones: positions, scores and tables count, and so do full layers,
    whose share the window layers make up for.

    Args:
        options: of SparseKVConfig, without a budget.
        shape: of the model.
        prompts: lengths of the compressed prompts in tokens, one list for each row of a table: the ratio holds for the
            sum of each.
        ratio: bytes of a dense cache over bytes of this one.
        element_bytes: size of one key or value element.
    Raises:
        ConfigError: no budget is small enough; says which ratio is possible.
    """

    def compression(step: int) -> float:
        plan = LayerPlan.build(SparseKVConfig.from_dict({**options, "budget": step / _STEPS}), shape)
        sparse = {n: _plan_bytes(plan, n, element_bytes) for n in {n for lengths in prompts for n in lengths}}
        return min(
            sum(plan.dense_bytes(n, element_bytes=element_bytes) for n in lengths) / sum(sparse[n] for n in lengths)
            for lengths in prompts
        )

    possible = compression(1)
    if possible < ratio:
        config = SparseKVConfig.from_dict(options)
        full = LayerPlan.build(config, shape).num_full_layers
        raise ConfigError(
            f"{ratio:g}x is not possible, at most {possible:.2f}x: {full} of {shape.num_layers} layers keep "
            f"everything, the others at least {config.num_protected} tokens of each prompt, which has "
            f"{min(map(min, prompts))} to {max(map(max, prompts))}. Give fewer full layers or longer prompts"
        )
    low, high = 1, _STEPS  # compression(low) is enough; what keeps all, and positions beside it, is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if compression(middle) >= ratio else (low, middle)
    return SparseKVConfig.from_dict({**options, "budget": low / _STEPS})


def _plan_bytes(plan: LayerPlan, length: int, element_bytes: int) -> int:
    """`plan.total_bytes`, equal layers counted once: a search asks often."""
    alike = Counter((spec.is_full, spec.budget) for spec in plan.layers)
    first = {(spec.is_full, spec.budget): spec.layer_idx for spec in reversed(plan.layers)}
    return sum(n * plan.layer_bytes(first[key], length, element_bytes=element_bytes) for key, n in alike.items())
