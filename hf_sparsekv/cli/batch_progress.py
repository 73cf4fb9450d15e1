"""What is seen of a batch run: a bar on a terminal, a line now and then elsewhere, and a summary at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hf_sparsekv.engine.batch_run import BatchProgress

LINE_EVERY_S = 10.0
"""Between two lines where there is no terminal."""
_BAR_EVERY_S = 0.1

OnProgress = Callable[[BatchProgress], None]


@contextmanager
def watch(console: Console, total_bytes: int) -> Iterator[OnProgress]:
    """What shows progress; call it as often as you like."""
    if not console.is_terminal:
        yield _rarely(LINE_EVERY_S, lambda progress: console.print(describe(progress), highlight=False, soft_wrap=True))
        return
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=max(total_bytes, 1))

        def show(progress: BatchProgress) -> None:
            bar.update(task, completed=progress.bytes_done, description=describe(progress, has_bar=True))

        yield _rarely(_BAR_EVERY_S, show)


def describe(progress: BatchProgress, *, has_bar: bool = False) -> str:
    """How far a run is, in one line."""
    parts = [] if has_bar else [f"{progress.fraction:.0%}"]
    parts += [f"{progress.num_done:,} done", f"{progress.num_live:,} in the engine"]
    for count, name in ((progress.num_skipped, "skipped"), (progress.num_bad + progress.num_failed, "with errors")):
        if count:
            parts.append(f"{count:,} {name}")
    parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if progress.eta_s is not None:
        parts.append(f"ETA {clock_time(progress.eta_s)}")
    return ", ".join(parts)


def summary(progress: BatchProgress, output: Path, errors: Path) -> str:
    """What came of it, in a few lines."""
    state = "done" if progress.is_complete else "stopped: run the same command again to go on"
    lines = [
        f"{state}: {progress.num_done:,} answered, {progress.num_skipped:,} skipped, {progress.num_bad:,} bad lines",
        f"{progress.num_prompt_tokens:,} prompt and {progress.num_output_tokens:,} output tokens in "
        f"{clock_time(progress.seconds)} ({progress.tokens_per_s:,.1f} output tokens/s)",
        f"results  {output}",
    ]
    if progress.num_failed:
        lines[0] += f", {progress.num_failed:,} of the answers are errors"
    if progress.num_bad:
        lines.append(f"errors   {errors}")
    return "\n".join(lines)


def clock_time(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _rarely(every_s: float, show: OnProgress) -> OnProgress:
    """`show`, but not more often than that."""
    due = time.monotonic() + every_s

    def maybe(progress: BatchProgress) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + every_s
            show(progress)

    return maybe
