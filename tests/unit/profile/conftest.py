"""A profile with given errors, for whoever only needs curves."""

from collections.abc import Callable, Sequence

import pytest

from hf_sparsekv import SparseKVConfig
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.profile import HeadProfile, LayerProfile, Profile

BUDGETS = (40, 80, 160, 320)


@pytest.fixture
def profile_of() -> Callable[[Sequence[Sequence[float]]], Profile]:
    """The builder: one curve of four points for each of four layers; everything else is of no account."""
    return _profile_of


def _profile_of(curves):
    shape = ModelShape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
    flat = (0.0,) * len(BUDGETS)
    head = HeadProfile(entropy=0, sink_mass=0, local_mass=0, best_mass=flat, kept_mass=flat, output_error=flat)
    layers = tuple(
        LayerProfile(
            layer_idx=i,
            median_magnitude=1.0,
            peaks=(),
            num_massive=0,
            output_error=tuple(reversed(curve)),
            residual_error=tuple(curve),
            logit_kl=None,
            heads=(head,) * shape.num_kv_heads,
        )
        for i, curve in enumerate(curves)
    )
    return Profile(
        shape=shape,
        config=SparseKVConfig(num_sink_tokens=4, num_recent_tokens=16, observation_window=16),
        prompt_length=640,
        num_held_out=8,
        num_texts=1,
        local_window=16,
        budgets=BUDGETS,
        layers=layers,
    )
