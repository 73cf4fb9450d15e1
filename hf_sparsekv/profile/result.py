"""Profile: what was measured of a model, frozen, and as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any, Self

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.option_values import parse_json_object
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.scorers.checks import check_int

FORMAT = 1
_WHAT = "a profile (as hf_sparsekv.profile.measure makes it)"

Curve = tuple[float, ...]
"""One number for each budget of the profile, in its order."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One of the largest entries of the residual stream."""

    text: int
    """Which of the measured texts."""
    token: int
    """Position in it."""
    channel: int
    magnitude: float


@dataclass(frozen=True, kw_only=True)
class HeadProfile:
    """One KV head: means over the rows after the prompt, over the texts, and over the query heads of its group."""

    entropy: float
    """Of a row's softmax weights, nats."""
    sink_mass: float
    """Softmax weight on the sink tokens, in [0, 1]."""
    local_mass: float
    """Softmax weight on the last `local_window` tokens, the row's own included."""
    best_mass: Curve
    """Weight that remains when a row keeps, of the prompt, its own best C tokens: no selection of C keeps more."""
    kept_mass: Curve
    """Weight that remains when it keeps what the scorer selected at the prompt's end."""
    output_error: Curve
    """Relative L2 error of the head's attention output with that selection: |cut - dense| / |dense|, mean over rows."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer; means as in `HeadProfile`."""

    layer_idx: int
    median_magnitude: float
    """Of the residual stream's entries that the layer reads, mean over texts."""
    peaks: tuple[Peak, ...]
    """Its largest entries, one a text and token, largest first."""
    num_massive: int
    """Entries of all texts above 100 and 1000 times the median (Sun et al. 2024, arXiv 2402.17762, section 2)."""
    output_error: Curve
    """As a head's, over all heads together."""
    residual_error: Curve
    """What the error adds to the residual stream, relative to the stream behind the layer's attention."""
    logit_kl: Curve | None
    """Kullback-Leibler divergence, nats a token, of the logits when this layer alone is cut; None if not measured."""
    heads: tuple[HeadProfile, ...]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on some texts, see `measure`."""

    shape: ModelShape
    config: SparseKVConfig
    """Whose scorer selected; its budgets and full layers took no part."""
    prompt_length: int
    """Tokens of each text before the selection."""
    num_held_out: int
    """Tokens after it: the rows of every mean."""
    num_texts: int
    local_window: int
    budgets: tuple[int, ...]
    """Tokens kept of the prompt, ascending; what follows the prompt is kept besides."""
    layers: tuple[LayerProfile, ...]
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Versions and the like, JSON-able; nothing depends on it."""

    def __post_init__(self) -> None:
        """A profile may come from a file: it must be whole.

        Raises:
            ConfigError: a layer, a head or a point of a curve is missing, or a number that no measurement has.
        """
        for name in ("prompt_length", "num_held_out", "num_texts", "local_window"):
            check_int(name, getattr(self, name), at_least=1)
        if len(self.layers) != self.shape.num_layers:
            raise ConfigError(f"the profile has {len(self.layers)} layers, its model {self.shape.num_layers}")
        for budget in self.budgets:
            check_int("a budget of the profile", budget, at_least=1, at_most=self.prompt_length - 1)
        if not self.budgets or list(self.budgets) != sorted(set(self.budgets)):
            raise ConfigError(f"the profile's budgets must ascend: got {shown(self.budgets)}")
        for i, layer in enumerate(self.layers):
            if layer.layer_idx != i:
                raise ConfigError(f"layer {i} of the profile says it is layer {shown(layer.layer_idx)}")
            curves = [layer.output_error, layer.residual_error, layer.logit_kl]
            curves += [c for head in layer.heads for c in (head.best_mass, head.kept_mass, head.output_error)]
            if len(layer.heads) != self.shape.num_kv_heads:
                raise ConfigError(f"layer {layer.layer_idx} of the profile has {len(layer.heads)} heads")
            if any(curve is not None and len(curve) != len(self.budgets) for curve in curves):
                raise ConfigError(
                    f"layer {layer.layer_idx} of the profile lacks points for {len(self.budgets)} budgets"
                )
            numbers = [layer.median_magnitude, *(peak.magnitude for peak in layer.peaks)]
            numbers += [n for head in layer.heads for n in (head.entropy, head.sink_mass, head.local_mass)]
            numbers += [n for curve in curves if curve is not None for n in curve]
            odd = [n for n in numbers if isinstance(n, bool) or not isinstance(n, (int, float)) or not isfinite(n)]
            if odd:
                raise ConfigError(
                    f"layer {layer.layer_idx} of the profile has {shown(odd[0])} where a finite number must "
                    "stand: a model that overflows in its dtype gives such, measure it in bfloat16 or float32"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for `from_dict`."""
        values = {name: getattr(self, name) for name in ("prompt_length", "num_held_out", "num_texts", "local_window")}
        return {
            "format": FORMAT,
            "shape": asdict(self.shape),
            "config": self.config.to_dict(must_be_registered=False),
            **values,
            "budgets": list(self.budgets),
            "layers": [asdict(layer) for layer in self.layers],
            "facts": dict(self.facts),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`.

        Raises:
            ConfigError: no JSON, an entry that is missing or unknown, or what makes no profile.
        """
        values = parse_json_object(text, _WHAT)
        form = values.pop("format", None)
        if form != FORMAT:
            raise ConfigError(f"not {_WHAT}: format is {shown(form)}, this release reads {FORMAT}")
        known = {f.name for f in fields(cls)}
        for what, names in (("lacks", known - {"facts"} - set(values)), ("has an unknown", set(values) - known)):
            if names:
                raise ConfigError(f"not {_WHAT}: it {what} {shown(min(names))}")
        try:
            values["shape"] = ModelShape(**values["shape"])
            values["config"] = SparseKVConfig.from_dict(values["config"])
            values["budgets"] = tuple(values["budgets"])
            values["layers"] = tuple(_layer(layer) for layer in values["layers"])
            return cls(**values)
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ConfigError(f"not {_WHAT}: {error}") from error


def _layer(values: dict[str, Any]) -> LayerProfile:
    rest = dict(values)
    peaks = tuple(Peak(**peak) for peak in rest.pop("peaks"))
    heads = tuple(HeadProfile(**_with_tuples(head)) for head in rest.pop("heads"))
    return LayerProfile(peaks=peaks, heads=heads, **_with_tuples(rest))


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
