"""Pictures by what they hold: axes named with their units, the data that was given, and nothing left in pyplot."""

import sys

import pytest
import torch

from hf_sparsekv import LayerPlan, SparseKVConfig, plots
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.profile import HeadProfile, LayerProfile, Profile, Selection, Surface

pytest.importorskip("matplotlib", reason="plots need the extra `plots`")

SHAPE = ModelShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)


def texts_of(axis):
    return [text.get_text() for text in axis.texts]


def selection(num_tokens=40):
    scores = torch.arange(3 * 2 * num_tokens, dtype=torch.float32).view(3, 2, num_tokens)
    kept = torch.zeros(3, 2, num_tokens, dtype=torch.bool)
    kept[0], kept[1, 0, 5], kept[2, :, 7] = True, True, True
    return Selection(scores, kept)


def test_a_surface_names_tokens_channels_and_the_peak():
    magnitude = torch.zeros(10, 6)
    magnitude[3, 4] = 1234.0
    figure = plots.activation_surface(Surface(2, magnitude, tokens_per_row=2, channels_per_column=8))
    axis = figure.axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_zlabel()) == ("channel", "token position", "magnitude")
    assert "before layer 2: largest 1,234" in figure.get_suptitle()
    low, high = axis.get_zlim()
    assert low <= 0
    assert high >= 1234
    assert axis.get_xlim()[1] >= 5 * 8
    assert axis.get_ylim()[1] >= 9 * 2


def test_every_layer_has_its_pattern():
    patterns = torch.rand(8, 4, 4)
    figure = plots.attention_patterns(patterns, 400)
    shown = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in shown] == [f"layer {i}" for i in range(8)]
    assert shown[5].images[0].get_array().flatten().tolist() == pytest.approx(patterns[5].flatten().tolist())
    assert shown[0].images[0].get_extent() == [0, 400, 400, 0]
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("key position, tokens", "row position, tokens")
    assert any("softmax weight" in axis.get_ylabel() for axis in figure.axes)


def test_scores_stand_over_their_text():
    tokens = [f"\u0120t{i}" for i in range(38)] + ["$a_b$", "x\n"]
    figure = plots.score_map(selection(), tokens, first=30)
    upper, lower = figure.axes[:2]
    assert (upper.get_xlabel(), upper.get_ylabel()) == ("position, tokens", "layer")
    ranks = upper.images[0].get_array()
    assert ranks.shape == (3, 10)
    assert ranks[0].tolist() == pytest.approx([i / 39 for i in range(30, 40)])
    assert "".join(texts_of(lower)) == "".join(f" t{i}" for i in range(30, 38)) + "$a_b$x\u21b5"
    assert len(lower.patches) == 10
    figure.canvas.draw()  # a dollar is a dollar


def test_long_text_goes_on_in_the_next_line():
    figure = plots.score_map(selection(), ["word" * 3] * 40)
    lower = figure.axes[1]
    assert sorted({patch.get_y() for patch in lower.patches}) == [0, 1, 2, 3, 4]
    assert max(patch.get_x() + patch.get_width() for patch in lower.patches) <= plots.LINE_CHARACTERS


@pytest.mark.parametrize(
    ("tokens", "stretch", "error", "message"),
    [
        (["a"] * 39, {}, InputError, "39 tokens of text for 40 scores"),
        (["a"] * 40, {"first": 40}, ConfigError, "got first=40, last=40"),
        (["a"] * 40, {"last": 41}, ConfigError, "got first=0, last=41"),
        (["a"] * 40, {"first": -1}, ConfigError, "got first=-1"),
    ],
)
def test_a_stretch_that_cannot_be_shown_is_refused(tokens, stretch, error, message):
    with pytest.raises(error, match=message):
        plots.score_map(selection(), tokens, **stretch)


def test_too_long_a_stretch_is_refused():
    with pytest.raises(ConfigError, match="a stretch of 1 to 600 of the 700 tokens"):
        plots.score_map(selection(700), ["a"] * 700)


def test_a_kept_map_shows_shares_of_heads():
    figure = plots.kept_map(selection())
    axis = figure.axes[0]
    shares = axis.images[0].get_array()
    assert shares[0].tolist() == [1.0] * 40
    assert (shares[1, 5], shares[2, 7], shares[2, 8]) == (0.5, 1.0, 0.0)
    assert axis.get_title() == f"{(80 + 1 + 2) / 240:.1%} of the keys and values are kept"
    assert figure.axes[1].get_ylabel() == "share of KV heads that keep a position"


def test_a_long_prompt_is_drawn_as_means_of_neighbours():
    figure = plots.kept_map(selection(4096))
    shares = figure.axes[0].images[0].get_array()
    assert shares.shape == (3, plots.MAX_COLUMNS)
    assert shares[2, 1] == pytest.approx(0.25)  # one of four neighbours
    assert figure.axes[0].images[0].get_extent()[1] == 4096


def profile():
    budgets = (40, 80)
    head = HeadProfile(
        entropy=1, sink_mass=0, local_mass=0, best_mass=(1, 1), kept_mass=(1, 1), output_error=(0.2, 0.1)
    )
    layers = tuple(
        LayerProfile(
            layer_idx=i,
            median_magnitude=1.0,
            peaks=(),
            num_massive=0,
            output_error=(0.5 - 0.1 * i, 0.1),
            residual_error=(0.1, 0.1),
            logit_kl=None,
            heads=(head, head),
        )
        for i in range(3)
    )
    facts = {"num_held_out": 8, "num_texts": 1, "local_window": 8}
    return Profile(shape=SHAPE, config=SparseKVConfig(), prompt_length=1000, budgets=budgets, layers=layers, **facts)


def test_errors_have_a_line_for_each_budget():
    axis = plots.layer_errors(profile()).axes[0]
    assert [line.get_label() for line in axis.lines] == ["40", "80"]
    assert axis.lines[0].get_ydata().tolist() == pytest.approx([0.5, 0.4, 0.3])
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("layer", "output error, |cut - dense| / |dense|")
    assert axis.get_legend().get_title().get_text() == "tokens kept\nof 1,000"


def test_plans_are_drawn_beside_each_other():
    config = SparseKVConfig(num_full_layers=1, budget=100)
    plans = {"one": LayerPlan.build(config, SHAPE), "two": LayerPlan.build(config.with_(budget=0.5), SHAPE)}
    axis = plots.layer_budgets(plans, 1000).axes[0]
    assert [list(line.get_ydata()) for line in axis.lines] == [[1000, 100, 100], [1000, 500, 500]]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["one", "two"]
    assert axis.get_ylabel() == "tokens kept of 1,000"


def test_pyplot_is_left_alone(tmp_path):
    plots.kept_map(selection()).savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r'pip install "hf-sparsekv\[plots\]"'):
        plots.kept_map(selection())
