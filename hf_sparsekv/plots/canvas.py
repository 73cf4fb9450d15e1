"""What all pictures share: the figure, whole numbers on an axis, and what cannot be drawn."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_sparsekv.errors import InputError, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = "viridis"
MAX_COLUMNS = 1024
"""Of a picture over a prompt: more would have no pixel."""


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, inches.

    Raises:
        InputError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError('plots need matplotlib: pip install "hf-sparsekv[plots]"') from error
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def whole_numbers(axis: Any, most: int = 10) -> None:
    """Ticks at whole numbers only, so many intervals at most."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1))


def as_columns(values_LN: Tensor) -> Tensor:
    """At most `MAX_COLUMNS` columns, each the mean of neighbours: a picture would leave out what has no pixel."""
    num_tokens = values_LN.shape[1]
    if num_tokens <= MAX_COLUMNS:
        return values_LN
    return torch.nn.functional.adaptive_avg_pool1d(values_LN[None], MAX_COLUMNS)[0]


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse what is no such object.

    Raises:
        InputError: names what is needed and what was given.
    """
    if not isinstance(value, kind):
        raise InputError(f"{name} must be a hf_sparsekv {kind.__name__}: got {shown(value)}")


def check_numbers(what: str, values: Tensor) -> None:
    """Refuse what no picture can show.

    Args:
        what: is to be drawn, in the plural.
        values: any shape.
    Raises:
        InputError: there are none, or one is NaN or infinite.
    """
    if values.numel() == 0:
        raise InputError(f"there are no {what} to draw: shape {list(values.shape)}")
    num_odd = int((~values.isfinite()).sum())
    if num_odd:
        raise InputError(f"{num_odd} of {values.numel()} {what} are NaN or infinite: nothing true can be drawn of them")
