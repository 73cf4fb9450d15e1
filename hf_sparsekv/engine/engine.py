"""Engine: many requests at once on one model, each with its own sparse cache in one shared pool of blocks.

Three phases: *initialise* (share the memory out, once), *prepare step* (scheduler and tables, on the host), *sparsify*
(inside the forward pass, on the device). A step is launched before the tokens of the step before it are read, so the
host never keeps the device waiting; a request that ends is noticed one step late, and its extra token is dropped.
"""

import itertools
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from textwrap import shorten
from types import TracebackType

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.batch import BatchBuilder
from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.groups import Groups
from hf_sparsekv.engine.inflight import BAD_LOGITS, HostTokens, InFlight
from hf_sparsekv.engine.interrupts import holding_interrupts, one_step
from hf_sparsekv.engine.memory import MemoryPlan
from hf_sparsekv.engine.metrics import EngineMetrics
from hf_sparsekv.engine.output import RequestOutput
from hf_sparsekv.engine.ownership import Uncopied
from hf_sparsekv.engine.prefix_cache import PrefixCache
from hf_sparsekv.engine.profile import kv_bytes_available
from hf_sparsekv.engine.prompt import Prompt, token_ids
from hf_sparsekv.engine.request import FinishReason, Request
from hf_sparsekv.engine.runner import Runner
from hf_sparsekv.engine.sampler import SamplerState
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.engine.scheduler import Scheduler
from hf_sparsekv.engine.stream import EngineThread
from hf_sparsekv.engine.tracker import Tracker
from hf_sparsekv.errors import CacheError, RequestError
from hf_sparsekv.hf.models import check_model, generation_stop_ids, model_shape, rope_inv_freq, text_config
from hf_sparsekv.hf.paged import use_paged_attention
from hf_sparsekv.parallel.ranks import ranks_of
from hf_sparsekv.plan import LayerPlan


