"""Tokens per second and time to the first token against concurrency, as a PNG from `hf-sparsekv bench --json`.

    python evals/plot_serving.py evals/results/serving_*.json -o evals/results/serving.png

One line for each engine, cache size and budget; where files have the same point, the last one counts. Needs matplotlib:
`pip install "hf-sparsekv[notebooks]"`.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

USAGE_ERROR = 2
PANELS = ("output tokens/s", "time to the first token, p50, s")
MARKERS = {"dense": "s", "sparse": "o", "transformers": "^"}

Points = list[tuple[int, float, float | None]]


class PlotError(Exception):
    """Nothing can be drawn, for a reason that the user can mend."""


def read_reports(paths: list[Path]) -> list[dict[str, Any]]:
    """The reports in the files."""
    reports = []
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlotError(f"cannot read {path}: {error}") from error
        if not isinstance(report, dict) or report.get("kind") != "serving":
            raise PlotError(f"{path} is no report of `hf-sparsekv bench --json`")
        reports.append(report)
    return reports


def lines_of(reports: list[dict[str, Any]], part: str) -> dict[str, tuple[str, Points]]:
    """By label: the engine, and (concurrency, output tokens/s, TTFT p50 in s) in ascending order.

    Args:
        reports: of `hf-sparsekv bench`.
        part: "whole" or "steady"; runs without such a part are left out.
    """
    points: dict[str, dict[int, tuple[int, float, float | None]]] = defaultdict(dict)
    engines = {}
    for report in reports:
        for run in report["runs"]:
            if "error" in run or run[part] is None:
                continue
            label = label_of(run, report["method"])
            engines[label] = run["engine"]
            ttft = run["ttft_s"] and run["ttft_s"]["p50"]
            concurrency = run["concurrency"]
            points[label][concurrency] = (concurrency, run[part]["output_tokens_per_s"], ttft)
    if not points:
        raise PlotError(f"no run has figures of its {part} part: nothing to draw")
    return {label: (engines[label], [of[c] for c in sorted(of)]) for label, of in points.items()}


def label_of(run: dict[str, Any], method: dict[str, Any]) -> str:
    """What distinguishes a line: engine, scorer, full layers and budget where there is one, memory."""
    size = run["kv_memory_bytes"]
    memory = f"{run['memory_fraction']:.0%} of the GPU" if size is None else f"{size / 2**30:.3g} GiB"
    if run["engine"] != "sparse":
        return f"{run['engine']}, {memory}"
    full = f"{method['num_full_layers']} full + " if method.get("num_full_layers") else ""
    return f"{method['scorer']}, {full}{method['budget']}, {memory}"


def draw(reports: list[dict[str, Any]], part: str, output: Path) -> None:
    """Write the PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError('plots need matplotlib: pip install "hf-sparsekv[notebooks]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, ScalarFormatter

    lines = lines_of(reports, part)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for label, (engine, points) in lines.items():
        for axis, column in zip(axes, (1, 2), strict=True):
            drawn = [(point[0], point[column]) for point in points if point[column] is not None]
            axis.plot(*zip(*drawn, strict=True), marker=MARKERS.get(engine, "x"), label=label)
    for axis, title in zip(axes, PANELS, strict=True):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.set_xticks(sorted({point[0] for _, points in lines.values() for point in points}))
        axis.set(xlabel="requests at a time", title=title)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))  # the others' numbers would touch
    axes[1].yaxis.set_minor_formatter("{x:.2g}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(title_of(reports[0]), fontsize="medium")
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def title_of(report: dict[str, Any]) -> str:
    """Model, device and load of the first report."""
    load, model = report["workload"], report["model"]
    where = report["device"]["name"]
    return f"{model['name']} ({model['dtype']}) on {where}, {load['input_len']} tokens in, {load['output_len']} out"


def main() -> int:
    """Parse, read, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="files of `hf-sparsekv bench --json`")
    parser.add_argument("-o", "--output", type=Path, default=Path("serving.png"))
    parser.add_argument("--part", choices=["whole", "steady"], default="whole", help="of each run")
    args = parser.parse_args()
    try:
        draw(read_reports(args.reports), args.part, args.output)
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
