"""Pictures of an engine's pool by what they hold, from looks made by hand; and of a profile's activations."""

import pytest
import torch

from hf_sparsekv import SparseKVConfig, plots
from hf_sparsekv.errors import InputError
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.profile import EngineBlocks, HeadProfile, LayerProfile, Peak, Profile, RequestBlocks

pytest.importorskip("matplotlib", reason="plots need the extra `plots`")


def look(*, num_blocks=8, **requests):
    held = sum(sum(request.blocks_of_layers) for request in requests.values())
    return EngineBlocks(num_blocks=num_blocks, num_free=num_blocks - 1 - held, num_waiting=0, requests=requests)


def request(*tables, staging=((), ()), positions=None):
    return RequestBlocks(tables=tables, staging=staging, positions=positions)


LOOKS = [
    look(a=request((1,), (2,), staging=((), (5, 6)))),
    look(a=request((1, 3), (2,)), b=request((7,), (4,))),
    look(b=request((7,), (4,))),
    look(a=request((5,), (6,))),
]
"""`a` stages two blocks, grows by one, is away for a step and comes back in other blocks."""


def shown_in(figure):
    return figure.axes[0].images[0].get_array().tolist()


def test_every_block_has_its_owner_at_every_step():
    figure = plots.pool_over_time(LOOKS)
    free, a, b = -1, 0, 1
    assert shown_in(figure) == [
        [free, free, free, free],
        [a, a, free, free],
        [a, a, free, free],
        [free, a, free, free],
        [free, b, b, free],
        [a, free, free, a],
        [a, free, free, a],
        [free, b, b, free],
    ]
    axis = figure.axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("engine step", "block of the pool")
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["free", "a", "b"]
    drawn = axis.images[0].cmap(axis.images[0].norm([free, a, b]))
    patches = [patch.get_facecolor() for patch in axis.get_legend().get_patches()]
    assert [tuple(colour) for colour in drawn] == patches


def test_blocks_of_a_request_by_layer_and_step():
    figure = plots.layer_blocks(LOOKS, "a")
    assert shown_in(figure) == [[1, 2, 0, 1], [3, 1, 0, 1]]
    assert figure.axes[0].images[0].get_extent() == [-0.5, 3.5, 1.5, -0.5]
    assert figure.axes[0].get_title() == "request a"
    assert plots.layer_blocks(LOOKS, "b").axes[0].images[0].get_extent() == [0.5, 2.5, 1.5, -0.5]


def test_what_a_layer_holds_of_a_request():
    first, then = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[0, 2, 3], [0, 1, 3]])
    looks = [
        look(a=request((1,), (2,))),
        look(a=request((1,), (2,), positions=(None, first))),
        look(a=request((1,), (2,), positions=(None, then))),
    ]
    figure = plots.stored_over_time(looks, "a", 1)
    assert shown_in(figure) == [[1, 1], [1, 0.5], [1, 0.5], [0, 1]]
    assert figure.axes[0].images[0].get_extent() == [0.5, 2.5, 3.5, -0.5]
    assert figure.axes[1].get_ylabel() == "share of KV heads that hold a position"


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(InputError, match="no look at an engine"):
        plots.pool_over_time([])
    with pytest.raises(InputError, match=r"no look shows request 'c': there are \['a', 'b'\]"):
        plots.layer_blocks(LOOKS, "c")
    with pytest.raises(InputError, match="layer 1 shows no positions of request 'a'"):
        plots.stored_over_time(LOOKS, "a", 1)


@pytest.mark.parametrize("looks", [None, "looks", LOOKS[0], [LOOKS[0], {}]])
def test_what_is_no_look_is_refused(looks):
    calls = (plots.pool_over_time, lambda x: plots.layer_blocks(x, "a"), lambda x: plots.stored_over_time(x, "a", 0))
    for call in calls:
        with pytest.raises(InputError, match=r"looks? must be a .*EngineBlocks: got"):
            call(looks)


def test_magnitudes_and_masses_by_layer():
    def layer(i):
        curve = {"best_mass": (1.0,), "kept_mass": (1.0,), "output_error": (0.1,)}
        heads = tuple(HeadProfile(entropy=1, sink_mass=0.1 * i + m, local_mass=0.5, **curve) for m in (0.0, 0.2))
        peak = Peak(text=0, token=0, channel=1, magnitude=100.0 * (i + 1))
        errors = {"output_error": (0.1,), "residual_error": (0.1,), "logit_kl": None}
        return LayerProfile(layer_idx=i, median_magnitude=2.0, peaks=(peak,), num_massive=0, heads=heads, **errors)

    shape = ModelShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
    facts = {"prompt_length": 100, "num_held_out": 8, "num_texts": 1, "local_window": 8, "budgets": (40,)}
    profile = Profile(shape=shape, config=SparseKVConfig(), layers=tuple(map(layer, range(3))), **facts)
    upper, lower = plots.layer_magnitudes(profile).axes
    assert [line.get_ydata().tolist() for line in upper.lines] == [[100, 200, 300], [2, 2, 2]]
    assert lower.lines[0].get_ydata().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert [text.get_text() for text in lower.get_legend().get_texts()] == ["first 4 tokens", "last 8 tokens"]
    assert upper.get_yscale() == "log"
