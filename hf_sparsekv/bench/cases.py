"""Cases: every engine, memory size and concurrency of a bench, one after the other on one loaded model."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_sparsekv.bench.baseline import NOTES, run_generate_batch
from hf_sparsekv.bench.busy import decode_busy_share
from hf_sparsekv.bench.machine import MemoryWatch, provenance
from hf_sparsekv.bench.report import FORMAT, summarize
from hf_sparsekv.bench.sharing import prefix_figures
from hf_sparsekv.bench.workload import Finished, Workload, run_closed_loop
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.errors import ConfigError, SparseKVError
from hf_sparsekv.hf.models import model_shape, text_config
from hf_sparsekv.plan import LayerPlan

KINDS = ("dense", "sparse", "transformers")
DEFAULT_CYCLES = 4
"""Requests per client when no number is given."""

Watch = Callable[[str, int], AbstractContextManager[Finished]]
"""Takes a title and a number of requests; what is inside calls back for each request that ends."""


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What a bench runs."""

    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """Tokens generated for each."""
    seed: int
    kinds: tuple[str, ...]
    """Of `KINDS`: our engine with every layer full, our engine with `method`, transformers' `generate_batch`."""
    concurrencies: tuple[int | None, ...]
    """Requests live at any time; None = as many as the engine's memory admits at once."""
    kv_memories: tuple[int | None, ...]
    """Bytes of the cache; None = the engine's memory fraction."""
    method: SparseKVConfig
    engine: EngineConfig
    """Its `kv_memory_bytes` and `max_model_len` are set for each case."""
    num_requests: int | None = None
    """Measured requests of each case; None = `DEFAULT_CYCLES` times the concurrency."""
    num_warmup: int | None = None
    """Requests before the clock starts, at most as many live as in the case; None = the concurrency."""
    shared_prefix_len: int = 0
    """Tokens at the beginning of a prompt that it shares with others. With any, our engine runs every case with and
    without its prefix cache; without, as `engine` says."""
    num_questions: int | None = None
    """Requests in a row that share a prefix, and the measured requests of a case unless their number is given."""
    num_profile_steps: int = 0
    """Decode steps whose GPU busy share is measured after each case."""

    def __post_init__(self) -> None:
        """Check what no other part checks.

        Raises:
            ConfigError: an unknown engine, or a concurrency that is never reached.
        """
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(f"unknown engine {kind!r}: choose {', '.join(KINDS)}")
        for concurrency in self.concurrencies:
            if concurrency is not None:
                self.requests_at(concurrency)

    def requests_at(self, concurrency: int) -> int:
        """Measured requests of a case.

        Raises:
            ConfigError: fewer than `concurrency`, or that is no number of requests.
        """
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1: got {concurrency}")
        if self.num_requests is None and self.num_questions is not None:
            return max(concurrency, self.num_questions)
        count = DEFAULT_CYCLES * concurrency if self.num_requests is None else self.num_requests
        if count < concurrency:
            raise ConfigError(f"{count} requests never reach a concurrency of {concurrency}: ask for more requests")
        return count

    def workload(self, model: PreTrainedModel) -> Workload:
        """The requests, in the model's vocabulary."""
        return Workload(
            input_len=self.input_len,
            output_len=self.output_len,
            vocab_size=text_config(model.config).vocab_size,
            seed=self.seed,
            document_len=self.shared_prefix_len,
            num_questions=self.num_questions,
        )

    def check_device(self, device: str) -> None:
        """Refuse what a device cannot do.

        Raises:
            ConfigError: the busy share of a GPU that is not there.
        """
        if self.num_profile_steps and not device.startswith("cuda"):
            raise ConfigError(
                f"the GPU's busy share needs a GPU, but the model is on {device}: leave out --profile-steps"
            )

    def check_model(self, config: PreTrainedConfig) -> None:
        """Refuse what a model cannot do, before it is loaded.

        Raises:
            ConfigError: requests longer than it takes, or layers that it does not have.
            ModelError: a feature that a sparse cache does not support.
        """
        LayerPlan.build(self.method, model_shape(config))
        total, limit = self.input_len + self.output_len, text_config(config).max_position_embeddings
        if total > limit:
            raise ConfigError(
                f"{self.input_len:,} tokens in and {self.output_len:,} out are {total:,}, but the model takes "
                f"{limit:,}: lower one of them"
            )


