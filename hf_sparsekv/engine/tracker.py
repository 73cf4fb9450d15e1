"""Tracker: the host's side of every live request: when it stops, its text, and what its caller has seen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hf_sparsekv.engine.inflight import HostTokens
from hf_sparsekv.engine.memory import MemoryPlan
from hf_sparsekv.engine.output import RequestOutput, RequestReport, TokenLogprobs, report_of
from hf_sparsekv.engine.prompt import Prompt, shown_ids
from hf_sparsekv.engine.request import FinishReason, Request
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.engine.stopping import StopChecker
from hf_sparsekv.errors import ConfigError


@dataclass
class _Live:
    request: Request
    checker: StopChecker
    prompt_ids: tuple[int, ...]
    num_shown: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_blocks: int = 0


class ProgressBar:
    """Counts finished requests and shows output tokens per second."""

    def __init__(self, bar: "tqdm[None]") -> None:
        """A bar that stands at zero."""
        self._bar, self._tokens, self._start = bar, 0, time.perf_counter()

    def update(self, output: RequestOutput) -> None:
        """Take note of an output."""
        self._tokens += len(output.new_token_ids)
        if output.is_finished:
            seconds = max(time.perf_counter() - self._start, 1e-9)
            self._bar.set_postfix_str(f"{self._tokens / seconds:,.0f} tok/s", refresh=False)
            self._bar.update(1)


class Tracker:
    """Appends tokens, notices ends, and makes outputs."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_ids: tuple[int, ...],
        memory: MemoryPlan,
        element_bytes: int,
    ) -> None:
        """Nothing is live yet.

        Args:
            tokenizer: for text and stop strings; None = token ids only.
            stop_ids: the model's end-of-sequence tokens.
            memory: sizes, for the reports.
            element_bytes: of a key or value element.
        """
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._memory, self._element_bytes = memory, element_bytes
        self._live: dict[str, _Live] = {}

    def __iter__(self) -> Iterator[str]:
        """The ids of the live requests."""
        return iter(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def sampling_params(
        self, params: SamplingParams | GenerationConfig | None, default: GenerationConfig | None, prompt_length: int
    ) -> SamplingParams:
        """What a caller's parameters mean; None = `default`, and no more tokens than the engine's length leaves.

        Raises:
            ConfigError: neither, or options that the engine does not have.
        """
        if isinstance(params, SamplingParams):
            return params
        if not isinstance(params, GenerationConfig | None):
            raise ConfigError(f"params must be SamplingParams or a GenerationConfig: got {params!r}")
        if params is None:
            most = max(1, min(SamplingParams().max_tokens, self._memory.max_model_len - prompt_length))
            return SamplingParams.from_generation_config(default, self._stop_ids, max_tokens=most)
        return SamplingParams.from_generation_config(params, self._stop_ids)

    def checker(self, request: Request) -> StopChecker:
        """What will say when a request ends.

        Raises:
            ConfigError: stop strings without a tokenizer.
        """
        return StopChecker(request.params, self._stop_ids, self._tokenizer)

    def add(self, request: Request, checker: StopChecker) -> None:
        """Begin with a request."""
        self._live[request.request_id] = _Live(request, checker, tuple(request.prompt_ids))

    def append(self, request: Request, tokens: HostTokens, row: int, now: float) -> FinishReason | None:
        """Take in the next token of a request; why it ends with it, or None."""
        live, token = self._live[request.request_id], tokens.ids[row]
        request.output_ids.append(token)
        request.token_times.append(now)
        request.first_token_s = request.first_token_s or now
        if tokens.logprobs is not None and request.params.logprobs is not None:
            top = () if tokens.top is None else tuple(tokens.top[row][: request.params.logprobs])
            live.logprobs.append(TokenLogprobs(token_id=token, logprob=tokens.logprobs[row], top=top))
        return live.checker.append(token)

    def note_blocks(self, request_id: str) -> None:
        """Remember what a request holds, before it gives it back; nothing if no such request is live."""
        live = self._live.get(request_id)
        if live is not None and live.request.tables is not None:
            live.num_blocks = live.request.tables.num_blocks

    def output(self, request: Request) -> RequestOutput:
        """What is new since the last output of this request."""
        live = self._live[request.request_id]
        new_text = live.checker.new_text()  # first: a tokenizer may fail here, and nothing was shown then
        first, live.num_shown = live.num_shown, len(request.output_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt_ids=live.prompt_ids,
            token_ids=tuple(request.output_ids),
            new_token_ids=tuple(request.output_ids[first:]),
            text=live.checker.text,
            new_text=new_text,
            finish_reason=request.finish_reason,
            error=request.error,
            logprobs=tuple(live.logprobs) if request.params.logprobs is not None else None,
            report=self._report(request, live) if request.is_finished else None,
            cached_tokens=request.num_cached,
        )

    def finish(self, request: Request) -> RequestOutput:
        """The last output of a request; it is forgotten."""
        assert request.finish_reason is not None
        try:
            self._live[request.request_id].checker.finish(request.finish_reason)
        except Exception as problem:  # noqa: BLE001 (a tokenizer's: the request ends all the same)
            request.error = f"{type(problem).__name__}: {problem}"
        output = self.output(request)
        del self._live[request.request_id]
        return output

    @staticmethod
    def refused(name: str, prompt: Prompt, error: str) -> RequestOutput:
        """The output of a request that was never taken in."""
        return RequestOutput(
            request_id=name,
            prompt_ids=shown_ids(prompt),
            token_ids=(),
            new_token_ids=(),
            text=None,
            new_text=None,
            finish_reason=FinishReason.ERROR,
            error=error,
            logprobs=None,
            report=None,
        )

    @staticmethod
    @contextmanager
    def progress_bar(total: int, *, enabled: bool) -> Iterator[ProgressBar]:
        """A bar on standard error that counts finished requests."""
        with tqdm(total=total, unit="req", disable=not enabled) as bar:
            yield ProgressBar(bar)

    def _report(self, request: Request, live: _Live) -> RequestReport:
        memory = self._memory
        row = memory.row_bytes_of(request.plan)  # a configuration of its own has rows of its own size
        seen = request.prompt_length + len(request.output_ids)
        return report_of(
            request,
            request.finished_s or time.perf_counter(),
            live.num_blocks * memory.block_bytes + row if live.num_blocks else 0,
            memory.dense.dense_bytes(seen, element_bytes=self._element_bytes),
        )
