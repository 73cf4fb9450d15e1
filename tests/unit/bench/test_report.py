"""Percentiles are numpy's, rates count what happened in their window, and the steady part is whole cycles."""

import numpy as np
import pytest

from hf_sparsekv.bench.report import busy_share, percentile, rates, spread, steady_part, summarize
from hf_sparsekv.bench.workload import LoopRun, RequestTimes


def times(handed_in, *tokens, **more):
    return RequestTimes(prompt_tokens=10, handed_in_s=handed_in, token_s=list(tokens), **more)


def loop_run(requests, concurrency, output_len=3):
    end = max(request.token_s[-1] for request in requests if request.token_s)
    return LoopRun(
        concurrency=concurrency, output_len=output_len, begin_s=0.0, end_s=end, requests=requests, num_steps=9
    )


@pytest.fixture
def waves():
    """Three waves of two clients, a token a second, three tokens a request."""
    return loop_run([times(t, t + 1, t + 2, t + 3) for t in (0.0, 0.0, 3.0, 3.0, 6.0, 6.0)], concurrency=2)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_percentiles_are_those_of_numpy(count, percent):
    values = np.random.default_rng(count).lognormal(size=count)
    assert percentile(sorted(values.tolist()), percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_a_spread_has_percentiles_mean_and_maximum():
    values = np.random.default_rng(0).exponential(size=500)
    found = spread(values.tolist())
    assert list(found) == ["p50", "p90", "p99", "mean", "max"]
    assert list(found.values()) == pytest.approx([*np.percentile(values, [50, 90, 99]), values.mean(), values.max()])
    assert spread([]) is None


def test_the_steady_part_is_whole_cycles(waves):
    # The first wave is the ramp; from its end on, two waves were read and decoded to their ends.
    assert steady_part(waves) == (3.0, 9.0)
    steady = rates(waves, 3.0, 9.0)
    assert (steady["output_tokens"], steady["prompt_tokens"]) == (4 * 3, 4 * 10)
    assert (steady["output_tokens_per_s"], steady["prompt_tokens_per_s"]) == (12 / 6, 40 / 6)


def test_the_steady_part_ends_with_the_first_place_that_stays_empty():
    # Staggered: ends at 3, 4, 6, 7, 9; at 7 one of two clients has nothing more to hand in.
    run = loop_run([times(t, t + 1, t + 2, t + 3) for t in (0.0, 1.0, 3.0, 4.0, 6.0)], concurrency=2)
    assert steady_part(run) == (3.0, 7.0)


def test_there_is_no_steady_part_without_a_second_wave_or_with_failures(waves):
    assert steady_part(loop_run(waves.requests[:2], concurrency=2)) is None
    failed = [*waves.requests[:-1], times(6.0, 7.0, error="boom")]
    assert steady_part(loop_run(failed, concurrency=2)) is None


def test_a_summary_counts_everything_once(waves):
    figures = summarize(waves)
    assert figures["whole"] == {
        "seconds": 9.0,
        "output_tokens": 18,
        "prompt_tokens": 60,
        "output_tokens_per_s": 2.0,
        "prompt_tokens_per_s": 60 / 9,
    }
    assert (figures["num_requests"], figures["num_failed"], figures["num_steps"]) == (6, 0, 9)
    assert figures["ttft_s"]["p99"] == figures["itl_s"]["p50"] == 1.0
    assert figures["request_s"]["max"] == 3.0
    assert figures["cache"] is figures["num_preemptions"] is None


def test_failed_requests_are_named_and_short_ones_count_as_failed():
    requests = [times(0.0, 1.0, 2.0, 3.0), times(0.0, 1.0), times(0.0, error="too long"), times(0.0, 1.0, 2.0, 3.0)]
    figures = summarize(loop_run(requests, concurrency=4))
    assert (figures["num_failed"], figures["first_error"]) == (2, "too long")
    assert figures["whole"]["output_tokens"] == 7


def test_cache_bytes_are_means_and_preemptions_a_sum():
    sizes = [{"cache_bytes": 100 * i, "dense_cache_bytes": 1000, "num_preemptions": i} for i in (1, 3)]
    figures = summarize(loop_run([times(0.0, 1.0, 2.0, 3.0, **size) for size in sizes], concurrency=2))
    assert figures["cache"] == {"bytes_per_request": 200.0, "dense_bytes_per_request": 1000.0, "ratio": 0.2}
    assert figures["num_preemptions"] == 4


def test_busy_time_is_the_union_of_the_intervals():
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 1000, size=40)
    intervals = [(int(s), int(s + d)) for s, d in zip(starts, rng.integers(1, 30, size=40), strict=True)]
    is_busy = np.zeros(1100, dtype=bool)
    for first, last in intervals:
        is_busy[first:last] = True
    assert busy_share(intervals, 100, 900) == pytest.approx(is_busy[100:900].mean())
    assert busy_share([], 0, 1) == 0.0
