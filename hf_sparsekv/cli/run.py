"""`hf-sparsekv run`: every line of a file through the engine; whatever happens, run it again and it goes on."""

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_sparsekv.cli.batch_files import BatchFiles
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
from hf_sparsekv.cli.loading import ModelSource, load_weights, open_model
from hf_sparsekv.cli.options import (
    DEFAULT_MODEL,
    BudgetOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    FullLayersOption,
    ModelOption,
    NumFullLayersOption,
    ScorerOption,
    SetOption,
    TrustRemoteCodeOption,
    build_config,
)
from hf_sparsekv.engine.batch_lines import ChatTemplate, LineReader
from hf_sparsekv.engine.batch_results import ErrorFile, ResultFile
from hf_sparsekv.engine.batch_run import BatchRun
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.hf.models import model_shape
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


def run(
    file: FileArgument,
    output: OutputOption,
    errors: ErrorsOption = None,
    model: ModelOption = DEFAULT_MODEL,
    config: ConfigOption = None,
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
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Generate for every line of a file, many at once; interrupted or killed, the same command goes on."""
    console = Console(stderr=True)
    method = build_config(config, budget, num_full_layers, full_layers, scorer, set_)
    options = build_engine_config(kv_memory, max_num_seqs, max_batch_tokens, max_model_len, use_compile=use_compile)
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
    with (
        ResultFile(files.output) as results,
        closing(ErrorFile(files.errors)) as bad_lines,
        files.readable() as readable,
    ):
        source = open_model(model, trust_remote_code=trust_remote_code, console=console)
        LayerPlan.build(method, model_shape(source.config))
        lines = LineReader(
            readable.input, done=results.done, defaults=defaults, config=method, chat_template=chat_template(source)
        )
        network = load_weights(source, dtype=dtype, device=device, console=console)
        with Engine(network, method, options, tokenizer=source.tokenizer) as engine:
            console.print(engine.memory.describe(), highlight=False, soft_wrap=True)
            received = serve(engine, lines, results, bad_lines, files, console)
    if received is not None:
        raise typer.Exit(EXIT_BASE + received)


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
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    return to_ids
