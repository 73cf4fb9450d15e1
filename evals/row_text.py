"""Rows of results as text: the columns, the cells, and what stands above them, for the terminal and for Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.verdict import dense_of, doubt, place_of

Row = Mapping[str, Any]
PROTOCOLS = {"aware": "query-aware", "agnostic": "query-agnostic"}
_RATIO_MARK = "x"


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that belong in one table: of one suite, task, length, protocol and half."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(place_of(row), []).append(row)
    return list(groups.values())


def caption(rows: Sequence[Row]) -> str:
    """What one table is about: task, protocol, length, half, n."""
    first = rows[0]
    counts = sorted({row["num_samples"] for row in rows if row.get("num_samples")})
    count = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}" if counts else "n = 0"
    protocol = PROTOCOLS.get(first["mode"], first["mode"])
    half = "all documents" if first["half"] == "all" else f"{first['half']} half"
    return f"{first['task']}, {protocol}, up to {first['budget_tokens']:,} tokens, {half}, {count}"


def origin(report: Mapping[str, Any]) -> str:
    """Who made the figures: model, dtype, device, date, commit."""
    suites = list(report.get("suites", {"": report}).values())
    model = suites[0]["model"]
    commits = sorted({commit for suite in suites for commit in suite.get("commits") or [str(suite["commit"])]})
    short = " and ".join(
        commit if commit.endswith("-dirty") else commit[:12] + "+" * commit.endswith("+") for commit in commits
    )
    weights = model["weights_sha256"][:8]
    # A processor's name is its architecture at best.
    where = model["device"] if model["device"] == "cpu" else model.get("device_name", model["device"])
    return (
        f"{model['name']} (weights {weights}, {model['dtype']}, {where}), "
        f"{report.get('date', 'date not noted')}, commit {short}"
    )


def columns(rows: Sequence[Row]) -> list[str]:
    """Headings of one table."""
    heads = ["configuration", "budget", "compression"]
    if any("perplexity" in row for row in rows):
        return [*heads, "perplexity", "nats a token more than dense", "context's worth kept", "note"]
    has_choice = any("agreement" in row for row in rows)
    return [*heads, "accuracy", "difference from dense", *["same choice as dense"] * has_choice, "note"]


def cells(row: Row, rows: Sequence[Row], heads: Sequence[str]) -> list[str]:
    """A row under these headings; figures that say nothing are marked in the last one.

    Args:
        row: one of `rows`.
        rows: of one table, the dense one among them.
        heads: of `columns`.
    """
    agreement = row.get("agreement")
    values = {
        "configuration": str(row["config"]),
        "budget": _budget(row.get("budget")),
        "compression": f"{row['compression']:.2f}x" if row.get("compression") else "-",
        "accuracy": interval(row.get("accuracy")),
        "difference from dense": interval(row.get("difference"), sign=True),
        "same choice as dense": f"{agreement['same_choice']:.2f}" if agreement else "-",
        "perplexity": interval(row.get("perplexity"), digits=1),
        "nats a token more than dense": interval(row.get("nll_difference"), digits=3, sign=True),
        "context's worth kept": interval(row.get("kept_share")),
        "note": note(row, rows),
    }
    return [values[head] for head in heads]


def note(row: Row, rows: Sequence[Row]) -> str:
    """Why a row has no figures, or none that may be read."""
    if "refused" in row:
        return str(row["refused"])
    dense = dense_of(row, list(map(dict, rows)))
    return "not valid: no dense figures beside it" if dense is None else doubt(dense) or ""


def interval(found: Mapping[str, Any] | None, *, digits: int = 2, sign: bool = False) -> str:
    """A figure with its interval in brackets."""
    if found is None or found["value"] is None:
        return "-"
    plus = "+" if sign else ""
    value = f"{found['value']:{plus}.{digits}f}"
    if found["low"] is None:
        return value
    return f"{value} [{found['low']:{plus}.{digits}f}, {found['high']:{plus}.{digits}f}]"


def method_and_ratio(config: str) -> tuple[str, str | None]:
    """Name of a method and the ratio it was asked for: "tova-4x" -> ("tova", "4x")."""
    name, dash, ratio = config.rpartition("-")
    is_ratio = bool(dash) and ratio.endswith(_RATIO_MARK) and ratio[:-1].replace(".", "", 1).isdigit()
    return (name, ratio) if is_ratio else (config, None)


def _budget(budget: Any) -> str:
    if budget is None:
        return "-"
    if isinstance(budget, Sequence):
        return "by layer"
    return f"{budget:.1%}" if isinstance(budget, float) else f"{budget:,}"
