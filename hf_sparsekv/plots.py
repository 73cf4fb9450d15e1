"""Pictures of what `hf_sparsekv.profile` measures: one function a picture, each returns a matplotlib Figure.

`figure.savefig("x.png")` writes one. Nothing global is touched, and pyplot stays out. matplotlib comes with the extra
`plots`.

Shapes: L layer, K KV head, N token.
"""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.plan import LayerPlan
from hf_sparsekv.profile.activations import MAX_CELLS, Surface
from hf_sparsekv.profile.result import Profile
from hf_sparsekv.profile.selection import Selection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = "viridis"
MAX_TEXT_TOKENS = 600
"""Beneath a heat map: more could not be read."""
LINE_CHARACTERS = 110
MAX_COLUMNS = 1024
_FIRST_OF_A_WORD = "\u2581\u0120"
"""How tokenizers write a blank before a token."""


def activation_surface(surface: Surface) -> "Figure":
    """The residual stream's magnitude over tokens and channels, the largest of each cell.

    Args:
        surface: of `hf_sparsekv.profile.activation_surface`.
    """
    figure = _figure(8.0, 6.0)
    axis: Any = figure.add_subplot(projection="3d")
    magnitude = surface.magnitude.numpy()
    tokens = np.arange(magnitude.shape[0]) * surface.tokens_per_row
    channels = np.arange(magnitude.shape[1]) * surface.channels_per_column
    grid = np.meshgrid(channels, tokens)
    axis.plot_surface(
        *grid, magnitude, rcount=MAX_CELLS, ccount=MAX_CELLS, cmap=COLOURS, linewidth=0, antialiased=False
    )
    axis.set_xlabel("channel")
    axis.set_ylabel("token position")
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
    """
    from matplotlib.colors import LogNorm

    num_layers = len(patterns_LBB)
    columns = min(6, num_layers)
    rows = ceil(num_layers / columns)
    figure = _figure(1.7 * columns + 1.2, 1.75 * rows + 1.0)
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
        _whole_numbers(axis.xaxis, 2)
        _whole_numbers(axis.yaxis, 2)
    figure.supxlabel("key position, tokens")
    figure.supylabel("row position, tokens")
    figure.colorbar(picture, ax=axes, label="softmax weight of a block of keys, mean over heads", shrink=0.8)
    return figure


def score_map(selection: Selection, tokens: Sequence[str], *, first: int = 0, last: int | None = None) -> "Figure":
    """Scores of a stretch of a prompt by layer, and its text beneath on the mean over the layers.

    Scores are ranks within their layer and head, in [0, 1]: layers differ by orders of magnitude.

    Args:
        selection: of `hf_sparsekv.profile.prompt_selection`.
        tokens: the whole prompt as text, token by token.
        first, last: the stretch, tokens; `last` is left out, None = the end.
    Raises:
        InputError: not as many tokens as scores.
        ConfigError: a stretch that is empty or too long to be read.
    """
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
    lines = _lines([_readable(token) for token in tokens[first:last]])
    figure = _figure(11.0, 3.4 + 0.2 * len(lines))
    upper, lower = figure.subplots(2, 1, height_ratios=[3.0, max(1.0, 0.2 * len(lines))])
    extent = (first, last, len(rank_LN) - 0.5, -0.5)
    picture = upper.imshow(
        rank_LN[:, first:last], aspect="auto", cmap=COLOURS, vmin=0, vmax=1, extent=extent, interpolation="nearest"
    )
    upper.set_xlabel("position, tokens")
    upper.set_ylabel("layer")
    _whole_numbers(upper.yaxis)
    figure.colorbar(picture, ax=upper, label="rank of the score, mean over heads")
    _draw_text(lower, lines, rank_LN.mean(axis=0)[first:last])
    return figure


def kept_map(selection: Selection) -> "Figure":
    """Which positions of a prompt each layer keeps.

    Args:
        selection: of `hf_sparsekv.profile.prompt_selection`.
    """
    kept_LN = selection.kept.float().mean(dim=1)
    num_layers, num_tokens = kept_LN.shape
    columns = _columns(kept_LN).numpy()
    figure = _figure(11.0, 1.5 + 0.14 * num_layers)
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
    _whole_numbers(axis.yaxis)
    axis.set_title(f"{kept_LN.mean():.1%} of the keys and values are kept", fontsize="medium")
    figure.colorbar(picture, ax=axis, label="share of KV heads that keep a position")
    return figure


def layer_errors(profile: Profile) -> "Figure":
    """What cutting each layer costs its attention output, by budget.

    Args:
        profile: of `hf_sparsekv.profile.measure`.
    """
    figure = _figure(9.0, 4.5)
    axis = figure.subplots()
    for c, budget in enumerate(profile.budgets):
        colour = f"C{c}" if len(profile.budgets) <= 10 else None
        error = [layer.output_error[c] for layer in profile.layers]
        axis.plot(range(len(error)), error, marker=".", color=colour, label=f"{budget:,}")
    axis.set_xlabel("layer")
    axis.set_ylabel("output error, |cut - dense| / |dense|")
    axis.set(xlim=(-0.5, len(profile.layers) - 0.5), ylim=(0, None))
    _whole_numbers(axis.xaxis)
    axis.grid(alpha=0.3)
    axis.legend(title=f"tokens kept\nof {profile.prompt_length:,}", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def layer_budgets(plans: dict[str, LayerPlan], length: int) -> "Figure":
    """What each layer keeps under several plans.

    Args:
        plans: by name, of one model.
        length: tokens of the prompt.
    """
    figure = _figure(9.0, 4.0)
    axis = figure.subplots()
    for name, plan in plans.items():
        kept = [min(length, spec.kept_tokens(length)) for spec in plan.layers]
        axis.step(range(len(kept)), kept, where="mid", label=name)
    axis.set_xlabel("layer")
    axis.set_ylabel(f"tokens kept of {length:,}")
    axis.set(xlim=(-0.5, len(kept) - 0.5), ylim=(0, None))
    _whole_numbers(axis.xaxis)
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError('plots need matplotlib: pip install "hf-sparsekv[plots]"') from error
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _whole_numbers(axis: Any, most: int = 10) -> None:
    """Ticks at whole numbers only, so many intervals at most."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True))


