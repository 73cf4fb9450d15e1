"""Engines of a model that several ranks share: rank 0 leads, the others do the same, one step after the other.

Rank 0's engine is used as any other. It tells the others which requests came and which ended, and when to step; their
schedulers then come to the same batches, and their devices to the same collectives, without deciding anything: when a
request ends is rank 0's word alone, and so are the sampled tokens. The others call `follow`, or `generate` beside rank
0's `generate`.

What fails on one rank alone, such as an interrupt inside a forward pass, leaves the others waiting in a collective: the
engine is then lost, and so are the processes.
"""

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.inflight import HostTokens, InFlight
from hf_sparsekv.engine.output import RequestOutput
from hf_sparsekv.engine.prompt import Prompt
from hf_sparsekv.engine.request import FinishReason, Request
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import EngineError, ModelError, RequestError
from hf_sparsekv.hf.sharding import tp_mesh


def engine_class(model: object) -> type[Engine]:
    """The engine of this rank of a model."""
    mesh = tp_mesh(model)
    if mesh is None:
        return Engine
    return LeadingEngine if mesh.get_local_rank() == 0 else FollowingEngine


@dataclass(frozen=True)
class _Added:
    """A request that rank 0 has taken in."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    config: SparseKVConfig | None
    """None = the engine's own."""
    seed: int


@dataclass(frozen=True)
class _Ended:
    """A request that rank 0 has ended, for whatever reason."""

    request_id: str
    reason: FinishReason
    error: str | None


@dataclass(frozen=True)
class _Forgot:
    """Rank 0 has emptied its prefix cache: what a request finds there decides which steps it takes."""


@dataclass(frozen=True)
class _Step:
    """Rank 0 launches a forward pass now."""

    reads_last: bool
    """Whether it then reads the tokens of the one before."""


@dataclass(frozen=True)
class _Answer:
    """Rank 0's `generate` is over."""

    outputs: list[RequestOutput] | None
    problem: str | None = None


@dataclass(frozen=True)
class _Closed:
    """Rank 0's engine is closed."""


_Event = _Added | _Ended | _Forgot


@dataclass(frozen=True)
class _Message:
    """What happened since the last one, in order, and what comes now."""

    script: list[_Event]
    now: _Step | _Answer | _Closed


def _check_can_be_told(added: _Added) -> None:
    try:
        pickle.dumps(added)
    except Exception as error:  # whatever an object's own pickling raises
        raise RequestError(
            f"request {added.request_id!r} has a config that the other ranks cannot be told "
            f"({type(error).__name__}: {error}): define its scorer at the top of a module"
        ) from error


class _HeadCheck:
    """A forward pass that stores nothing and looks at the heads it is given."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self._expected = (num_heads, num_kv_heads, num_kv_heads)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Nothing of use."""
        found = (q.shape[1], k.shape[1], v.shape[1])
        if found != self._expected:
            raise ModelError(
                f"layer {layer_idx} of this rank has {found} query, key and value heads where {self._expected} are its "
                "part: the model's tensor-parallel plan does not split attention by heads"
            )
        return torch.zeros_like(q, memory_format=torch.contiguous_format)


class _SharedEngine(Engine):
    """What all ranks have in common."""

    def _initialise(self, kv_bytes: int) -> None:
        zero = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        with torch.inference_mode():
            self._runner.forward(_HeadCheck(self._shape.num_heads, self._shape.num_kv_heads), zero, zero, 0)
        super()._initialise(kv_bytes)

    def _read(self, step: InFlight) -> tuple[list[HostTokens], dict[str, str]]:
        """Scores may be bad on one rank only, whose heads they are: the request fails on all."""
        tokens, unscored = step.wait()
        return tokens, self._ranks.union(unscored) if step.scored else unscored


