"""Pictures of one prompt: what its layers read, where rows look, what is kept.

Shapes: L layer, K KV head, N token, B block.
"""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.plots.canvas import COLOURS, as_columns, check_kind, check_numbers, new_figure, whole_numbers
from hf_sparsekv.plots.text import draw_text, lines_of, readable
from hf_sparsekv.profile.activations import MAX_CELLS, Surface
from hf_sparsekv.profile.selection import Selection
from hf_sparsekv.scorers.checks import check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TEXT_TOKENS = 600
"""Beneath a heat map: more could not be read."""


def activation_surface(surface: Surface) -> "Figure":
    """The residual stream's magnitude over tokens and channels, the largest of each cell.

    Args:
        surface: of `hf_sparsekv.profile.activation_surface`.
    Raises:
        InputError: no surface, one of a single token or channel, or numbers that are not finite.
    """
    check_kind("surface", surface, Surface)
    check_numbers("magnitudes", surface.magnitude)
    if min(surface.magnitude.shape) < 2:
        raise InputError(f"a surface needs two tokens and two channels: got {list(surface.magnitude.shape)} cells")
    figure = new_figure(8.0, 5.4)
    axis: Any = figure.add_subplot(projection="3d")
    magnitude = surface.magnitude.numpy()
    tokens = np.arange(magnitude.shape[0]) * surface.tokens_per_row
    channels = np.arange(magnitude.shape[1]) * surface.channels_per_column
    grid = np.meshgrid(channels, tokens)
    axis.plot_surface(
        *grid, magnitude, rcount=MAX_CELLS, ccount=MAX_CELLS, cmap=COLOURS, linewidth=0, antialiased=False
    )
    axis.set_xlabel("channel")
    axis.set_ylabel("token position", labelpad=10)
    axis.set_zlabel("magnitude", labelpad=14)
    axis.tick_params(axis="z", pad=7)
    axis.set_box_aspect(None, zoom=0.95)
    figure.suptitle(f"residual stream before layer {surface.layer_idx}: largest {magnitude.max():,.0f}")
    return figure


def attention_patterns(patterns_LBB: Tensor, num_tokens: int) -> "Figure":
    """Where every layer's rows look, small pictures side by side.

    Args:
        patterns_LBB: of `hf_sparsekv.profile.attention_pattern`.
        num_tokens: of the text.
    Raises:
        InputError: no layers, or weights that are not finite.
        ConfigError: a number of tokens that no text has.
    """
    check_kind("patterns_LBB", patterns_LBB, Tensor)
    check_numbers("weights", patterns_LBB)
    check_int("num_tokens", num_tokens, at_least=1)
    from matplotlib.colors import LogNorm

    num_layers = len(patterns_LBB)
    columns = min(6, num_layers)
    rows = ceil(num_layers / columns)
    figure = new_figure(1.7 * columns + 1.4, max(3.2, 1.75 * rows + 1.0))
    axes: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for layer_idx, axis in enumerate(axes.flat):
        if layer_idx >= num_layers:
            axis.set_axis_off()
            continue
        picture = axis.imshow(
            patterns_LBB[layer_idx].clamp_min(1e-9).numpy(),
            norm=LogNorm(1e-4, 1.0, clip=True),
            cmap=COLOURS,
            extent=(0, num_tokens, num_tokens, 0),
        )
        axis.set_title(f"layer {layer_idx}", fontsize="small", pad=2)
        axis.tick_params(labelsize="x-small")
        whole_numbers(axis.xaxis, 2)
        whole_numbers(axis.yaxis, 2)
    figure.supxlabel("key position, tokens")
    figure.supylabel("row position, tokens")
    figure.colorbar(picture, ax=axes, label="softmax weight of a block of keys,\nmean over heads")
    return figure


def score_map(selection: Selection, tokens: Sequence[str], *, first: int = 0, last: int | None = None) -> "Figure":
    """Scores of a stretch of a prompt by layer, and its text beneath on the mean over the layers.

    Scores are ranks within their layer and head, in [0, 1]: layers differ by orders of magnitude.

    Args:
        selection: of `hf_sparsekv.profile.prompt_selection`.
        tokens: the whole prompt as text, token by token.
        first, last: the stretch, tokens; `last` is left out, None = the end.
    Raises:
        InputError: no selection, scores that are not finite, or not as many tokens as scores.
        ConfigError: a stretch that is empty or too long to be read.
    """
    check_kind("selection", selection, Selection)
    check_numbers("scores", selection.scores)
    num_tokens = selection.scores.shape[-1]
    if len(tokens) != num_tokens:
        raise InputError(f"{len(tokens)} tokens of text for {num_tokens} scores: give the prompt that was scored")
    last = num_tokens if last is None else last
    if not 0 <= first < last <= num_tokens or last - first > MAX_TEXT_TOKENS:
        raise ConfigError(
            f"a stretch of 1 to {MAX_TEXT_TOKENS} of the {num_tokens} tokens can be shown: got first={first}, "
            f"last={last}"
        )
    rank_LN = selection.scores.argsort(dim=-1).argsort(dim=-1).float().div(max(1, num_tokens - 1)).mean(dim=1).numpy()
    lines = lines_of([readable(token) for token in tokens[first:last]])
    figure = new_figure(11.0, 3.4 + 0.2 * len(lines))
    upper, lower = figure.subplots(2, 1, height_ratios=[3.0, max(1.0, 0.2 * len(lines))])
    extent = (first, last, len(rank_LN) - 0.5, -0.5)
    picture = upper.imshow(
        rank_LN[:, first:last], aspect="auto", cmap=COLOURS, vmin=0, vmax=1, extent=extent, interpolation="nearest"
    )
    upper.set_xlabel("position, tokens")
    upper.set_ylabel("layer")
    whole_numbers(upper.yaxis)
    figure.colorbar(picture, ax=upper, label="rank of the score, mean over heads")
    draw_text(lower, lines, rank_LN.mean(axis=0)[first:last])
    return figure


def kept_map(selection: Selection) -> "Figure":
    """Which positions of a prompt each layer keeps.

    Args:
        selection: of `hf_sparsekv.profile.prompt_selection`.
    Raises:
        InputError: no selection, or an empty one.
    """
    check_kind("selection", selection, Selection)
    check_numbers("positions", selection.kept)
    kept_LN = selection.kept.float().mean(dim=1)
    num_layers, num_tokens = kept_LN.shape
    columns = as_columns(kept_LN).numpy()
    figure = new_figure(11.0, max(3.0, 1.5 + 0.14 * num_layers))
    axis = figure.subplots()
    picture = axis.imshow(
        columns,
        aspect="auto",
        cmap=COLOURS,
        vmin=0,
        vmax=1,
        extent=(0, num_tokens, num_layers - 0.5, -0.5),
        interpolation="nearest",
    )
    axis.set_xlabel("position, tokens")
    axis.set_ylabel("layer")
    whole_numbers(axis.yaxis)
    axis.set_title(f"{kept_LN.mean():.1%} of the keys and values are kept", fontsize="medium")
    figure.colorbar(picture, ax=axis, label="share of KV heads that keep a position")
    return figure
