"""Pictures of an engine's pool, step by step.

Shapes: L layer, N token, B block.
"""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_sparsekv.errors import InputError, shown
from hf_sparsekv.plots.canvas import COLOURS, check_kind, new_figure, whole_numbers
from hf_sparsekv.profile.engine_blocks import EngineBlocks
from hf_sparsekv.scorers.checks import check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND_ROWS = 18
"""More requests go beside these."""


def pool_over_time(looks: Sequence[EngineBlocks]) -> "Figure":
    """Who holds each block of an engine's pool, step by step.

    Args:
        looks: of `hf_sparsekv.profile.engine_blocks`, one a step, all of one engine.
    Raises:
        InputError: no look.
    """
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    _check_looks(looks)
    names = list(dict.fromkeys(name for look in looks for name in look.requests))
    owner_BN = np.full((_num_blocks(looks), len(looks)), -1)
    for step, look in enumerate(looks):
        for name, request in look.requests.items():
            for table in (*request.tables, *request.staging):
                owner_BN[list(table), step] = names.index(name)
    colours: list[Any] = ["whitesmoke", *(colormaps["tab10"](i % 10) for i in range(len(names)))]
    figure = new_figure(10.0, 5.0)
    axis = figure.subplots()
    norm = BoundaryNorm(np.arange(-1.5, len(names)), len(colours))
    axis.imshow(owner_BN, aspect="auto", cmap=ListedColormap(colours), norm=norm, interpolation="nearest")
    axis.set(xlabel="engine step", ylabel="block of the pool")
    whole_numbers(axis.xaxis)
    entries = [Patch(facecolor=c, edgecolor="grey", label=n) for c, n in zip(colours, ["free", *names], strict=True)]
    columns = ceil(len(entries) / LEGEND_ROWS)
    axis.legend(handles=entries, title="held by", loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns)
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
    figure = new_figure(9.0, 4.5)
    axis = figure.subplots()
    picture = axis.imshow(count_LN, aspect="auto", cmap=COLOURS, vmin=0, extent=extent, interpolation="nearest")
    axis.set(xlabel="engine step", ylabel="layer", title=f"request {request_id}")
    whole_numbers(axis.xaxis)
    whole_numbers(axis.yaxis)
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
        ConfigError: no such layer.
    """
    found = {}
    for step, look in _with_request(looks, request_id):
        check_int("layer_idx", layer_idx, at_least=0, at_most=len(look.requests[request_id].tables) - 1)
        positions = look.requests[request_id].positions
        held = None if positions is None else positions[layer_idx]
        if held is not None:
            found[step] = held.flatten().bincount().numpy() / len(held)
    if not found:
        raise InputError(f"layer {layer_idx} shows no positions of request {request_id!r}: see `RequestBlocks`")
    share_NT, extent = _by_step(found)
    figure = new_figure(9.0, 6.0)
    axis = figure.subplots()
    picture = axis.imshow(share_NT, aspect="auto", cmap=COLOURS, vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axis.set(xlabel="engine step", ylabel="position, tokens", title=f"request {request_id}, layer {layer_idx}")
    whole_numbers(axis.xaxis)
    whole_numbers(axis.yaxis)
    figure.colorbar(picture, ax=axis, label="share of KV heads that hold a position")
    return figure


def _check_looks(looks: Sequence[EngineBlocks]) -> None:
    if not isinstance(looks, Sequence) or isinstance(looks, str):
        raise InputError(f"looks must be a list of hf_sparsekv EngineBlocks: got {shown(looks)}")
    for look in looks:
        check_kind("each look", look, EngineBlocks)


def _num_blocks(looks: Sequence[EngineBlocks]) -> int:
    if not looks:
        raise InputError("no look at an engine: call engine_blocks(engine) after each step")
    return looks[0].num_blocks


def _with_request(looks: Sequence[EngineBlocks], request_id: str) -> list[tuple[int, EngineBlocks]]:
    """The looks that show a request, numbered."""
    _check_looks(looks)
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
