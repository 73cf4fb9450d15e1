"""LayerPlan: which layer of a model keeps everything, which keeps a budget, and what that costs in bytes.

The arithmetic here is the promise that `cache.report()` is measured against: a window layer stores, for each request
and slot, key, value, position and score, and for each request its tables; a full layer stores keys and values in
blocks of `FULL_LAYER_BLOCK` tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Self

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError

FULL_LAYER_BLOCK = 64
"""Tokens by which a full layer's storage grows."""
POSITION_BYTES = 4
SCORE_BYTES = 4
LENGTH_BYTES = 4
VICTIM_BYTES = 8
DEFAULT_PYRAMID_BETA = 20.0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The few numbers of a model that decide what its cache costs."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        """Every number must be positive, and the heads must divide."""
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive int: got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer keeps of a request."""

    layer_idx: int
    is_full: bool
    budget: int | float | None
    """Tokens, or the fraction of the prompt; None for a full layer."""
    num_protected: int
    """Sinks and recent tokens: the floor of a fraction."""

    def kept_tokens(self, prompt_length: int) -> int:
        """Slots that the layer has for a request with this prompt."""
        if self.budget is None:
            return prompt_length
        if isinstance(self.budget, float):
            # 0.07 * 100 is 7.000000000000001 in binary: that is 7 tokens, not 8.
            return max(ceil(round(self.budget * prompt_length, 6)), self.num_protected)
        return self.budget


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The layers of one model, bottom first."""

    shape: ModelShape
    layers: tuple[LayerSpec, ...]
    grows: bool = False
    """Whether window layers keep every token after the prompt (decode="grow")."""

    @classmethod
    def build(cls, config: SparseKVConfig, shape: ModelShape) -> Self:
        """Lay a configuration out over a model.

        Raises:
            ConfigError: a layer index or a count beyond the model, or a budget list of the wrong length.
        """
        full = _full_layers(config, shape.num_layers)
        windows = [i for i in range(shape.num_layers) if i not in full]
        budgets = dict(zip(windows, _window_budgets(config, len(windows)), strict=True))
        layers = tuple(
            LayerSpec(layer_idx=i, is_full=i in full, budget=budgets.get(i), num_protected=config.num_protected)
            for i in range(shape.num_layers)
        )
        return cls(shape=shape, layers=layers, grows=config.decode_mode == "grow")

    @property
    def num_full_layers(self) -> int:
        """How many layers keep everything."""
        return sum(spec.is_full for spec in self.layers)

    def layer_bytes(
        self,
        layer_idx: int,
        length: int,
        *,
        element_bytes: int,
        prompt_length: int | None = None,
        batch_size: int = 1,
    ) -> int:
        """Bytes that a layer holds for requests of `length` tokens once decoding has begun.

        Args:
            layer_idx: which layer.
            length: tokens seen.
            element_bytes: size of one key or value element.
            prompt_length: of these, the prompt; fractions refer to it. Default: all.
            batch_size: requests of this length.
        """
        spec, shape = self.layers[layer_idx], self.shape
        kv_bytes = 2 * shape.num_kv_heads * shape.head_dim * element_bytes
        budget = None if spec.budget is None else spec.kept_tokens(prompt_length or length)
        if budget is None:
            return batch_size * _round_up(length, FULL_LAYER_BLOCK) * kv_bytes
        if length <= budget:  # nothing evicted yet: plain columns and their scores
            return batch_size * _round_up(length, FULL_LAYER_BLOCK) * (kv_bytes + shape.num_kv_heads * SCORE_BYTES)
        slots = budget + (_round_up(length - (prompt_length or length), FULL_LAYER_BLOCK) if self.grows else 0)
        per_slot = kv_bytes + shape.num_kv_heads * (POSITION_BYTES + SCORE_BYTES)
        tables = 3 * LENGTH_BYTES + shape.num_kv_heads * VICTIM_BYTES
        return batch_size * (slots * per_slot + tables)

    def total_bytes(
        self, length: int, *, element_bytes: int, prompt_length: int | None = None, batch_size: int = 1
    ) -> int:
        """Sum of `layer_bytes` over the layers."""
        return sum(
            self.layer_bytes(i, length, element_bytes=element_bytes, prompt_length=prompt_length, batch_size=batch_size)
            for i in range(len(self.layers))
        )

    def dense_bytes(self, length: int, *, element_bytes: int, batch_size: int = 1) -> int:
        """Bytes of the dense cache of the same requests: every key and value, nothing else."""
        shape = self.shape
        return batch_size * length * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * element_bytes

    def table(self, length: int, *, element_bytes: int) -> list[dict[str, Any]]:
        """One row a layer: index, kind, tokens kept and bytes at `length` tokens of prompt."""
        rows = []
        for spec in self.layers:
            rows.append(
                {
                    "layer": spec.layer_idx,
                    "kind": "full" if spec.is_full else "window",
                    "tokens": min(length, spec.kept_tokens(length)),
                    "bytes": self.layer_bytes(spec.layer_idx, length, element_bytes=element_bytes),
                }
            )
        return rows

    def describe(self, length: int, *, element_bytes: int) -> str:
        """`table` as text, with equal neighbours merged and the total against dense."""
        groups: list[tuple[int, int, dict[str, Any]]] = []
        for row in self.table(length, element_bytes=element_bytes):
            last = groups[-1] if groups else None
            if last and all(last[2][key] == row[key] for key in ("kind", "tokens", "bytes")):
                groups[-1] = (last[0], row["layer"], last[2])
            else:
                groups.append((row["layer"], row["layer"], row))
        lines = [f"{'layers':>9}  {'kind':<6}  {'tokens':>8}  {'bytes/layer':>13}"]
        for first, last_layer, row in groups:
            name = str(first) if first == last_layer else f"{first}-{last_layer}"
            lines.append(f"{name:>9}  {row['kind']:<6}  {row['tokens']:>8,}  {row['bytes']:>13,}")
        total = self.total_bytes(length, element_bytes=element_bytes)
        dense = self.dense_bytes(length, element_bytes=element_bytes)
        lines.append(f"{'total':>9}  {'':<6}  {length:>8,}  {total:>13,}  ({total / dense:.1%} of dense {dense:,})")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        try:
            values: Mapping[str, Any] = json.loads(text)
            shape = ModelShape(**values["shape"])
            layers = tuple(LayerSpec(**layer) for layer in values["layers"])
            return cls(shape=shape, layers=layers, grows=values["grows"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"not a layer plan: {error}") from error


def _full_layers(config: SparseKVConfig, num_layers: int) -> frozenset[int]:
    if config.full_layers is not None:
        beyond = [i for i in config.full_layers if i >= num_layers]
        if beyond:
            raise ConfigError(f"full_layers names layer {beyond[0]}, but the model has layers 0 to {num_layers - 1}")
        return frozenset(config.full_layers)
    count = config.num_full_layers or 0
    if count > num_layers:
        raise ConfigError(f"num_full_layers={count}, but the model has only {num_layers} layers")
    return frozenset(range(count))


def _window_budgets(config: SparseKVConfig, num_windows: int) -> list[int | float]:
    budget = config.budget
    if isinstance(budget, tuple):
        if len(budget) != num_windows:
            raise ConfigError(
                f"budget lists {len(budget)} layers, but {num_windows} layers of this model are window layers"
            )
        return list(budget)
    if config.budget_shape == "uniform" or num_windows < 2:
        return [budget] * num_windows
    beta = config.pyramid_beta or DEFAULT_PYRAMID_BETA
    if isinstance(budget, float):
        return _linear(budget, budget / beta, num_windows)
    free = budget - config.num_protected
    exact = _linear(float(free), free / beta, num_windows)
    return [config.num_protected + tokens for tokens in _whole(exact, free * num_windows)]


def _linear(mean: float, last: float, count: int) -> list[float]:
    """A falling line of `count` values with this mean that ends at `last`."""
    first = 2 * mean - last
    return [first + (last - first) * i / (count - 1) for i in range(count)]


def _whole(values: list[float], total: int) -> list[int]:
    """Whole numbers near `values` with exactly this sum (largest remainders get the leftover)."""
    floors = [int(v) for v in values]
    order = sorted(range(len(values)), key=lambda i: floors[i] - values[i])
    for i in order[: total - sum(floors)]:
        floors[i] += 1
    return floors


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
