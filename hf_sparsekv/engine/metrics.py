"""EngineMetrics: what one engine has done and is doing, for Prometheus and for people. It knows no tensors."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hf_sparsekv.engine.request import FinishReason, Request
from hf_sparsekv.engine.scheduler import Scheduler

RATE_WINDOW_S = 10.0
"""Tokens per second are counted over this long a time."""

_PREFIX = "hf_sparsekv"
_TOKEN_TIMES_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_WAIT_TIMES_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class EngineMetrics:
    """Counts of one engine, in a registry of its own.

    Gauges are read when somebody asks; everything else is counted as it happens.

    Args:
        scheduler: whose requests and blocks are reported.
        clock: seconds, for the rates.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter) -> None:
        self.registry = CollectorRegistry()
        """To be served or pushed by any means of prometheus-client."""
        self._scheduler = scheduler
        pool = scheduler.pool
        self._gauge("requests_running", "Requests that hold blocks.", lambda: scheduler.num_running)
        self._gauge("requests_waiting", "Requests in the queue.", lambda: scheduler.num_waiting)
        self._gauge("blocks_free", "Blocks of the pool that no request holds.", lambda: pool.num_free)
        self._gauge("blocks_cached", "Blocks that hold a prefix to be shared, free or not.", lambda: pool.num_cached)
        self._gauge("blocks_total", "Blocks of the pool.", lambda: pool.num_usable)
        self._preemptions = self._counter("preemptions", "Requests that had to give their blocks back and start again.")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts that have been read.")
        self._cached = self._counter("prompt_tokens_cached", "Of these, tokens that came from the prefix cache.")
        self._hits = self._counter("prefix_hits", "Requests whose prompts began with something from the prefix cache.")
        self._output = self._counter("output_tokens", "Tokens generated.")
        self._finished = self._counter("requests_finished", "Requests that have ended, by reason.", ("reason",))
        for reason in FinishReason:
            self._finished.labels(reason.value)  # so that each is there from the start, as zero
        self._ttft = self._histogram("time_to_first_token", "From arrival to the first token.", _WAIT_TIMES_S)
        self._itl = self._histogram("inter_token_latency", "Between two tokens of a request.", _TOKEN_TIMES_S)
        self._queue = self._histogram("queue_time", "From arrival to the first forward pass.", _WAIT_TIMES_S)
        self._prompt_rate, self._output_rate = _Rate(clock), _Rate(clock)

    # --- what the engine tells ------------------------------------------------------------------------------------

    def observe_tokens(self, requests: Iterable[Request]) -> None:
        """Count one new token of each of these requests, and the times that it tells."""
        num_prompt = num_output = 0
        for request in requests:
            if request.finish_reason is FinishReason.ERROR:
                continue  # it failed in place of giving a token
            num_output += 1
            times = request.token_times
            if len(times) > 1:
                self._itl.observe(times[-1] - times[-2])
                continue
            num_prompt += request.prompt_length
            self._cached.inc(request.num_cached)
            self._hits.inc(request.num_cached > 0)
            self._ttft.observe(times[0] - request.arrival_s)
            self._queue.observe((request.started_s or times[0]) - request.arrival_s)
        if num_output:
            self._output.inc(num_output)
            self._output_rate.add(num_output)
        if num_prompt:
            self._prompt.inc(num_prompt)
            self._prompt_rate.add(num_prompt)

    def observe_preemptions(self, count: int) -> None:
        """Count requests that were preempted."""
        if count:
            self._preemptions.inc(count)

    def observe_end(self, reason: FinishReason) -> None:
        """Count a request that has ended."""
        self._finished.labels(reason.value).inc()

    # --- what is told ---------------------------------------------------------------------------------------------

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def snapshot(self) -> dict[str, Any]:
        """All but the histograms as numbers, and tokens per second over the last `RATE_WINDOW_S` seconds."""
        scheduler = self._scheduler
        return {
            "requests_running": scheduler.num_running,
            "requests_waiting": scheduler.num_waiting,
            "blocks_free": scheduler.pool.num_free,
            "blocks_cached": scheduler.pool.num_cached,
            "blocks_total": scheduler.pool.num_usable,
            "preemptions": self._value("preemptions"),
            "prompt_tokens": self._value("prompt_tokens"),
            "prompt_tokens_cached": self._value("prompt_tokens_cached"),
            "prefix_hits": self._value("prefix_hits"),
            "output_tokens": self._value("output_tokens"),
            "requests_finished": {
                reason.value: self._value("requests_finished", reason.value) for reason in FinishReason
            },
            "prompt_tokens_per_s": self._prompt_rate.per_second(),
            "output_tokens_per_s": self._output_rate.per_second(),
        }

    def _value(self, name: str, reason: str | None = None) -> int:
        value = self.registry.get_sample_value(f"{_PREFIX}_{name}_total", {"reason": reason} if reason else None)
        return int(value or 0)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(f"{_PREFIX}_{name}", text, registry=self.registry).set_function(read)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}_seconds", text, buckets=buckets, registry=self.registry)


class _Rate:
    """Events per second over the last while; added to by one thread, read by any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._events: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._start: float | None = None

    def add(self, count: int) -> None:
        with self._lock:
            now = self._forget()
            self._start = now if self._start is None else self._start
            self._events.append((now, count))
            self._sum += count

    def per_second(self) -> float:
        """Over the whole window, or over the time since the first event if that is shorter."""
        with self._lock:
            now = self._forget()
            if self._start is None or now <= self._start:
                return 0.0
            return self._sum / min(RATE_WINDOW_S, now - self._start)

    def _forget(self) -> float:
        now = self._clock()
        while self._events and self._events[0][0] <= now - RATE_WINDOW_S:
            self._sum -= self._events.popleft()[1]
        return now
