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
            table.add_row(_engine(run, load), _memory(run), str(run["concurrency"]), "[red]failed[/]")
        else:
            table.add_row(
                _engine(run, load), *_cells(run), *[_share((run.get("gpu_busy") or {}).get("share"))] * has_busy
            )
    return table


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
        str(run["concurrency"]),
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
