"""LayerPlan: which layer of a model keeps everything, which keeps a budget, and what that costs in bytes.

The arithmetic here is the promise that `cache.report()` is measured against: a window layer stores, for each request
and slot, key, value, position and score, and for each request its tables; a full layer stores keys and values in
blocks, see `column_capacity`.
"""

import json
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Self

from hf_sparsekv.budget_plan import BudgetPlan
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.option_values import parse_json_object
from hf_sparsekv.scorers.checks import MAX_COUNT, check_flag, check_int

FULL_LAYER_BLOCK = 64
"""Tokens by which a full layer's storage grows."""
SHORT_LAYER_BLOCK = 16
"""The same while it is short: what is reserved and not used then weighs more than copying a few tokens."""
MAX_SHORT_COLUMNS = 256
"""Tokens up to which a layer is short."""
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
    num_ranks: int = 1
    """That share the heads of the model, of which these are one rank's."""

    def __post_init__(self) -> None:
        """Every number must be positive, and the heads must divide."""
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
                raise ConfigError(f"{name} must be a positive int, at most {MAX_COUNT}: got {shown(value)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")

    def split(self, num_ranks: int) -> "ModelShape":
        """The part of one of several ranks that share the heads; `num_ranks` divides the KV heads."""
        assert self.num_kv_heads % num_ranks == 0, f"{self.num_kv_heads} KV heads for {num_ranks} ranks"
        heads, kv_heads = self.num_heads // num_ranks, self.num_kv_heads // num_ranks
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, num_ranks=self.num_ranks * num_ranks)

    @property
    def whole(self) -> "ModelShape":
        """Of the model that this is one rank's part of."""
        heads, kv_heads = self.num_heads * self.num_ranks, self.num_kv_heads * self.num_ranks
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, num_ranks=1)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer keeps of a request."""

    layer_idx: int
    is_full: bool
    budget: int | float | None
    """Tokens, or the fraction of the prompt; None for a full layer."""
    num_protected: int
    """Sinks and recent tokens: the floor of a fraction."""

    def __post_init__(self) -> None:
        """Every number must be possible: a plan may come from a file."""
        check_int("layer_idx", self.layer_idx, at_least=0)
        check_flag("is_full", self.is_full)
        check_int("num_protected", self.num_protected, at_least=1)
        if self.is_full != (self.budget is None):
            raise ConfigError(f"a full layer has no budget, any other has one: got {shown(self)}")
        if isinstance(self.budget, float):
            if not 0.0 < self.budget <= 1.0:
                raise ConfigError(f"budget must be a fraction in (0, 1] or whole tokens as an int: got {self.budget}")
        elif self.budget is not None:
            check_int("budget", self.budget, at_least=self.num_protected)

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
    chunk_tokens: int | None = None
    """Tokens of a prompt after which a window layer selects (prefill="bounded"); None = at the prompt's end only."""

    def __post_init__(self) -> None:
        """There must be one entry for each layer of the model, in order."""
        check_flag("grows", self.grows)
        if self.chunk_tokens is not None:
            check_int("chunk_tokens", self.chunk_tokens, at_least=1)
        if [spec.layer_idx for spec in self.layers] != list(range(self.shape.num_layers)):
            raise ConfigError(
                f"a plan lists the layers 0 to {self.shape.num_layers - 1}, each once and in order: got "
                f"{shown([spec.layer_idx for spec in self.layers])}"
            )

    @classmethod
    def build(cls, config: SparseKVConfig, shape: ModelShape) -> Self:
        """Lay a configuration out over a model.

        Raises:
            ConfigError: a layer index or a count beyond the model, a budget list of the wrong length, a plan of another
                model, or something else in the place of either argument.
        """
        for name, value, kind in (("config", config, SparseKVConfig), ("shape", shape, ModelShape)):
            if not isinstance(value, kind):
                raise ConfigError(f"{name} must be a {kind.__name__}: got {shown(value)}")
        if isinstance(config.plan, BudgetPlan):
            whole = shape.whole
            config.plan.check_shape(
                num_layers=whole.num_layers,
                num_heads=whole.num_heads,
                num_kv_heads=whole.num_kv_heads,
                head_dim=whole.head_dim,
            )
        full = _full_layers(config, shape.num_layers)
        windows = [i for i in range(shape.num_layers) if i not in full]
        budgets = dict(zip(windows, _window_budgets(config, len(windows)), strict=True))
        layers = tuple(
            LayerSpec(layer_idx=i, is_full=i in full, budget=budgets.get(i), num_protected=config.num_protected)
            for i in range(shape.num_layers)
        )
        grows = config.decode_mode == "grow"
        return cls(shape=shape, layers=layers, grows=grows, chunk_tokens=config.chunk_tokens if windows else None)

    def prefill_tokens(self, layer_idx: int, prompt_length: int) -> int:
        """The most tokens that a layer holds at a time while a prompt is read, in chunks if it is bounded."""
        spec, chunk = self.layers[layer_idx], self.chunk_tokens
        if spec.is_full or chunk is None or prompt_length <= chunk:
            return prompt_length
        before_last = (prompt_length - 1) // chunk * chunk  # of the last two chunks the first may be the longer one
        kept = [min(seen, spec.kept_tokens(prompt_length)) for seen in (before_last - chunk, before_last)]
        return max(kept[0] + chunk, kept[1] + prompt_length - before_last)

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
        Raises:
            ConfigError: a length that is no whole number of tokens, or no such layer.
        """
        _check_lengths(length, prompt_length)
        check_int("layer_idx", layer_idx, at_least=0, at_most=len(self.layers) - 1)
        spec, shape = self.layers[layer_idx], self.shape
        kv_bytes = 2 * shape.num_kv_heads * shape.head_dim * element_bytes
        budget = None if spec.budget is None else spec.kept_tokens(prompt_length or length)
        if budget is None:
            return batch_size * column_capacity(length) * kv_bytes
        if length <= budget:  # nothing evicted yet: plain columns and their scores
            return batch_size * column_capacity(length) * (kv_bytes + shape.num_kv_heads * SCORE_BYTES)
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
        _check_lengths(length)
        shape = self.shape
        return batch_size * length * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * element_bytes

    def table(self, length: int, *, element_bytes: int) -> list[dict[str, Any]]:
        """One row a layer: index, kind, tokens kept and bytes at `length` tokens of prompt."""
        _check_lengths(length)
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
        share = f"{total / dense:.1%} of " if dense else ""
        against = f"{share}dense {dense:,}, {length:,} tokens"
        lines.append(f"{'total':>9}  {'':<6}  {'':>8}  {total:>13,}  ({against})")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`.

        Raises:
            ConfigError: no JSON, an entry that is missing or unknown, or values that are no plan of one model.
        """
        values = parse_json_object(text, "a layer plan")
        try:
            shape = ModelShape(**values["shape"])
            layers = tuple(LayerSpec(**layer) for layer in values["layers"])
            chunk_tokens = values.get("chunk_tokens")
            return cls(shape=shape, layers=layers, grows=values["grows"], chunk_tokens=chunk_tokens)
        except (KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"not a layer plan: {error}") from error


def column_capacity(num_columns: int) -> int:
    """Columns that are reserved for so many tokens: whole blocks."""
    return _round_up(num_columns, SHORT_LAYER_BLOCK if num_columns <= MAX_SHORT_COLUMNS else FULL_LAYER_BLOCK)


def _check_lengths(length: int, prompt_length: int | None = None) -> None:
    check_int("length", length, at_least=0)
    if prompt_length is not None:
        check_int("prompt_length", prompt_length, at_least=0, at_most=length)


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
        return _linear(budget, max(budget / beta, 2 * budget - 1.0), num_windows)  # no layer keeps more than all
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