class LeadingEngine(_SharedEngine):
    """The engine of rank 0: used as any other, and the others do what it does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `Engine`; every rank makes its own at the same time, with the same arguments."""
        self._script: list[_Event] = []
        self._is_lost = False
        super().__init__(*args, **options)

    def _accept(self, request: Request, config: SparseKVConfig) -> None:
        own = None if config is self.config else config
        added = _Added(request.request_id, request.prompt_ids, request.params, own, request.seed)
        if own is not None:
            _check_can_be_told(added)
        super()._accept(request, config)
        self._script.append(added)

    def _forget(self, request: Request) -> RequestOutput:
        assert request.finish_reason is not None
        self._script.append(_Ended(request.request_id, request.finish_reason, request.error))
        return super()._forget(request)

    def _read(self, step: InFlight) -> tuple[list[HostTokens], dict[str, str]]:
        """An interrupt here, too, leaves the other ranks waiting where scores are to be compared."""
        self._is_lost = bool(step.scored)
        result = super()._read(step)
        self._is_lost = False
        return result

    def forget_prefixes(self) -> None:
        """See `Engine.forget_prefixes`."""
        super().forget_prefixes()
        self._script.append(_Forgot())

    def _launch(self) -> InFlight | None:
        if self._is_lost:
            raise EngineError("a step failed on rank 0, and the other ranks wait for it: start all processes again")
        self._is_lost = True  # unless it comes through
        self._tell(_Step(reads_last=self._in_flight is not None))
        in_flight = super()._launch()
        self._is_lost = False
        return in_flight

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | GenerationConfig | Sequence[SamplingParams | GenerationConfig] | None = None,
        *,
        config: SparseKVConfig | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """See `Engine.generate`; the other ranks call it too, and get the same outputs, or they follow."""
        try:
            outputs = super().generate(prompts, params, config=config, progress=progress)
        except BaseException as error:
            self._tell(_Answer(None, f"{type(error).__name__}: {error}"))
            raise
        self._tell(_Answer(outputs))
        return outputs

    def close(self) -> None:
        """See `Engine.close`; ends what the other ranks follow."""
        was_open = self._attention_before is not None and not self.thread.process.is_forked
        super().close()
        if was_open:
            with suppress(EngineError):  # who is gone need not be told
                self._tell(_Closed())

    def _tell(self, now: _Step | _Answer | _Closed) -> None:
        if self._is_lost and not isinstance(now, _Step):
            return  # they are not listening
        script, self._script = self._script, []
        self._ranks.share(_Message(script, now))


class FollowingEngine(_SharedEngine):
    """The engine of another rank: it does what rank 0's does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `Engine`; every rank makes its own at the same time, with the same arguments."""
        self._requests: dict[str, Request] = {}
        self._is_over = False
        super().__init__(*args, **options)

    def follow(self) -> None:
        """Do what rank 0's engine does, until that is closed.

        Raises:
            EngineError: rank 0 is gone.
        """
        while not self._is_over:
            self._obey()

    def close(self) -> None:
        """See `Engine.close`; waits until rank 0 closes its own.

        Raises:
            EngineError: rank 0 is gone.
        """
        if self._attention_before is None or self.thread.process.is_forked:
            return
        try:
            self.follow()
        finally:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; without waiting when something has gone wrong."""
        self._is_over |= kind is not None
        super().__exit__(kind, error, trace)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | GenerationConfig | Sequence[SamplingParams | GenerationConfig] | None = None,
        *,
        config: SparseKVConfig | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """What rank 0's `generate` returns; the arguments given there hold.

        Raises:
            EngineError: it failed there, or rank 0 is gone or has closed its engine.
        """
        while True:
            now = self._obey()
            if self._is_over:
                raise EngineError(f"rank 0 closed its engine while rank {self._ranks.rank} waits in generate()")
            if isinstance(now, _Answer):
                if now.outputs is None:
                    raise EngineError(f"generate() failed on rank 0: {now.problem}")
                return now.outputs

    def add_request(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse: requests are rank 0's."""
        self._refuse("add_request()")

    def abort(self, request_id: str) -> NoReturn:
        """Refuse: requests are rank 0's."""
        self._refuse("abort()")

    def stream(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse: requests are rank 0's."""
        self._refuse("stream()")

    def step(self) -> NoReturn:
        """Refuse: rank 0 says when."""
        self._refuse("step()")

    def forget_prefixes(self) -> NoReturn:
        """Refuse: the ranks' caches are emptied together, when rank 0 says so."""
        self._refuse("forget_prefixes()")

    def _refuse(self, call: str) -> NoReturn:
        raise RequestError(f"{call} on rank {self._ranks.rank}: rank 0 leads, call follow() here")

    def _obey(self) -> _Step | _Answer | _Closed:
        try:
            message: _Message = self._ranks.share()
        except EngineError:
            self._is_over = True
            raise
        self._is_over = isinstance(message.now, _Closed)
        for entry in message.script:
            if isinstance(entry, _Added):
                self._add(entry)
            elif isinstance(entry, _Ended):
                self._end(entry)
            else:
                self._scheduler.forget_prefixes()
        if isinstance(message.now, _Step):
            before = self._in_flight if message.now.reads_last else None
            self._in_flight = self._launch()
            if before is not None:
                self._collect(before)
        return message.now

    def _add(self, added: _Added) -> None:
        config = self.config if added.config is None else added.config
        request = self._groups.request_of(
            config, added.request_id, added.prompt_ids, added.params, seed=added.seed, is_streamed=False
        )
        self._accept(request, config)
        self._requests[added.request_id] = request

    def _end(self, ended: _Ended) -> None:
        request = self._requests.pop(ended.request_id)
        self._scheduler.finish(request, ended.reason, ended.error)
        self._leave(request)
        self._groups.leave(request)

    def _advance(self, request: Request, tokens: HostTokens, row: int, now: float, error: str | None) -> None:
        request.token_times.append(now)
        if error is None:  # else rank 0 ends it
            request.output_ids.append(tokens.ids[row])
