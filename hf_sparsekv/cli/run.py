"""`hf-sparsekv run`: every line of a file through the engine; whatever happens, run it again and it goes on."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import PreTrainedModel

from hf_sparsekv.cli.batch_files import BatchFiles, is_piped
from hf_sparsekv.cli.batch_progress import summary, watch
from hf_sparsekv.cli.engine_options import (
    CompileOption,
    IgnoreEosOption,
    KvMemoryOption,
    MaxBatchTokensOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    MaxTokensOption,
    MinPOption,
    RepetitionPenaltyOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    build_engine_config,
    sampling_fields,
)
from hf_sparsekv.cli.interrupt import EXIT_BASE
from hf_sparsekv.cli.loading import (
    ModelSource,
    check_backend,
    dtype_name,
    open_model,
    pick_device,
    pick_dtype,
)
from hf_sparsekv.cli.options import (
    DEFAULT_MODEL,
    BackendOption,
    BudgetOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    FullLayersOption,
    ModelOption,
    NumFullLayersOption,
    PresetOption,
    ReplicasPerGpuOption,
    ScorerOption,
    SetOption,
    TpOption,
    TrustRemoteCodeOption,
    build_config,
)
from hf_sparsekv.cli.replica import follow, load_replica
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.batch_lines import ChatTemplate, LineReader
from hf_sparsekv.engine.batch_parts import ReplicaFiles
from hf_sparsekv.engine.batch_results import ErrorFile, ResultFile
from hf_sparsekv.engine.batch_run import BatchRun
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.parallel.group import leave_replica
from hf_sparsekv.parallel.place import Place
from hf_sparsekv.plan import LayerPlan

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOWN_BAD_LINES = 5

FileArgument = Annotated[
    Path, typer.Argument(help='JSON lines: {"id", "prompt" | "token_ids" | "messages", ...}; - for standard input.')
]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Results; ids that it holds are skipped.")]
ErrorsOption = Annotated[
    Path | None,
    typer.Option("--errors", help="Lines that could not be served. Default for out.jsonl: out.errors.jsonl."),
]
MixOption = Annotated[
    bool, typer.Option("--mix-options", help="Go on although the results there were made with other options.")
]


def run(
    file: FileArgument,
    output: OutputOption,
    errors: ErrorsOption = None,
    model: ModelOption = DEFAULT_MODEL,
    config: ConfigOption = None,
    preset: PresetOption = None,
    budget: BudgetOption = None,
    num_full_layers: NumFullLayersOption = None,
    full_layers: FullLayersOption = None,
    scorer: ScorerOption = None,
    set_: SetOption = None,
    kv_memory: KvMemoryOption = None,
    max_num_seqs: MaxNumSeqsOption = 256,
    max_batch_tokens: MaxBatchTokensOption = 8192,
    max_model_len: MaxModelLenOption = None,
    use_compile: CompileOption = True,
    backend: BackendOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    seed: SeedOption = None,
    ignore_eos: IgnoreEosOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    tp: TpOption = 1,
    replicas_per_gpu: ReplicasPerGpuOption = 1,
    mix_options: MixOption = False,
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Generate for every line of a file, many at once; interrupted or killed, the same command goes on."""
    place = Place.of_environment(tp)
    console = Console(stderr=True, quiet=place.rank > 0)
    method = build_config(config, preset, budget, num_full_layers, full_layers, scorer, set_)
    sizes = (kv_memory, max_num_seqs, max_batch_tokens, max_model_len)
    options = build_engine_config(*sizes, backend, use_compile=use_compile)
    defaults = sampling_fields(
        temperature,
        max_tokens=max_tokens,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    SamplingParams(**defaults)
    files = BatchFiles.of(file, output, errors)
    files.check_readers(place.num_replicas)
    _check_memory(options, replicas_per_gpu)
    loading = _Loading(model, dtype, device, replicas_per_gpu, trust_remote_code)
    task = _Task(files, place, method, options, defaults, loading, mix_options, console)
    received = task.lead() if place.tp_rank == 0 else task.follow()
    leave_replica()
    if received is not None:
        raise typer.Exit(EXIT_BASE + received)


def _check_memory(options: EngineConfig, replicas_per_gpu: int) -> None:
    """Refuse replicas that would each take what their GPU has left."""
    if replicas_per_gpu > 1 and options.kv_memory_bytes is None:
        raise ConfigError(f"{replicas_per_gpu} replicas on a GPU share its memory: give each its --kv-memory")


@dataclass(frozen=True)
class _Loading:
    """Which model, and how it is loaded."""

    model: str
    dtype: str
    device: str
    replicas_per_gpu: int
    trust_remote_code: bool


@dataclass(frozen=True)
class _Task:
    """What this process has to do."""

    files: BatchFiles
    place: Place
    method: SparseKVConfig
    options: EngineConfig
    defaults: dict[str, Any]
    loading: _Loading
    may_mix: bool
    console: Console

    def lead(self) -> int | None:
        """Serve this replica's lines; the number of the signal that ended it, if one did."""
        files, place = self.files, self.place
        # Before a pipe is read: what cannot be written should not empty it.
        shared = ReplicaFiles(
            None if is_piped(files.input) else files.input,
            files.output,
            files.errors,
            replica=place.replica,
            num_replicas=place.num_replicas,
            options=self._deciding_options(),
            may_mix=self.may_mix,
        )
        with shared as (results, bad_lines), files.readable() as readable:
            source = self._open()
            lines = LineReader(
                readable.input,
                done=results.done,
                defaults=self.defaults,
                config=self.method,
                chat_template=chat_template(source),
                serves=shared.serves if place.num_replicas > 1 else None,
            )
            network = self._load(source)
            with Engine(network, self.method, self.options, tokenizer=source.tokenizer) as engine:
                self.console.print(engine.memory.describe(), highlight=False, soft_wrap=True)
                return serve(engine, lines, results, bad_lines, files, self.console)

    def follow(self) -> int | None:
        """Take part in what rank 0 of the replica serves; it gets the same signals, and says when to stop."""
        with noted_signals() as noted:
            follow(self._load(self._open()), self.method, self.options)
        return noted.received

    def _deciding_options(self) -> dict[str, Any]:
        """Those that decide what an answer is, by name."""
        loading = self.loading
        model = str(Path(loading.model).resolve()) if Path(loading.model).is_dir() else loading.model
        dtype = dtype_name(pick_dtype(loading.dtype, pick_device(loading.device)))
        options = {"model": model, "dtype": dtype, "max_model_len": self.options.max_model_len}
        return options | self.method.to_dict(must_be_registered=False) | asdict(SamplingParams(**self.defaults))

    def _open(self) -> ModelSource:
        loading = self.loading
        source = open_model(loading.model, trust_remote_code=loading.trust_remote_code, console=self.console)
        LayerPlan.build(self.method, model_shape(source.config))
        kind = {"dtype": loading.dtype, "device": loading.device}
        check_backend(self.options.backend, source.config, **kind, is_whole=False)
        return source

    def _load(self, source: ModelSource) -> PreTrainedModel:
        loading = self.loading
        return load_replica(
            self.place,
            source,
            dtype=loading.dtype,
            device=loading.device,
            replicas_per_gpu=loading.replicas_per_gpu,
            console=self.console,
        )


def serve(
    engine: Engine, lines: LineReader, results: ResultFile, bad_lines: ErrorFile, files: BatchFiles, console: Console
) -> int | None:
    """Run it and say how it went; the number of the signal that ended it, if one did."""
    with noted_signals() as noted, watch(console, lines.total_bytes) as on_progress:

        def on_bad_line(line: int, reason: str) -> None:
            if batch.progress.num_bad < SHOWN_BAD_LINES:
                text = f"line {line}: {' '.join(reason.split())}"
                console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)

        batch = BatchRun(
            engine,
            lines,
            results,
            bad_lines,
            on_progress=on_progress,
            on_bad_line=on_bad_line,
            should_stop=lambda: noted.received is not None,
        )
        progress = batch.run()
    console.print(summary(progress, files.output, files.errors), highlight=False, markup=False, soft_wrap=True)
    return noted.received


@dataclass
class NotedSignal:
    """Which signal came, if one did."""

    received: int | None = None


@contextmanager
def noted_signals() -> Iterator[NotedSignal]:
    """Let the first SIGINT or SIGTERM inside be noted and nothing else; a second one does what it always does."""
    noted = NotedSignal()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        noted.received = number
        restore()

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()


def chat_template(source: ModelSource) -> ChatTemplate | None:
    """The model's chat template as a function from messages to token ids; None if it has none."""
    tokenizer = source.tokenizer
    if not tokenizer.chat_template:
        return None

    def to_ids(messages: list[dict[str, Any]]) -> list[int]:
        quiet = {"verbose": False}  # a prompt that is too long is a bad line, which says so
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, tokenizer_kwargs=quiet
        )
        return list(encoded["input_ids"])

    return to_ids
