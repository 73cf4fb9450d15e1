"""What a request comes back with."""

import itertools
from dataclasses import dataclass, field

from hf_sparsekv.engine.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one output token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens, best first."""


@dataclass(frozen=True, kw_only=True)
class RequestReport:
    """Times and sizes of one request."""

    queue_s: float | None
    """From arrival to the first forward pass; None when it never ran."""
    ttft_s: float | None
    """From arrival to the first token on the host."""
    itl_s: tuple[float, ...]
    """Between tokens."""
    total_s: float
    cache_bytes: int
    """Blocks and bookkeeping at the end; blocks of a shared prefix count in each request that has them."""
    dense_cache_bytes: int
    """Keys and values of the same tokens in a dense cache."""
    num_preemptions: int


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request, finished or on its way."""

    request_id: str
    prompt_ids: tuple[int, ...] = field(repr=False)
    token_ids: tuple[int, ...]
    """All output tokens so far."""
    new_token_ids: tuple[int, ...]
    """Those since the last output of this request."""
    text: str | None
    """Output text; None without a tokenizer."""
    new_text: str | None
    finish_reason: FinishReason | None
    """None while running."""
    error: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    report: RequestReport | None
    """Once finished."""
    cached_tokens: int = 0
    """Of the prompt, those whose keys and values came from the prefix cache."""

    @property
    def is_finished(self) -> bool:
        """Whether this is the last output of the request."""
        return self.finish_reason is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token in seconds."""
        return self.report.ttft_s if self.report else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Times between tokens in seconds."""
        return self.report.itl_s if self.report else ()


def times_between(times: list[float]) -> tuple[float, ...]:
    """Differences of neighbours."""
    return tuple(later - earlier for earlier, later in itertools.pairwise(times))


def report_of(request: Request, now: float, cache_bytes: int, dense_bytes: int) -> RequestReport:
    """The report of a request that has just finished."""
    start = request.arrival_s
    return RequestReport(
        queue_s=None if request.started_s is None else request.started_s - start,
        ttft_s=None if request.first_token_s is None else request.first_token_s - start,
        itl_s=times_between(request.token_times),
        total_s=now - start,
        cache_bytes=cache_bytes,
        dense_cache_bytes=dense_bytes,
        num_preemptions=request.num_preemptions,
    )