class Engine(Uncopied):
    """Continuous batching with a sparse cache; use it as a context manager, or call `close` at the end."""

    def __new__(cls, model: object = None, *args: object, **kwargs: object) -> "Engine":
        """An engine of the kind that this rank of the model needs, see `hf_sparsekv.engine.sharded`."""
        from hf_sparsekv.engine.sharded import engine_class  # which derives from this one

        return object.__new__(engine_class(model) if cls is Engine else cls)

    def __init__(
        self,
        model: PreTrainedModel,
        config: SparseKVConfig | None = None,
        engine_config: EngineConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Initialise: measure what the model needs, reserve the block pool and the bookkeeping.

        Args:
            model: a causal language model, on its device; while the engine is open its attention is the engine's.
            config: the sparse configuration of requests that bring none; defaults if None.
            engine_config: memory and batch sizes; defaults if None.
            tokenizer: for text prompts, output text and stop strings.
        Raises:
            ConfigError: the memory does not hold one request.
            ModelError: no model, or one with a feature that a sparse cache does not support.
        """
        check_model(model)
        self.config, self.options = config or SparseKVConfig(), engine_config or EngineConfig()
        self.model, self.tokenizer = model, tokenizer
        whole = model_shape(model.config)
        self._ranks = ranks_of(model, whole)
        self._shape = self._ranks.local_shape(whole)
        self._vocab_size, self._stop_ids = text_config(model.config).vocab_size, generation_stop_ids(model)
        self._in_flight: InFlight | None = None
        self._stepping = threading.Lock()
        self._ids = itertools.count()
        self._attention_before: str | None = use_paged_attention(model)
        self._runner = Runner(model, self._shape)
        try:
            self._runner.configure(self.options)
            self._initialise(self._ranks.least(kv_bytes_available(self._runner, self.options)))
        except BaseException:
            self._restore_model()
            raise
        self.metrics, self.thread = EngineMetrics(self._scheduler), EngineThread(self, self._runner.on_device)

    @torch.inference_mode(False)  # what is made in inference mode could not be written to outside it
    def _initialise(self, kv_bytes: int) -> None:
        """Share the memory out, and reserve it."""
        model, shape, options = self.model, self._shape, self.options
        self.memory = memory = MemoryPlan.build(
            LayerPlan.build(self.config, shape),
            LayerPlan.build(SparseKVConfig(num_full_layers=shape.num_layers), shape),
            options,
            kv_bytes=kv_bytes,
            element_bytes=model.dtype.itemsize,
            model_length=text_config(model.config).max_position_embeddings,
            sampler_row_bytes=SamplerState.row_bytes(len(self._stop_ids)),
        )
        self._pages = PagePool(
            memory.num_blocks, shape.num_kv_heads, memory.block_size, shape.head_dim, model.dtype, model.device
        )
        size, count = memory.block_size, memory.num_blocks
        self._blocks = PrefixCache(count, size) if options.prefix_caching else BlockPool(count)
        self._scheduler = Scheduler(
            self._blocks,
            block_size=memory.block_size,
            max_num_seqs=memory.num_rows,
            max_batch_tokens=options.max_batch_tokens,
            prefill_chunk_tokens=options.prefill_chunk_tokens,
            prefill_target_tokens=options.prefill_target_tokens,
            reserve_output_tokens=options.reserve_output_tokens,
            max_model_len=memory.max_model_len,
        )
        inv_freq = rope_inv_freq(model.config, shape.head_dim)
        inv_freq = None if inv_freq is None else inv_freq.to(model.device)
        self._builder = BatchBuilder(self._pages, inv_freq, model.device, self._ranks.heads)
        self._tracker = Tracker(self.tokenizer, self._stop_ids, memory, model.dtype.itemsize)
        self._groups = Groups(
            self.config,
            memory,
            vocab_size=self._vocab_size,
            device=model.device,
            stop_ids=self._stop_ids,
            forget=self._runner.forget,
            same_tokens=self._ranks.same_tokens,
        )
        self._runner.prepare(self._pages, self._groups.own)

    # --- requests -----------------------------------------------------------------------------------------------

    @holding_interrupts
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        config: SparseKVConfig | None = None,
        request_id: str | None = None,
        stream: bool = True,
    ) -> str:
        """Queue a request; its id.

        Args:
            prompt: token ids, or text if the engine has a tokenizer.
            params: how to sample and when to stop; None = the model's generation configuration, and 256 tokens or what
                `max_model_len` leaves.
            config: its own sparse configuration; default the engine's. Every other one costs `memory.num_rows` rows
                of `memory.row_bytes_of(its plan)` bytes that `kv_memory_bytes` does not count, and CUDA graphs of its
                own. They stay for a while after its last request: `groups.MAX_IDLE` unused ones at the most when
                another is made.
            request_id: a name of your own; default "0", "1", ...
            stream: let `step` return an output for every token; False = one at the end.
        Raises:
            RequestError: no such tokens, empty, too long, or an id in use.
            ConfigError: sampling options that are wrong or that the engine does not have.
        """
        came = self.thread.arrival_s or time.perf_counter()  # before a tokenizer takes its time
        self._check_open("add_request()")
        name = next(n for n in map(str, self._ids) if n not in self._tracker) if request_id is None else request_id
        if not isinstance(name, str):
            raise RequestError(f"request_id must be a str: got {name!r}")
        ids = token_ids(name, prompt, self.tokenizer, self._vocab_size)
        sampling = self._tracker.sampling_params(params, self.model.generation_config, len(ids))
        config = self.config if config is None else config
        seed = sampling.request_seed(name)
        request = self._groups.request_of(config, name, ids, sampling, seed=seed, is_streamed=stream, arrival_s=came)
        checker = self._tracker.checker(request)
        self._accept(request, config)
        self._tracker.add(request, checker)
        return name

    def _accept(self, request: Request, config: SparseKVConfig) -> None:
        self._scheduler.add(request)
        try:
            self._groups.enter(request, config)
        except BaseException:
            self._scheduler.abort(request.request_id)  # no memory for the rows of its configuration
            raise

    @holding_interrupts
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; what it had so far, or None when no such request is live."""
        if self.thread.is_elsewhere:
            return self.thread.abort(request_id)
        self._tracker.note_blocks(request_id)
        request = self._scheduler.abort(request_id)
        if request is None:
            return None
        output = self._forget(request)
        self.thread.note_aborted(output)
        return output

    @holding_interrupts
    def _abort_all(self) -> None:
        for request_id in list(self._tracker):
            self.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return self._scheduler.has_unfinished

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, as after a change of the model's weights; RequestError while requests are live."""
        self._check_open("forget_prefixes()")
        self._scheduler.forget_prefixes()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | GenerationConfig | Sequence[SamplingParams | GenerationConfig] | None = None,
        *,
        config: SparseKVConfig | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Run prompts to their ends; outputs in the order of the prompts.

        A prompt that cannot be served gives an output with finish reason "error"; the others are not disturbed.

        Args:
            prompts: token ids or texts.
            params: for all, or one each.
            config: sparse configuration for all of them; default the engine's.
            progress: show a progress bar on standard error.
        Raises:
            RequestError: other requests are running, or one text in place of a list of prompts.
            ConfigError: as `add_request`; none of the prompts is run then.
        """
        self._check_open("generate()")
        if self.has_unfinished:
            raise RequestError("generate() while other requests are running: use add_request() and step()")
        if isinstance(prompts, str):
            raise RequestError(f"generate() takes a list of prompts: got one text, {shorten(prompts, 60)!r}")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(each)} sampling parameters: give one, or one each")
        names = [f"generate-{next(self._ids)}" for _ in prompts]
        outputs: dict[str, RequestOutput] = {}
        try:
            for name, prompt, one in zip(names, prompts, each, strict=True):
                try:
                    self.add_request(prompt, one, config=config, request_id=name, stream=False)
                except RequestError as error:
                    outputs[name] = self._tracker.refused(name, prompt, str(error))
            with self._tracker.progress_bar(len(names), enabled=progress) as bar:
                while self.has_unfinished:
                    for output in self.step():
                        bar.update(output)
                        if output.is_finished:
                            outputs[output.request_id] = output
        except BaseException:
            self._abort_all()  # such as an interrupt: nobody could end them afterwards
            raise
        return [outputs[name] for name in names]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        config: SparseKVConfig | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request beside others: `async for output in engine.stream(...)`; see `EngineThread.stream`.

        While a stream is open, a background thread steps the engine. `thread.iterate` is for code without a loop.
        """
        return self.thread.stream(prompt, params, config=config, request_id=request_id)

    # --- one step -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Launch one forward pass, then read the tokens of the one before; outputs of requests that moved on.

        What no request alone can be blamed for ends all of them: a pass that raises, or Ctrl-C, at the step's end.
        """
        self._check_open("step()")
        with one_step(self._stepping) as interrupts:
            try:
                before, self._in_flight = self._in_flight, self._launch()
                outputs = [] if before is None else self._collect(before)
                interrupts.raise_noted()
            except BaseException:
                self._abort_all()  # what comes next counts on tokens that are lost
                raise
        if self._in_flight is not None and not self._scheduler.has_unfinished:
            self._in_flight = None  # nobody waits for its tokens
        return outputs

    def _launch(self) -> InFlight | None:
        plan = self._scheduler.schedule()
        for request in plan.preempted:
            self._leave(request)
        self.metrics.observe_preemptions(len(plan.preempted))
        if plan.is_empty:
            return None
        now = time.perf_counter()
        for chunk in plan.prefill:
            chunk.request.started_s = chunk.request.started_s or now
        batch = self._builder.build(plan, self._groups)
        tokens = self._runner.run(batch)
        in_flight = InFlight(batch, tokens)
        for part in batch.groups:
            part.group.feed_known()
            for entry in part.sampled:
                if entry.request.is_fully_scheduled:
                    part.group.retire(entry.request)
        return in_flight

    def _collect(self, step: InFlight) -> list[RequestOutput]:
        groups, unscored = self._read(step)
        outputs, advanced, now = [], [], time.perf_counter()
        for sampled, tokens in zip(step.sampled, groups, strict=True):
            for row, entry in enumerate(sampled):
                request = entry.request
                if request.is_finished or entry.output_index < len(request.output_ids):
                    continue
                error = BAD_LOGITS if tokens.is_bad[row] else unscored.get(request.request_id)
                output = self._advance(request, tokens, row, now, error)
                advanced.append(request)
                if output is not None:
                    outputs.append(output)
        self.metrics.observe_tokens(advanced)
        return outputs

    def _read(self, step: InFlight) -> tuple[list[HostTokens], dict[str, str]]:
        return step.wait()

    def _advance(
        self, request: Request, tokens: HostTokens, row: int, now: float, error: str | None
    ) -> RequestOutput | None:
        """Take one token in; the request's output."""
        reason = FinishReason.ERROR
        if error is None:
            try:
                end = self._tracker.append(request, tokens, row, now)
                if end is None:
                    return self._tracker.output(request) if request.is_streamed else None
                reason = end
            except Exception as problem:  # noqa: BLE001 (a tokenizer's problem is this request's alone)
                error = f"{type(problem).__name__}: {problem}"
        self._tracker.note_blocks(request.request_id)
        self._scheduler.finish(request, reason, error)
        return self._forget(request)

    # --- the rest -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End what is live, give the model its attention back, let go of the memory; a second call does nothing."""
        self.thread.close()
        if self._attention_before is None or self.thread.process.is_forked:
            return
        self._abort_all()
        self._restore_model()
        self._in_flight = None
        self._groups.clear()
        del self._pages, self._builder

    def _restore_model(self) -> None:
        assert self._attention_before is not None
        self._runner.close()
        self.model.set_attn_implementation(self._attention_before)
        self._attention_before = None

    def __enter__(self) -> "Engine":
        """The engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _leave(self, request: Request) -> None:
        self._groups[request.group].retire(request)
        self._builder.forget(request)

    def _forget(self, request: Request) -> RequestOutput:
        """The last output of a request that has ended."""
        self._leave(request)
        self._groups.leave(request)
        request.finished_s = time.perf_counter()
        assert request.finish_reason is not None
        self.metrics.observe_end(request.finish_reason)
        return self._tracker.finish(request)

    def _check_open(self, call: str) -> None:
        if self._attention_before is None:
            raise CacheError("the engine is closed: make a new one")
        self.thread.give_way(call)
