"""The runs of a bench as one table."""

from typing import Any

from rich.table import Table


def runs_table(report: dict[str, Any]) -> Table:
    """A row for each run: throughput, latency, memory."""
    load, model = report["workload"], report["model"]
    title = (
        f"{model['name']} ({model['dtype']}, {model['weights']} weights) on {report['device']['name']}: "
        f"{load['input_len']} tokens in, {load['output_len']} out"
    )
    if load.get("shared_prefix_len"):
        title += f", {load['shared_prefix_len']} of the tokens in shared"
    has_busy = any(run.get("gpu_busy") for run in report["runs"])
    table = Table(
        title=title, caption="tokens/s over the whole run and over its steady part; cache against a dense one"
    )
    table.add_column("engine", no_wrap=True)
    names = ("KV memory", "c", "out tok/s", "steady", "prompt tok/s", "steady", "TTFT s p50/p99", "ITL ms p50/p99")
    for name in (*names, "cache a request", "preempted", "budget used", *["GPU busy"] * has_busy):
        table.add_column(name, justify="right")
    for run in report["runs"]:
        if "error" in run:
            table.add_row(_engine(run, load), _memory(run), concurrency_text(run), "[red]failed[/]")
        else:
            table.add_row(
                _engine(run, load), *_cells(run), *[_share((run.get("gpu_busy") or {}).get("share"))] * has_busy
            )
    return table


def sides_table(report: dict[str, Any]) -> Table | None:
    """Engines side by side, at an equal batch and each at its maximum; None without two that ran in one case."""
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for run in report["runs"]:
        if "error" not in run:
            batch = "maximum" if run.get("is_maximum") else f"equal, c = {run['concurrency']}"
            cases.setdefault((_memory(run), batch), {})[_engine(run, report["workload"])] = run
    cases = {case: runs for case, runs in cases.items() if len(runs) > 1}
    if not cases:
        return None
    engines = list(dict.fromkeys(engine for runs in cases.values() for engine in runs))
    table = Table(title="output tokens/s side by side, in brackets the requests live at any time")
    for name in ("KV memory", "batch"):
        table.add_column(name, no_wrap=True)
    for name in (*engines, f"{engines[-1]} / {engines[0]}"):
        table.add_column(name, justify="right")
    for (memory, batch), runs in cases.items():
        rates = {name: run["whole"]["output_tokens_per_s"] for name, run in runs.items()}
        cells = [f"{rates[name]:,.0f} ({runs[name]['concurrency']})" if name in runs else "-" for name in engines]
        has_both = engines[0] in runs and engines[-1] in runs
        table.add_row(memory, batch, *cells, f"{rates[engines[-1]] / rates[engines[0]]:.2f}" if has_both else "-")
    return table


def concurrency_text(run: dict[str, Any]) -> str:
    """Requests live at any time: "10", or "33 (max)"."""
    count = run["concurrency"]
    if not run.get("is_maximum"):
        return str(count)
    return "max" if count is None else f"{count} (max)"


def size_text(size: float) -> str:
    """Bytes in the largest unit of 1000 that leaves a whole one."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "KB")):
        if size >= 1000**power:
            return f"{size / 1000**power:.3g} {unit}"
    return f"{size:.0f} B"


def _cells(run: dict[str, Any]) -> list[str]:
    whole, steady = run["whole"], run["steady"]
    return [
        _memory(run),
        concurrency_text(run),
        f"{whole['output_tokens_per_s']:,.0f}",
        "-" if steady is None else f"{steady['output_tokens_per_s']:,.0f}",
        f"{whole['prompt_tokens_per_s']:,.0f}",
        "-" if steady is None else f"{steady['prompt_tokens_per_s']:,.0f}",
        _pair(run["ttft_s"], 1, 2),
        _pair(run["itl_s"], 1000, 1),
        _cache(run["cache"]),
        "-" if run["num_preemptions"] is None else str(run["num_preemptions"]),
        _share(run["memory"]["budget_share"]),
    ]


def _engine(run: dict[str, Any], load: dict[str, Any]) -> str:
    caching = run.get("prefix_caching")
    if not load.get("shared_prefix_len") or caching is None:
        return str(run["engine"])
    return f"{run['engine']}, {'prefix cache' if caching else 'no prefix cache'}"


def _memory(run: dict[str, Any]) -> str:
    size = run["kv_memory_bytes"]
    return f"{run['memory_fraction']:.0%}" if size is None else size_text(size)


def _pair(spread: dict[str, float] | None, factor: float, digits: int) -> str:
    if spread is None:
        return "-"
    return f"{spread['p50'] * factor:.{digits}f} / {spread['p99'] * factor:.{digits}f}"


def _cache(cache: dict[str, float] | None) -> str:
    if cache is None:
        return "-"
    return f"{size_text(cache['bytes_per_request'])} ({cache['ratio']:.0%})"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
