"""What a prefix cache was good for in a run, and what it gains over the same run without it. No torch."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hf_sparsekv.bench.report import spread

if TYPE_CHECKING:
    from hf_sparsekv.bench.workload import RequestTimes


def prefix_figures(requests: Sequence["RequestTimes"]) -> dict[str, Any]:
    """Hits, tokens that needed no computing, and the times to the first token of hits and of the others; seconds."""
    answered = [request for request in requests if request.token_s]
    prompts = sum(request.prompt_tokens for request in answered)
    cached = sum(request.cached_tokens for request in answered)
    return {
        "num_hits": sum(request.cached_tokens > 0 for request in answered),
        "cached_tokens": cached,
        "hit_rate": cached / prompts if prompts else 0.0,
        "ttft_hit_s": spread(r.token_s[0] - r.handed_in_s for r in answered if r.cached_tokens),
        "ttft_miss_s": spread(r.token_s[0] - r.handed_in_s for r in answered if not r.cached_tokens),
    }


def gains(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the cache gains where the same load ran with and without it.

    Returns:
        Of each such case: "ttft", by what factor a hit's first token comes sooner (p50; None without hits), and
        "throughput", by what factor output tokens per second rise.
    """
    cases: dict[tuple[Any, ...], dict[bool, dict[str, Any]]] = {}
    for run in runs:
        if "error" not in run and run.get("prefix_caching") is not None:
            key = run["engine"], run["kv_memory_bytes"], run["concurrency"]
            cases.setdefault(key, {})[run["prefix_caching"]] = run
    return [
        {"engine": key[0], "kv_memory_bytes": key[1], "concurrency": key[2], **_gain(both[True], both[False])}
        for key, both in cases.items()
        if len(both) == 2
    ]


def gain_text(gain: dict[str, Any]) -> str:
    """One line for people."""
    hit = "no prompt was hit" if gain["ttft"] is None else f"first token of a hit {gain['ttft']:.1f}x sooner"
    return f"{gain['engine']} at {gain['concurrency']}: with the prefix cache {hit}, {gain['throughput']:.2f}x tokens/s"


def _gain(cached: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    hit, before = cached["prefix"]["ttft_hit_s"], plain["ttft_s"]
    rates = [run["whole"]["output_tokens_per_s"] for run in (cached, plain)]
    return {
        "ttft": None if hit is None or before is None else before["p50"] / hit["p50"],
        "throughput": rates[0] / rates[1],
    }