def describe(model: PreTrainedModel, plan: BenchPlan, model_facts: dict[str, Any]) -> dict[str, Any]:
    """Everything about a bench but its runs, JSON-able."""
    return {
        "format": FORMAT,
        "kind": "serving",
        **provenance(model.device),
        "model": {
            **model_facts,
            "dtype": str(model.dtype).removeprefix("torch."),
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "weight_bytes": sum(p.nbytes for p in model.parameters()),
            **asdict(model_shape(model.config)),
        },
        "workload": {
            "input_len": plan.input_len,
            "output_len": plan.output_len,
            "seed": plan.seed,
            "shared_prefix_len": plan.shared_prefix_len,
            "num_questions": plan.num_questions,
        },
        "method": plan.method.to_dict(),
        "engine_options": asdict(plan.engine),
        "runs": [],
    }


def run_cases(model: PreTrainedModel, plan: BenchPlan, watch: Watch) -> Iterator[dict[str, Any]]:
    """Figures of one case after the other; a case that cannot run gives its error in place of figures.

    Transformers' own goes first: it meets the model as it was loaded.
    """
    for kind in sorted(plan.kinds, key=lambda kind: kind != "transformers"):
        for kv_memory in plan.kv_memories:
            shared = {"engine": kind, "kv_memory_bytes": kv_memory, "memory_fraction": plan.engine.memory_fraction}
            for caching in _caching(plan, kind):
                if caching is None:
                    of_kind = _transformers_cases(model, plan, kind, kv_memory, watch)
                else:
                    of_kind = _engine_cases(model, plan, kind, kv_memory, caching, watch)
                for figures in of_kind:
                    yield {**shared, "prefix_caching": caching, **figures}
                gc.collect()
                if model.device.type == "cuda":
                    torch.cuda.empty_cache()


def _caching(plan: BenchPlan, kind: str) -> tuple[bool | None, ...]:
    """Whether our engine runs with its prefix cache, one run each; None = another engine."""
    if kind == "transformers":
        return (None,)
    return (False, True) if plan.shared_prefix_len else (plan.engine.prefix_caching,)


def _engine_cases(
    model: PreTrainedModel, plan: BenchPlan, kind: str, kv_memory: int | None, caching: bool, watch: Watch
) -> Iterator[dict[str, Any]]:
    """Our engine, made once for all concurrencies."""
    workload = plan.workload(model)
    longest = workload.input_len + workload.output_len
    options = plan.engine.with_(kv_memory_bytes=kv_memory, max_model_len=longest, prefix_caching=caching)
    shape = model_shape(model.config)
    method = plan.method if kind == "sparse" else plan.method.with_(full_layers=None, num_full_layers=shape.num_layers)
    memory = MemoryWatch(model.device)
    begin = time.perf_counter()
    try:
        engine = Engine(model, method, options)
    except SparseKVError as error:
        yield from (_failed(c, error) for c in plan.concurrencies)
        return
    start_s = time.perf_counter() - begin
    with engine:
        memory.engine_made()
        planned = (
            engine.memory.num_blocks * engine.memory.block_bytes + engine.memory.num_rows * engine.memory.row_bytes
        )
        admissible = min(
            engine.memory.num_rows, engine.memory.concurrent(engine.memory.layers, engine.memory.max_model_len)
        )
        for wanted in plan.concurrencies:
            concurrency = admissible if wanted is None else wanted
            title = _title(kind, kv_memory, concurrency, caching if plan.shared_prefix_len else None)
            try:
                figures = _engine_case(engine, plan, concurrency, memory, title, watch)
            except SparseKVError as error:
                yield _failed(concurrency, error, is_maximum=wanted is None)
                continue
            figures["is_maximum"] = wanted is None
            figures["start"]["engine_s"] = start_s
            figures["memory"] = memory.figures(
                kv_memory_bytes=kv_memory, memory_fraction=options.memory_fraction, planned=planned
            )
            peak_blocks = engine.memory.peak_of(engine.memory.layers, engine.memory.max_model_len)
            figures["admissible"] = {
                "rows": engine.memory.num_rows,
                "peak_request_bytes": peak_blocks * engine.memory.block_bytes,  # at its worst moment, the prompt's
                "requests": admissible,
            }
            if plan.num_profile_steps:
                figures["gpu_busy"] = decode_busy_share(
                    engine, workload, concurrency=concurrency, num_steps=plan.num_profile_steps
                )
            yield figures


