"""`hf-sparsekv bench`: throughput and latency of a closed loop of random requests, engines side by side."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_sparsekv.bench.cases import BenchPlan, describe, run_cases
from hf_sparsekv.bench.shapes import SHAPES, dummy_model, shape_config
from hf_sparsekv.bench.sharing import gain_text, gains
from hf_sparsekv.bench.workload import Finished
from hf_sparsekv.cli.bench_options import (
    ConcurrencyOption,
    DummyWeightsOption,
    EngineOption,
    InputLenOption,
    JsonOption,
    KvMemoriesOption,
    MemoryFractionOption,
    ModelOption,
    NoCompileOption,
    NoCudaGraphsOption,
    NoPrefixCachingOption,
    NumQuestionsOption,
    NumRequestsOption,
    OutputLenOption,
    PrefillOption,
    ProfileStepsOption,
    SeedOption,
    SharedPrefixLenOption,
    WarmupOption,
    check_writable,
    engine_config,
    parse_counts,
    parse_kinds,
    parse_sizes,
)
from hf_sparsekv.cli.bench_table import concurrency_text, runs_table, sides_table
from hf_sparsekv.cli.engine_options import MaxBatchTokensOption, MaxNumSeqsOption
from hf_sparsekv.cli.loading import check_backend, load_weights, open_model, pick_device, pick_dtype
from hf_sparsekv.cli.options import (
    BackendOption,
    BudgetOption,
    ConfigOption,
    FullLayersOption,
    NumFullLayersOption,
    PresetOption,
    ScorerOption,
    SetOption,
    build_config,
)
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.models_store import resolve_model

DEFAULT_SHAPE = "smollm2-135m-shape"
FAILED = 1
PIPE_WIDTH = 150


def bench(
    model: ModelOption = DEFAULT_SHAPE,
    dummy_weights: DummyWeightsOption = False,
    engine: EngineOption = None,
    input_len: InputLenOption = 4000,
    output_len: OutputLenOption = 500,
    concurrency: ConcurrencyOption = "10",
    num_requests: NumRequestsOption = None,
    shared_prefix_len: SharedPrefixLenOption = 0,
    num_questions: NumQuestionsOption = None,
    warmup: WarmupOption = None,
    seed: SeedOption = 0,
    kv_memory: KvMemoriesOption = "none",
    memory_fraction: MemoryFractionOption = EngineConfig.memory_fraction,
    max_batch_tokens: MaxBatchTokensOption = EngineConfig.max_batch_tokens,
    max_num_seqs: MaxNumSeqsOption = EngineConfig.max_num_seqs,
    no_prefix_caching: NoPrefixCachingOption = False,
    no_compile: NoCompileOption = False,
    no_cuda_graphs: NoCudaGraphsOption = False,
    backend: BackendOption = None,
    config: ConfigOption = None,
    preset: PresetOption = None,
    budget: BudgetOption = None,
    num_full_layers: NumFullLayersOption = None,
    full_layers: FullLayersOption = None,
    scorer: ScorerOption = None,
    prefill: PrefillOption = None,
    set_: SetOption = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile_steps: ProfileStepsOption = 0,
    json_file: JsonOption = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's code.")] = False,
) -> None:
    """Measure serving: c requests live at any time, random prompts, exactly --output-len tokens each.

    Exit code 1 when a case or a request failed.
    """
    console = Console(stderr=True)
    options = engine_config(memory_fraction, max_batch_tokens, max_num_seqs, backend, no_compile, no_cuda_graphs)
    settings = [*([] if prefill is None else [f"prefill={prefill}"]), *(set_ or [])]
    plan = BenchPlan(
        input_len=input_len,
        output_len=output_len,
        seed=seed,
        kinds=parse_kinds(engine),
        concurrencies=parse_counts(concurrency),
        kv_memories=parse_sizes(kv_memory),
        method=build_config(config, preset, budget, num_full_layers, full_layers, scorer, settings),
        engine=options.with_(prefix_caching=not no_prefix_caching),
        num_requests=num_requests,
        shared_prefix_len=shared_prefix_len,
        num_questions=num_questions,
        num_warmup=warmup,
        num_profile_steps=profile_steps,
    )
    check_writable(json_file)
    source = _ModelSource(model, dummy_weights or model in SHAPES, trust_remote_code)
    network, facts = source.make(plan, dtype, device, console)
    _raise_failures(_run(network, plan, facts, json_file, console)["runs"])


@dataclass(frozen=True)
class _ModelSource:
    """Where the model of a bench comes from."""

    name: str
    is_dummy: bool
    trust_remote_code: bool

    def make(
        self, plan: BenchPlan, dtype: str, device: str, console: Console
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model, and what is to be said of its origin; what the plan asks of it is checked before the weights."""
        where = pick_device(device)
        kind = pick_dtype(dtype, where)
        plan.check_device(where)
        if not self.is_dummy:
            source = open_model(self.name, trust_remote_code=self.trust_remote_code, console=console)
            self._check(plan, source.config, dtype, device)
            begin = time.perf_counter()
            network = load_weights(source, dtype=dtype, device=device, console=console)
        else:
            config = shape_config(self.name) if self.name in SHAPES else self._stored_config()
            self._check(plan, config, dtype, device)
            begin = time.perf_counter()
            with console.status("making random weights"):
                network = dummy_model(config, dtype=kind, device=where, seed=plan.seed)
                if where != "cpu":
                    torch.cuda.synchronize(where)
        seconds = time.perf_counter() - begin
        return network, {"name": self.name, "weights": "dummy" if self.is_dummy else "loaded", "made_in_s": seconds}

    @staticmethod
    def _check(plan: BenchPlan, config: PreTrainedConfig, dtype: str, device: str) -> None:
        plan.check_model(config)
        check_backend(plan.engine.backend, config, dtype=dtype, device=device, is_whole=False)

    def _stored_config(self) -> PreTrainedConfig:
        path = resolve_model(self.name, allow_fetch=True).path_or_id
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot open model {self.name!r}: {str(error).strip().splitlines()[0]}") from error
        return config


