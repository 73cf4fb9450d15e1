"""Workload: random requests of one size, and the closed loop that keeps a number of them live in an engine.

A closed loop has c clients: each hands in a request, waits for its last token, and hands in the next at once. Times are
the caller's, taken with one clock before `add_request` and after each `step`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hf_sparsekv.engine.output import RequestOutput
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import ConfigError

MEASURED, WARMUP, DOCUMENTS = 0, 1, 2
"""Streams of tokens: those of the warm-up differ from the measured ones, or a cache of prefixes would make these look
cheap; documents, which several prompts share, differ from both."""

Finished = Callable[[int], None]
"""Takes the output tokens of a request that has ended."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of random token ids, all of one size; number i has the same prompt in every run.

    Those that share a document begin with the same tokens, and differ after it: many questions about one text.
    """

    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """Tokens generated for each; end-of-sequence tokens are ignored."""
    vocab_size: int
    seed: int = 0
    stream: int = MEASURED
    document_len: int = 0
    """Tokens at the beginning of each prompt that it shares with others."""
    num_questions: int | None = None
    """Requests in a row that share a document; None = all."""

    def __post_init__(self) -> None:
        """Every size must be positive."""
        for name in ("input_len", "output_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)}")
        if not 0 <= self.document_len < self.input_len:
            raise ConfigError(
                f"a shared prefix of {self.document_len} tokens in prompts of {self.input_len}: make it shorter"
            )
        if self.num_questions is not None and (self.num_questions < 1 or self.document_len == 0):
            raise ConfigError(
                f"{self.num_questions} questions about documents of {self.document_len} tokens: give at least 1 of both"
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0: got {self.seed}")

    def prompt(self, index: int) -> list[int]:
        """Token ids of request number `index`."""
        question = self._tokens((self.seed, self.stream, index), self.input_len - self.document_len)
        if self.document_len == 0:
            return question
        document = 0 if self.num_questions is None else index // self.num_questions
        return self._tokens((self.seed, self.stream, document, DOCUMENTS), self.document_len) + question

    def _tokens(self, key: tuple[int, ...], count: int) -> list[int]:
        # Not torch's generator: on a CPU it looks at 32 bits of its seed only.
        ids: list[int] = np.random.default_rng(key).integers(self.vocab_size, size=count).tolist()
        return ids

    @property
    def params(self) -> SamplingParams:
        """Greedy, exactly `output_len` tokens."""
        return SamplingParams(max_tokens=self.output_len, ignore_eos=True)

    @property
    def warmup(self) -> "Workload":
        """Requests of the same size with other prompts.

        Of the same size to the last token: what an engine prepares for a length it prepares before the clock starts.
        """
        return replace(self, stream=WARMUP)


@dataclass(kw_only=True)
class RequestTimes:
    """What a client saw of one request; times in seconds of one clock."""

    prompt_tokens: int
    handed_in_s: float
    token_s: list[float] = field(default_factory=list)
    """When each output token was there."""
    cache_bytes: int | None = None
    """Blocks and bookkeeping at the end."""
    dense_cache_bytes: int | None = None
    """Keys and values of the same tokens in a dense cache."""
    num_preemptions: int | None = None
    cached_tokens: int = 0
    """Of the prompt, those that came from a prefix cache."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """One run of a closed loop."""

    concurrency: int
    output_len: int
    begin_s: float
    end_s: float
    requests: list[RequestTimes]
    """In the order in which they were handed in."""
    num_steps: int | None
    """Calls of `step`; None where the server does not tell."""


class Server(Protocol):
    """What the loop needs of an engine."""

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> str:
        """Queue a request; its id."""
        ...

    def step(self) -> list[RequestOutput]:
        """Move on; what is new."""
        ...


def run_closed_loop(
    server: Server,
    workload: Workload,
    *,
    concurrency: int,
    num_requests: int,
    on_finish: Finished | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoopRun:
    """Run `num_requests` requests, `concurrency` of them live as long as there are so many.

    Args:
        server: an engine without live requests.
        workload: what is asked.
        concurrency: clients, at least 1.
        num_requests: requests in all.
        on_finish: called after each request.
        clock: seconds.
    Raises:
        RequestError: the engine cannot take such a request.
    """
    prompts = [workload.prompt(index) for index in range(num_requests)]  # before the clock starts
    params = workload.params
    requests: list[RequestTimes] = []
    live: dict[str, RequestTimes] = {}
    num_steps, begin = 0, clock()
    while live or len(requests) < num_requests:
        while len(live) < concurrency and len(requests) < num_requests:
            prompt = prompts[len(requests)]
            times = RequestTimes(prompt_tokens=len(prompt), handed_in_s=clock())
            live[server.add_request(prompt, params)] = times
            requests.append(times)
        outputs, now = server.step(), clock()
        num_steps += 1
        for output in outputs:
            take(output, live[output.request_id], now)
            if output.is_finished:
                del live[output.request_id]
                if on_finish is not None:
                    on_finish(len(output.token_ids))
    return LoopRun(
        concurrency=concurrency,
        output_len=workload.output_len,
        begin_s=begin,
        end_s=clock(),
        requests=requests,
        num_steps=num_steps,
    )


def take(output: RequestOutput, times: RequestTimes, now: float) -> None:
    """Note what an output says about its request."""
    times.token_s.extend([now] * len(output.new_token_ids))
    if output.report is not None:
        times.cache_bytes = output.report.cache_bytes
        times.dense_cache_bytes = output.report.dense_cache_bytes
        times.num_preemptions = output.report.num_preemptions
    times.cached_tokens = output.cached_tokens
    times.error = output.error
