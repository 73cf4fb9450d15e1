"""Pictures of a comparison: accuracy or perplexity against measured bytes, a line for each method. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.row_text import Row, caption, groups_of, method_and_ratio, note, origin
from hf_sparsekv.errors import InputError

DENSE = "dense"
BYTES_LABEL = "measured cache bytes of a request, mean"


def draw_report(report: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """A PNG for each task, length, protocol and half that has valid figures; their paths.

    Raises:
        InputError: matplotlib is not installed.
    """
    made = []
    for rows in groups_of(report["rows"]):
        valid = [row for row in rows if not note(row, rows)]
        if not any(row["config"] != DENSE for row in valid):
            continue
        first = rows[0]
        name = f"{stem}_{first['task']}_{first['budget_tokens']}_{first['mode']}_{first['half']}.png"
        draw = perplexity_plot if "perplexity" in valid[0] else accuracy_plot
        draw(valid, f"{caption(rows)}\n{origin(report)}", folder / name)
        made.append(folder / name)
    return made


def accuracy_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Accuracy against measured bytes; bands are 95 % intervals."""
    _plot(rows, "accuracy", title, path)


def perplexity_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Perplexity against measured bytes; bands are 95 % intervals."""
    _plot(rows, "perplexity", title, path)


def _plot(rows: Sequence[Row], figure_name: str, title: str, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise InputError('plots need matplotlib: pip install "hf-sparsekv[plots]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for method, points in lines_of(rows, figure_name).items():
        sizes, values, lows, highs = zip(*points, strict=True)
        (line,) = axis.plot(sizes, values, marker="o", label=method)
        axis.fill_between(sizes, lows, highs, color=line.get_color(), alpha=0.1)
    for row in rows:
        if row["config"] == DENSE:
            axis.axhline(row[figure_name]["value"], color="black", linestyle="--", label="dense")
            axis.axvline(row["mean_cache_bytes"], color="black", linestyle=":")
    axis.set(xlabel=BYTES_LABEL, ylabel=figure_name, xscale="log")
    axis.set_title(title, fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def lines_of(rows: Sequence[Row], figure_name: str) -> dict[str, list[tuple[float, float, float, float]]]:
    """By method: (bytes, value, low, high) in ascending order of bytes."""
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        found = row.get(figure_name)
        if row["config"] != DENSE and found and found["low"] is not None:
            method, _ = method_and_ratio(row["config"])
            point = (row["mean_cache_bytes"], found["value"], found["low"], found["high"])
            lines.setdefault(method, []).append(point)
    return {method: sorted(points) for method, points in lines.items()}