def _run(
    network: PreTrainedModel, plan: BenchPlan, facts: dict[str, Any], json_file: Path | None, console: Console
) -> dict[str, Any]:
    """Run every case; the report, written after each so that a run that is cut short leaves what it had."""
    report = describe(network, plan, facts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)

    @contextmanager
    def watch(title: str, total: int) -> Iterator[Finished]:
        task = progress.add_task(title, total=total, rate="")
        begin, num_tokens = time.perf_counter(), 0

        def on_finish(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            rate = f"{num_tokens / (time.perf_counter() - begin):,.0f} tok/s"
            progress.update(task, advance=1, rate=rate)

        try:
            yield on_finish
        finally:
            progress.remove_task(task)

    with progress:
        for run in run_cases(network, plan, watch):
            report["runs"].append(run)
            report["prefix_gains"] = gains(report["runs"])
            if json_file is not None and str(json_file) != "-":
                _write(json_file, report)
    if json_file is not None and str(json_file) == "-":
        typer.echo(json.dumps(report, indent=2))
    else:
        out = Console()
        # A pipe or a file has no width of its own, and the table is wider than the 80 columns it would be given.
        out = out if out.is_terminal else Console(width=PIPE_WIDTH)
        out.print(runs_table(report))
        if (sides := sides_table(report)) is not None:
            out.print(sides)
    notes = [note for run in report["runs"] for note in _notes(run)] + [gain_text(g) for g in report["prefix_gains"]]
    for text in dict.fromkeys(notes):
        console.print(text, highlight=False, soft_wrap=True)
    return report


def _raise_failures(runs: list[dict[str, Any]]) -> None:
    """End with what went wrong, if anything did."""
    if all("error" in run for run in runs):
        raise ConfigError(runs[0]["error"])
    if any("error" in run or run["num_failed"] for run in runs):
        raise typer.Exit(FAILED)


def _write(path: Path, report: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _notes(run: dict[str, Any]) -> list[str]:
    """What the table has no place for."""
    notes = list(run.get("notes", ()))
    if "error" in run:
        notes.append(f"{run['engine']} at {concurrency_text(run)}: {run['error']}")
    if run.get("num_failed"):
        notes.append(f"{run['engine']}: {run['num_failed']} of {run['num_requests']} failed: {run['first_error']}")
    return notes
