"""Tiny tensors of one layer, as a scorer gets them."""

from collections.abc import Callable

import pytest
import torch

from hf_sparsekv.scorers import ScoreInputs

MakeInputs = Callable[..., ScoreInputs]


@pytest.fixture
def make_inputs() -> MakeInputs:
    """`make_inputs(batch=2, heads=6, kv_heads=3, rows=4, keys=11, dim=8, **fields)`; positions as in a first prompt."""

    def make(
        batch: int = 2, heads: int = 6, kv_heads: int = 3, rows: int = 4, keys: int = 11, dim: int = 8, **fields: object
    ) -> ScoreInputs:
        rng = torch.Generator().manual_seed(1)
        values: dict[str, object] = {
            "keys": torch.randn(batch, kv_heads, keys, dim, generator=rng),
            "values": torch.randn(batch, kv_heads, keys, dim, generator=rng),
            "queries": torch.randn(batch, heads, rows, dim, generator=rng),
            "scale": 0.6,
            "row_reduction": "mean",
            "group_reduction": "mean",
            "num_seen": keys,
            "inv_freq": 1.0 / 100.0 ** (torch.arange(0, dim, 2) / dim),
            "layer_idx": 3,
        }
        return ScoreInputs(**(values | fields))  # type: ignore[arg-type]

    return make
