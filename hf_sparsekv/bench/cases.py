"""Cases: every engine, memory size and concurrency of a bench, one after the other on one loaded model."""

import gc
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
    concurrencies: tuple[int, ...]
    kv_memories: tuple[int | None, ...]
    """Bytes of the cache; None = the engine's memory fraction."""
    method: SparseKVConfig
    engine: EngineConfig
    """Its `kv_memory_bytes` and `max_model_len` are set for each case."""
    num_requests: int | None = None
    """Measured requests of each case; None = `DEFAULT_CYCLES` times the concurrency."""
    num_warmup: int | None = None
    """Requests before the clock starts, at most as many live as in the case; None = the concurrency."""
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
            if concurrency < 1:
                raise ConfigError(f"concurrency must be at least 1: got {concurrency}")
            if self.requests_at(concurrency) < concurrency:
                raise ConfigError(
                    f"{self.num_requests} requests never reach a concurrency of {concurrency}: ask for more requests"
                )

    def requests_at(self, concurrency: int) -> int:
        """Measured requests of a case."""
        return DEFAULT_CYCLES * concurrency if self.num_requests is None else self.num_requests

    def workload(self, model: PreTrainedModel) -> Workload:
        """The requests, in the model's vocabulary."""
        return Workload(
            input_len=self.input_len,
            output_len=self.output_len,
            vocab_size=text_config(model.config).vocab_size,
            seed=self.seed,
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
            of_kind = _transformers_cases if kind == "transformers" else _engine_cases
            for figures in of_kind(model, plan, kind, kv_memory, watch):
                yield {**shared, **figures}
            gc.collect()
            if model.device.type == "cuda":
                torch.cuda.empty_cache()


def _engine_cases(
    model: PreTrainedModel, plan: BenchPlan, kind: str, kv_memory: int | None, watch: Watch
) -> Iterator[dict[str, Any]]:
    """Our engine, made once for all concurrencies."""
    workload = plan.workload(model)
    options = plan.engine.with_(kv_memory_bytes=kv_memory, max_model_len=workload.input_len + workload.output_len)
    shape = model_shape(model.config)
    method = plan.method if kind == "sparse" else plan.method.with_(full_layers=None, num_full_layers=shape.num_layers)
    memory = MemoryWatch(model.device)
    try:
        engine = Engine(model, method, options)
    except SparseKVError as error:
        yield from ({"concurrency": c, "error": str(error)} for c in plan.concurrencies)
        return
    with engine:
        memory.engine_made()
        planned = (
            engine.memory.num_blocks * engine.memory.block_bytes + engine.memory.num_rows * engine.memory.row_bytes
        )
        for concurrency in plan.concurrencies:
            try:
                figures = _engine_case(engine, plan, concurrency, memory, _title(kind, kv_memory, concurrency), watch)
            except SparseKVError as error:
                yield {"concurrency": concurrency, "error": str(error)}
                continue
            figures["memory"] = memory.figures(
                kv_memory_bytes=kv_memory, memory_fraction=options.memory_fraction, planned=planned
            )
            peak_blocks = engine.memory.peak_of(engine.memory.layers, engine.memory.max_model_len)
            figures["admissible"] = {
                "rows": engine.memory.num_rows,
                "peak_request_bytes": peak_blocks * engine.memory.block_bytes,  # at its worst moment, the prompt's
                "requests": min(
                    engine.memory.num_rows, engine.memory.concurrent(engine.memory.layers, engine.memory.max_model_len)
                ),
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
    if num_warmup:
        with watch(f"{title}, warm-up", num_warmup) as on_finish:
            run_closed_loop(
                engine,
                workload.warmup,
                concurrency=concurrency,
                num_requests=num_warmup,
                on_finish=on_finish,
            )
    memory.begin()
    num_requests = plan.requests_at(concurrency)
    with watch(title, num_requests) as on_finish:
        run = run_closed_loop(engine, workload, concurrency=concurrency, num_requests=num_requests, on_finish=on_finish)
    return {"num_warmup": num_warmup, **summarize(run)}


def _transformers_cases(
    model: PreTrainedModel, plan: BenchPlan, kind: str, kv_memory: int | None, watch: Watch
) -> Iterator[dict[str, Any]]:
    layers = LayerPlan.build(plan.method, model_shape(model.config))
    for concurrency in plan.concurrencies:
        num_requests = plan.requests_at(concurrency)
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
                dense_bytes_per_token=layers.dense_bytes(1, element_bytes=model.dtype.itemsize),
                max_batch_tokens=plan.engine.max_batch_tokens,
                on_finish=on_finish,
            )
        figures = {"num_warmup": 0, **summarize(run), "notes": list(NOTES)}
        figures["memory"] = memory.figures(
            kv_memory_bytes=kv_memory, memory_fraction=plan.engine.memory_fraction, planned=None
        )
        yield figures


def _title(kind: str, kv_memory: int | None, concurrency: int) -> str:
    where = "" if kv_memory is None else f", {kv_memory / 1e9:.2f} GB"
    return f"{kind}{where}, {concurrency} at a time"
