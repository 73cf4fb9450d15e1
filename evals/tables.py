"""Results as Markdown tables between markers of a document, and as pictures; nothing is typed by hand.

    python -m evals.tables                    write the tables of README.md and docs/
    python -m evals.tables --check            fail where a document does not say what the results say
    python -m evals.tables --plots evals/results

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; NAME is a file of `evals/results` without its
ending. What follows the name narrows the rows, `task=needle mode=aware half=report budget_tokens=1024`, or turns
methods into rows and ratios into columns: `shape=wide`.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.row_text import Row, caption, cells, columns, groups_of, interval, method_and_ratio, note, origin
from hf_sparsekv.errors import SparseKVError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "evals" / "results"
KINDS = ("eval", "tasks")
"""Of `hf-sparsekv eval --json` and of `python -m evals.run_tasks --json`."""
FILTERS = ("suite", "task", "budget_tokens", "mode", "half")
WIDE = "wide"
USAGE_ERROR, STALE = 2, 1

_UNNAMED_INTERVALS = "percentiles of resamples, paired by sample for differences; too narrow for few samples"
"""Those of reports of before they were named."""
_BEGIN = re.compile(r"<!-- table:(?P<name>[^\s]+)(?P<options>[^>]*?) -->\n")
_END = "<!-- /table -->"


class TableError(Exception):
    """A document or a result cannot be used, for a reason that the user can mend."""


def read_report(path: Path) -> dict[str, Any]:
    """One file of results."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"cannot read {path}: {error}") from error
    if not isinstance(report, dict) or report.get("kind") not in KINDS:
        raise TableError(f"{path} is no report of `hf-sparsekv eval --json`")
    return report


def filled(text: str, results: Path = RESULTS) -> str:
    """A document with what belongs between its markers.

    Args:
        text: of the document.
        results: folder of the JSON files.
    Raises:
        TableError: a marker without an end, results that are not there, options that leave no row.
    """
    made, rest = [], text
    while begin := _BEGIN.search(rest):
        end = rest.find(_END, begin.end())
        following = _BEGIN.search(rest, begin.end())
        if end < 0 or (following and following.start() < end):
            raise TableError(f"the table {begin['name']} has no {_END}")
        report = read_report(results / f"{begin['name']}.json")
        made += [rest[: begin.end()], table(report, _options(begin["options"]))]
        rest = rest[end:]
    return "".join([*made, rest])


def table(report: Mapping[str, Any], options: Mapping[str, str]) -> str:
    """Markdown: for each task, length, protocol and half a caption and a table.

    Args:
        report: see `read_report`.
        options: of `FILTERS`, and `shape`.
    """
    wanted = {name: value for name, value in options.items() if name != "shape"}
    rows = [row for row in report["rows"] if all(str(row.get(name)) == value for name, value in wanted.items())]
    if not rows:
        raise TableError(f"no row is left with {dict(options)}")
    draw = _wide if options.get("shape") == WIDE else _long
    parts = [f"{caption(group)}. {origin(report)}.\n\n{draw(group)}" for group in groups_of(rows)]
    return "\n".join([*parts, f"Brackets: 95 % intervals, {_intervals(report)}.\n"])


def _intervals(report: Mapping[str, Any]) -> str:
    suites = report.get("suites", {"": report}).values()
    return " and ".join(sorted({suite.get("intervals", _UNNAMED_INTERVALS) for suite in suites}))


def _long(rows: Sequence[Row]) -> str:
    heads = columns(rows)
    return _markdown(heads, [cells(row, rows, heads) for row in rows])


def _wide(rows: Sequence[Row]) -> str:
    """Methods by ratios; in each cell the figure and the measured compression."""
    by_method: dict[str, dict[str | None, Row]] = {}
    for row in rows:
        method, ratio = method_and_ratio(row["config"])
        by_method.setdefault(method, {})[ratio] = row
    ratios = sorted({r for of in by_method.values() for r in of if r is not None}, key=lambda r: float(r[:-1]))
    plain = ["as configured"] * any(None in of for of in by_method.values())
    keys: list[str | None] = [*[None] * len(plain), *ratios]
    lines = [[method, *(_cell(of.get(key), rows) for key in keys)] for method, of in by_method.items()]
    return _markdown(["method", *plain, *ratios], lines)


def _cell(row: Row | None, rows: Sequence[Row]) -> str:
    if row is None:
        return "-"
    if "refused" in row:
        return note(row, rows)
    figure = interval(row["perplexity"], digits=1) if "perplexity" in row else interval(row["accuracy"])
    return "; ".join(part for part in (f"{figure} at {row['compression']:.2f}x", note(row, rows)) if part)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    made = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in made)


def _options(text: str) -> dict[str, str]:
    options = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals or name not in (*FILTERS, "shape") or (name == "shape" and value not in ("long", WIDE)):
            raise TableError(f"a table takes {', '.join(FILTERS)} and shape=long or {WIDE}: got {part!r}")
        options[name] = value
    return options


def documents(root: Path = ROOT) -> list[Path]:
    """What may hold tables."""
    return [path for path in [root / "README.md", *sorted(root.glob("docs/**/*.md"))] if path.is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, and write, check or draw."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", nargs="*", type=Path, help="default: README.md and docs/")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a table is stale")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw every report of the results into it")
    args = parser.parse_args(arguments)
    try:
        stale = False
        for path in args.documents or documents():
            text = path.read_text(encoding="utf-8")
            fresh = filled(text, args.results)
            if fresh != text and args.check:
                stale = True
                print(f"{path} does not say what {args.results} says: run python -m evals.tables", file=sys.stderr)
            elif fresh != text:
                path.write_text(fresh, encoding="utf-8")
                print(path)
        if args.plots is not None:
            _draw(args.results, args.plots)
    except (TableError, SparseKVError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return STALE if stale else 0


def _draw(results: Path, folder: Path) -> None:
    from evals.plots import draw_report

    for path in sorted(results.glob("*.json")):
        try:
            report = read_report(path)
        except TableError:
            continue  # other measurements lie there too
        for picture in draw_report(report, folder, path.stem):
            print(picture)


if __name__ == "__main__":
    sys.exit(main())
