"""Massive activations: where the residual stream is larger than anywhere else, by token and channel.

Source: Sun et al. 2024, Massive Activations in Large Language Models (arXiv 2402.17762).

Shapes: B text, T token, E channel.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv.hf.models import text_config
from hf_sparsekv.hf.observe import DenseRun, observed
from hf_sparsekv.profile.result import Peak
from hf_sparsekv.profile.texts import one_text
from hf_sparsekv.scorers.checks import check_int

MASSIVE_MAGNITUDE = 100.0
MASSIVE_RATIO = 1000.0
NUM_PEAKS = 5
MAX_CELLS = 128
"""Rows and columns of a surface at most."""


class ActivationStats:
    """What is kept of one layer's input over several texts."""

    def __init__(self) -> None:
        self._medians: list[float] = []
        self._peaks: list[Peak] = []
        self.num_massive = 0

    def add(self, hidden_TE: Tensor) -> None:
        """Take the next text's residual stream."""
        text = len(self._medians)
        magnitude_TE = hidden_TE.float().abs()
        median = float(magnitude_TE.flatten().median())
        self._medians.append(median)
        self.num_massive += int(((magnitude_TE > MASSIVE_MAGNITUDE) & (magnitude_TE > MASSIVE_RATIO * median)).sum())
        largest_T, channel_T = magnitude_TE.max(dim=1)
        top = largest_T.topk(min(NUM_PEAKS, len(largest_T)))
        for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            self._peaks.append(Peak(text=text, token=token, channel=int(channel_T[token]), magnitude=value))

    @property
    def median_magnitude(self) -> float:
        """Mean over texts."""
        return sum(self._medians) / len(self._medians)

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """Largest first."""
        return tuple(sorted(self._peaks, key=lambda peak: -peak.magnitude)[:NUM_PEAKS])


@dataclass(frozen=True)
class Surface:
    """Magnitude over tokens and channels, the largest of each cell."""

    layer_idx: int
    magnitude: Tensor
    """fp32 [rows, columns] on the CPU."""
    tokens_per_row: int
    channels_per_column: int


def activation_surface(model: Any, ids: Tensor, layer_idx: int) -> Surface:
    """The residual stream that a layer reads, as a picture shows it.

    Args:
        model: a causal language model.
        ids: int64 [1, T].
        layer_idx: which layer.
    Raises:
        ModelError, InputError: no such model, or not one text that it can read.
        ConfigError: no such layer.
    """
    text = one_text(model, ids)
    check_int("layer_idx", layer_idx, at_least=0, at_most=text_config(model.config).num_hidden_layers - 1)
    found: list[Surface] = []

    def look(layer: int, hidden: Tensor) -> None:
        if layer == layer_idx:
            magnitude_TE = hidden[0].float().abs()
            rows, columns = (max(1, -(-size // MAX_CELLS)) for size in magnitude_TE.shape)
            found.append(Surface(layer, _largest_of_cells(magnitude_TE, rows, columns).cpu(), rows, columns))

    with observed(model, on_hidden=look):
        DenseRun(model).read(text)
    return found[0]


def _largest_of_cells(values_TE: Tensor, rows: int, columns: int) -> Tensor:
    pad = (0, -values_TE.shape[1] % columns, 0, -values_TE.shape[0] % rows)
    padded = torch.nn.functional.pad(values_TE, pad)
    cells = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    largest: Tensor = cells.amax(dim=(1, 3))
    return largest