def _columns(values_LN: Tensor) -> Tensor:
    """At most `MAX_COLUMNS` columns, each the mean of neighbours: a picture would leave out what has no pixel."""
    num_tokens = values_LN.shape[1]
    if num_tokens <= MAX_COLUMNS:
        return values_LN
    return torch.nn.functional.adaptive_avg_pool1d(values_LN[None], MAX_COLUMNS)[0]


def _readable(token: str) -> str:
    """A token's text on one line, as the tokenizer's vocabulary writes it or decoded."""
    text = "".join(" " if c in _FIRST_OF_A_WORD else c for c in token)
    return "".join(c if c.isprintable() else "\u00b7" for c in text.replace("\n", "\u21b5")) or "\u00b7"


def _lines(tokens: list[str]) -> list[list[str]]:
    """Tokens in lines that fit; one that is longer than a line is cut."""
    lines: list[list[str]] = [[]]
    for token in (token[:LINE_CHARACTERS] for token in tokens):
        if lines[-1] and sum(map(len, lines[-1])) + len(token) > LINE_CHARACTERS:
            lines.append([])
        lines[-1].append(token)
    return lines


def _draw_text(axis: Any, lines: list[list[str]], rank_N: Any) -> None:
    """Monospaced text, one cell a character, each token on the colour of its rank."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours, place = colormaps[COLOURS], 0
    for row, line in enumerate(lines):
        column = 0
        for token in line:
            rank = float(rank_N[place])
            axis.add_patch(Rectangle((column, row), len(token), 1, color=colours(rank), linewidth=0))
            ink = "black" if rank > 0.6 else "white"
            for i, character in enumerate(token):
                axis.text(
                    column + i + 0.5,
                    row + 0.5,
                    character,
                    color=ink,
                    ha="center",
                    va="center",
                    family="monospace",
                    fontsize=8,
                    parse_math=False,
                )
            column, place = column + len(token), place + 1
    axis.set(xlim=(0, LINE_CHARACTERS), ylim=(len(lines), 0))
    axis.set_axis_off()
