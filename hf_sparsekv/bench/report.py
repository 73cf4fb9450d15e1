"""The figures of a run: percentiles, rates over the whole of it and over its steady part, counts; all JSON-able.

No torch: numbers in, numbers out.
"""

from collections.abc import Iterable, Sequence
from math import floor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sparsekv.bench.workload import LoopRun, RequestTimes

PERCENTILES = (50, 90, 99)
FORMAT = 1
"""Of the JSON; a field that changes its meaning raises it."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of values in ascending order, linear between neighbours.

    Args:
        ordered: at least one value.
        percent: in [0, 100].
    """
    place = (len(ordered) - 1) * percent / 100
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Percentiles, mean and maximum by name; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    named = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {**named, "mean": sum(ordered) / len(ordered), "max": ordered[-1]}


def steady_part(run: "LoopRun") -> tuple[float, float] | None:
    """From the first finished request until fewer than `concurrency` are live; None when that is no time at all.

    Between the two, each end of a request is answered by a new one: whole cycles, without the ramp at the start, where
    every client reads its prompt at once, and without the drain at the end.
    """
    ends = sorted(request.token_s[-1] for request in run.requests if is_complete(request, run.output_len))
    if len(ends) < len(run.requests) or len(ends) <= run.concurrency:
        return None
    begin, end = ends[0], ends[len(ends) - run.concurrency]
    return (begin, end) if end > begin else None


def rates(run: "LoopRun", begin: float, end: float) -> dict[str, float]:
    """Tokens and tokens per second between two times; a prompt counts when its first token is there."""
    # What happened at `begin` itself belongs to the time before.
    output_tokens = sum(begin < t <= end for request in run.requests for t in request.token_s)
    read = [r.prompt_tokens for r in run.requests if r.token_s and begin < r.token_s[0] <= end]
    seconds = end - begin
    return {
        "seconds": seconds,
        "output_tokens": output_tokens,
        "prompt_tokens": sum(read),
        "output_tokens_per_s": output_tokens / seconds,
        "prompt_tokens_per_s": sum(read) / seconds,
    }


def is_complete(request: "RequestTimes", output_len: int) -> bool:
    """Whether a request gave every token that it was asked for."""
    return request.error is None and len(request.token_s) == output_len


def summarize(run: "LoopRun") -> dict[str, Any]:
    """Every figure of a run; times in seconds."""
    steady = steady_part(run)
    answered = [request for request in run.requests if request.token_s]
    failed = [request for request in run.requests if not is_complete(request, run.output_len)]
    gaps = (b - a for r in answered for a, b in zip(r.token_s, r.token_s[1:], strict=False))
    return {
        "concurrency": run.concurrency,
        "num_requests": len(run.requests),
        "num_failed": len(failed),
        "first_error": next((request.error for request in failed if request.error), None),
        "whole": rates(run, run.begin_s, run.end_s),
        "steady": None if steady is None else rates(run, *steady),
        "ttft_s": spread(r.token_s[0] - r.handed_in_s for r in answered),
        "itl_s": spread(gaps),
        "request_s": spread(r.token_s[-1] - r.handed_in_s for r in answered),
        "num_steps": run.num_steps,
        "num_preemptions": _total([request.num_preemptions for request in run.requests]),
        "cache": _cache(run.requests),
    }


def busy_share(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Part of the time from `begin` to `end` that at least one of the intervals (first, last) covers, in [0, 1]."""
    covered, reached = 0.0, begin
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, end)
        if last > first:
            covered, reached = covered + last - first, last
    return covered / (end - begin)


def _cache(requests: Sequence["RequestTimes"]) -> dict[str, Any] | None:
    """Mean bytes of a request's cache at its end, and their part of a dense cache's."""
    pairs = [(r.cache_bytes, r.dense_cache_bytes) for r in requests]
    known = [(ours, dense) for ours, dense in pairs if ours is not None and dense is not None]
    if not known:
        return None
    ours, dense = (sum(column) / len(known) for column in zip(*known, strict=True))
    return {"bytes_per_request": ours, "dense_bytes_per_request": dense, "ratio": ours / dense}


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
