"""Pictures of what `hf_sparsekv.profile` measures or sees: one function a picture, each returns a matplotlib Figure.

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

from hf_sparsekv.errors import ConfigError, InputError, shown
from hf_sparsekv.plan import LayerPlan
from hf_sparsekv.profile.activations import MAX_CELLS, Surface
from hf_sparsekv.profile.engine_blocks import EngineBlocks
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
_LINE_END = "\u010a"
"""How byte-level tokenizers write a line's end."""


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


def layer_magnitudes(profile: Profile) -> "Figure":
    """The largest and the median entry of the residual stream, and where rows look, by layer.

    Args:
        profile: of `hf_sparsekv.profile.measure`.
    """
    layers = profile.layers
    figure = _figure(9.0, 6.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot([layer.peaks[0].magnitude for layer in layers], marker=".", label="largest")
    upper.plot([layer.median_magnitude for layer in layers], marker=".", label="median")
    upper.set_yscale("log")
    upper.set_ylabel("residual stream, magnitude")
    near = f"last {profile.local_window} tokens"
    for label, name in ((f"first {profile.config.num_sink_tokens} tokens", "sink_mass"), (near, "local_mass")):
        means = [sum(getattr(head, name) for head in layer.heads) / len(layer.heads) for layer in layers]
        lower.plot(means, marker=".", label=label)
    lower.set_xlabel("layer")
    lower.set_ylabel("softmax weight, mean over heads")
    lower.set(xlim=(-0.5, len(layers) - 0.5), ylim=(0, 1))
    _whole_numbers(lower.xaxis)
    for axis in (upper, lower):
        axis.grid(alpha=0.3)
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
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


def pool_over_time(looks: Sequence[EngineBlocks]) -> "Figure":
    """Who holds each block of an engine's pool, step by step.

    Args:
        looks: of `hf_sparsekv.profile.engine_blocks`, one a step, all of one engine.
    """
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(name for look in looks for name in look.requests))
    owner_BN = np.full((_num_blocks(looks), len(looks)), -1)
    for step, look in enumerate(looks):
        for name, request in look.requests.items():
            for table in (*request.tables, *request.staging):
                owner_BN[list(table), step] = names.index(name)
    colours: list[Any] = ["whitesmoke", *(colormaps["tab10"](i % 10) for i in range(len(names)))]
    figure = _figure(10.0, 5.0)
    axis = figure.subplots()
    norm = BoundaryNorm(np.arange(-1.5, len(names)), len(colours))
    axis.imshow(owner_BN, aspect="auto", cmap=ListedColormap(colours), norm=norm, interpolation="nearest")
    axis.set(xlabel="engine step", ylabel="block of the pool")
    _whole_numbers(axis.xaxis)
    entries = [Patch(facecolor=c, edgecolor="grey", label=n) for c, n in zip(colours, ["free", *names], strict=True)]
    axis.legend(handles=entries, title="held by", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def layer_blocks(looks: Sequence[EngineBlocks], request_id: str) -> "Figure":
    """How many blocks each layer has for one request, step by step.

    Args:
        looks: of `hf_sparsekv.profile.engine_blocks`, one a step.
        request_id: of a request that held blocks in one of them.
    Raises:
        InputError: no such request.
    """
    counts = {i: look.requests[request_id].blocks_of_layers for i, look in _with_request(looks, request_id)}
    count_LN, extent = _by_step(counts)
    figure = _figure(9.0, 4.5)
    axis = figure.subplots()
    picture = axis.imshow(count_LN, aspect="auto", cmap=COLOURS, vmin=0, extent=extent, interpolation="nearest")
    axis.set(xlabel="engine step", ylabel="layer", title=f"request {request_id}")
    _whole_numbers(axis.xaxis)
    _whole_numbers(axis.yaxis)
    figure.colorbar(picture, ax=axis, label="blocks of the layer")
    return figure


def stored_over_time(looks: Sequence[EngineBlocks], request_id: str, layer_idx: int) -> "Figure":
    """Which tokens one layer holds of a request that decodes: a line that ends is a token that was evicted.

    Args:
        looks: of `hf_sparsekv.profile.engine_blocks`, one a step.
        request_id: of a request that decoded in one of them.
        layer_idx: a layer whose positions are known.
    Raises:
        InputError: no such request, or its positions are not known there.
    """
    found = {}
    for step, look in _with_request(looks, request_id):
        positions = look.requests[request_id].positions
        held = None if positions is None else positions[layer_idx]
        if held is not None:
            found[step] = held.flatten().bincount().numpy() / len(held)
    if not found:
        raise InputError(f"layer {layer_idx} shows no positions of request {request_id!r}: see `RequestBlocks`")
    share_NT, extent = _by_step(found)
    figure = _figure(9.0, 6.0)
    axis = figure.subplots()
    picture = axis.imshow(share_NT, aspect="auto", cmap=COLOURS, vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axis.set(xlabel="engine step", ylabel="position, tokens", title=f"request {request_id}, layer {layer_idx}")
    _whole_numbers(axis.xaxis)
    _whole_numbers(axis.yaxis)
    figure.colorbar(picture, ax=axis, label="share of KV heads that hold a position")
    return figure


def _num_blocks(looks: Sequence[EngineBlocks]) -> int:
    if not looks:
        raise InputError("no look at an engine: call engine_blocks(engine) after each step")
    return looks[0].num_blocks


def _with_request(looks: Sequence[EngineBlocks], request_id: str) -> list[tuple[int, EngineBlocks]]:
    """The looks that show a request, numbered."""
    found = [(i, look) for i, look in enumerate(looks) if request_id in look.requests]
    if not found:
        known = sorted({name for look in looks for name in look.requests})
        raise InputError(f"no look shows request {shown(request_id)}: there are {shown(known)}")
    return found


def _by_step(columns: dict[int, Any]) -> tuple[Any, tuple[float, float, float, float]]:
    """A column for each step from the first to the last, zeros where there is none, and the extent of the picture."""
    first, last = min(columns), max(columns)
    values = np.zeros((max(map(len, columns.values())), last - first + 1))
    for step, column in columns.items():
        values[: len(column), step - first] = column
    return values, (first - 0.5, last + 0.5, len(values) - 0.5, -0.5)


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
    text = "".join(" " if c in _FIRST_OF_A_WORD else "\u21b5" if c in ("\n", _LINE_END) else c for c in token)
    return "".join(c if c.isprintable() else "\u00b7" for c in text) or "\u00b7"


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
