"""What no picture can show is refused by name, and what is small or strange is drawn whole and without a warning."""

from dataclasses import replace

import pytest
import torch

from hf_sparsekv import LayerPlan, SparseKVConfig, plots
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.profile import (
    EngineBlocks,
    HeadProfile,
    LayerProfile,
    Peak,
    Profile,
    RequestBlocks,
    Selection,
    Surface,
)

pytest.importorskip("matplotlib", reason="plots need the extra `plots`")

NAN = float("nan")


def selection(num_layers=3, num_tokens=40):
    scores = torch.rand(num_layers, 2, num_tokens)
    return Selection(scores, scores > 0.5)


def layer_plan(num_layers):
    shape = ModelShape(num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=16)
    return LayerPlan.build(SparseKVConfig(budget=100), shape)


def profile(*, error=0.1, peak=5.0, num_layers=1):
    head = HeadProfile(entropy=1, sink_mass=0, local_mass=0, best_mass=(1,), kept_mass=(1,), output_error=(0.2,))
    peaks = () if peak is None else (Peak(text=0, token=0, channel=0, magnitude=peak),)
    layer = LayerProfile(
        layer_idx=0,
        median_magnitude=1.0,
        peaks=peaks,
        num_massive=0,
        output_error=(error,),
        residual_error=(0.1,),
        logit_kl=None,
        heads=(head, head),
    )
    shape = ModelShape(num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=16)
    facts = {"prompt_length": 100, "num_held_out": 8, "num_texts": 1, "local_window": 8, "budgets": (40,)}
    layers = tuple(replace(layer, layer_idx=i) for i in range(num_layers))
    return Profile(shape=shape, config=SparseKVConfig(), layers=layers, **facts)


def looks():
    request = RequestBlocks(tables=((1,), (2,)), staging=((), ()), positions=(None, torch.tensor([[0]])))
    return [EngineBlocks(num_blocks=4, num_free=1, num_waiting=0, requests={"a": request})]


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: plots.activation_surface("x"), InputError, "surface must be a hf_sparsekv Surface: got 'x'"),
        (lambda: plots.activation_surface(Surface(0, torch.rand(1, 9), 1, 1)), InputError, "two tokens and two chan"),
        (lambda: plots.activation_surface(Surface(0, torch.full((3, 3), NAN), 1, 1)), InputError, "9 of 9 magnitudes"),
        (lambda: plots.attention_patterns(torch.zeros(0, 4, 4), 9), InputError, "there are no weights to draw"),
        (lambda: plots.attention_patterns(torch.full((1, 2, 2), NAN), 9), InputError, "4 of 4 weights are NaN"),
        (lambda: plots.attention_patterns(torch.rand(1, 2, 2), 0), ConfigError, "num_tokens must be an int from 1"),
        (lambda: plots.score_map(None, ["a"]), InputError, "selection must be a hf_sparsekv Selection: got None"),
        (
            lambda: plots.score_map(replace(selection(), scores=torch.full((3, 2, 40), NAN)), ["a"] * 40),
            InputError,
            "240 of 240 scores are NaN or infinite",
        ),
        (lambda: plots.kept_map(selection(num_tokens=0)), InputError, "there are no positions to draw"),
        (lambda: plots.layer_errors(profile(error=NAN)), ConfigError, "layer 0 of the profile has nan where"),
        (lambda: plots.layer_errors(layer_plan(2)), InputError, "profile must be a hf_sparsekv Profile"),
        (lambda: plots.layer_magnitudes(profile(peak=NAN)), ConfigError, "layer 0 of the profile has nan where"),
        (lambda: plots.layer_magnitudes(profile(peak=None)), InputError, "no peaks of layer 0: measure the model"),
        (lambda: plots.layer_budgets({}, 10), InputError, "no plan to draw"),
        (lambda: plots.layer_budgets({"a": layer_plan(2)}, 0), ConfigError, "length must be an int from 1"),
        (
            lambda: plots.layer_budgets({"a": layer_plan(5), "b": layer_plan(2)}, 900),
            InputError,
            r"different models, they have \{'a': 5, 'b': 2\} layers",
        ),
        (lambda: plots.stored_over_time(looks(), "a", 2), ConfigError, "layer_idx must be an int from 0 to 1: got 2"),
        (lambda: plots.stored_over_time(looks(), "a", -1), ConfigError, "layer_idx must be an int from 0 to 1: got -1"),
    ],
)
def test_what_cannot_be_shown_is_said(draw, error, message):
    with pytest.raises(error, match=message):
        draw()


def ticks(axis):
    """Labels of an axis' ticks that lie in the picture."""
    low, high = sorted(axis.get_view_interval())
    return [
        label.get_text()
        for place, label in zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        if low <= place <= high
    ]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.kept_map(selection(num_layers=1)),
        lambda: plots.score_map(selection(num_layers=1), ["a"] * 40),
    ],
)
def test_one_layer_has_one_tick(draw):
    figure = draw()
    figure.canvas.draw()
    assert ticks(figure.axes[0].yaxis) == ["0"]


def test_plans_of_one_layer_are_points():
    figure = plots.layer_budgets({"a": layer_plan(1)}, 1000)
    figure.canvas.draw()
    (line,) = figure.axes[0].lines
    assert line.get_marker() == "."
    assert ticks(figure.axes[0].xaxis) == ["0"]


@pytest.mark.parametrize("num_layers", [1, 2, 30])
@pytest.mark.parametrize("draw", ["attention_patterns", "kept_map"])
def test_no_label_is_cut(draw, num_layers):
    if draw == "kept_map":
        figure = plots.kept_map(selection(num_layers))
    else:
        figure = plots.attention_patterns(torch.rand(num_layers, 4, 4), 400)
    figure.canvas.draw()
    bar = figure.axes[-1]
    label = bar.yaxis.label.get_window_extent()
    assert figure.bbox.y0 <= label.y0
    assert label.y1 <= figure.bbox.y1
    assert label.x1 <= figure.bbox.x1


def test_text_in_any_script_is_drawn_without_a_warning():
    """Warnings are errors here."""
    figure = plots.score_map(selection(num_tokens=5), ["\u6f22\u5b57", " and", " \u05d0\u05d1", "\U0001f600", "\ufffd"])
    figure.canvas.draw()
    lower = figure.axes[1]
    assert [patch.get_width() for patch in lower.patches] == [4, 4, 3, 2, 1]


def test_wide_characters_take_two_cells_of_a_line():
    lower = plots.score_map(selection(num_tokens=60), ["\u6f22\u5b57"] * 60).axes[1]
    assert max(patch.get_x() + patch.get_width() for patch in lower.patches) <= plots.LINE_CHARACTERS
    assert len({patch.get_y() for patch in lower.patches}) == 3