def _engine_case(
    engine: Engine, plan: BenchPlan, concurrency: int, memory: MemoryWatch, title: str, watch: Watch
) -> dict[str, Any]:
    workload = plan.workload(engine.model)
    num_warmup = concurrency if plan.num_warmup is None else plan.num_warmup
    begin = time.perf_counter()
    if num_warmup:
        with watch(f"{title}, warm-up", num_warmup) as on_finish:
            run_closed_loop(
                engine,
                workload.warmup,
                concurrency=concurrency,
                num_requests=num_warmup,
                on_finish=on_finish,
            )
    start = {"warmup_s": time.perf_counter() - begin}  # with it goes what is compiled when it is first met
    memory.begin()
    engine.forget_prefixes()  # of an earlier case, whose prompts were the same
    num_requests = plan.requests_at(concurrency)
    with watch(title, num_requests) as on_finish:
        run = run_closed_loop(engine, workload, concurrency=concurrency, num_requests=num_requests, on_finish=on_finish)
    return {"num_warmup": num_warmup, "start": start, **summarize(run), "prefix": prefix_figures(run.requests)}


def _transformers_cases(
    model: PreTrainedModel, plan: BenchPlan, kind: str, kv_memory: int | None, watch: Watch
) -> Iterator[dict[str, Any]]:
    token_bytes = LayerPlan.build(plan.method, model_shape(model.config)).dense_bytes(
        1, element_bytes=model.dtype.itemsize
    )
    for wanted in plan.concurrencies:
        try:
            concurrency = _dense_maximum(plan, kv_memory, token_bytes) if wanted is None else wanted
            num_requests = plan.requests_at(concurrency)
        except ConfigError as error:
            yield _failed(wanted, error)
            continue
        memory = MemoryWatch(model.device)
        memory.begin()
        with watch(_title(kind, kv_memory, concurrency), num_requests) as on_finish:
            run = run_generate_batch(
                model,
                plan.workload(model),
                concurrency=concurrency,
                num_requests=num_requests,
                kv_memory_bytes=kv_memory,
                memory_fraction=plan.engine.memory_fraction,
                dense_bytes_per_token=token_bytes,
                max_batch_tokens=plan.engine.max_batch_tokens,
                on_finish=on_finish,
            )
        figures = {"num_warmup": 0, **summarize(run), "notes": list(NOTES), "is_maximum": wanted is None}
        figures["memory"] = memory.figures(
            kv_memory_bytes=kv_memory, memory_fraction=plan.engine.memory_fraction, planned=None
        )
        yield figures


def _dense_maximum(plan: BenchPlan, kv_memory: int | None, token_bytes: int) -> int:
    """Whole requests that a dense cache of this size holds."""
    if kv_memory is None:
        raise ConfigError("how many requests transformers admits follows from --kv-memory: give it, or a number")
    return min(plan.engine.max_num_seqs, kv_memory // (token_bytes * (plan.input_len + plan.output_len)))


def _failed(concurrency: int | None, error: SparseKVError, *, is_maximum: bool = False) -> dict[str, Any]:
    """What stands in place of the figures of a case."""
    return {"concurrency": concurrency, "is_maximum": is_maximum or concurrency is None, "error": str(error)}


def _title(kind: str, kv_memory: int | None, concurrency: int, caching: bool | None = None) -> str:
    where = "" if kv_memory is None else f", {kv_memory / 1e9:.2f} GB"
    cache = {None: "", True: ", prefix cache", False: ", no prefix cache"}[caching]
    return f"{kind}{where}{cache}, {concurrency} at a time"
