"""A batch run: lines in, results out, as many requests in the engine as it can use and no more."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_sparsekv.engine.batch_lines import BadLine, Job, LineReader
from hf_sparsekv.engine.batch_results import ErrorFile, ResultFile
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.output import RequestOutput
from hf_sparsekv.errors import SparseKVError

MAX_QUEUED = 64
"""Requests that wait in the engine, so that a place that becomes free is taken in the next step."""
MAX_QUEUED_BYTES = 256 * 2**20
"""Of the lines that are in the engine; a longer line still goes in, alone."""


@dataclass
class BatchProgress:
    """How far a run is."""

    total_bytes: int
    """Of the input."""
    num_done: int = 0
    num_failed: int = 0
    """Of those done: that ended with an error."""
    num_bad: int = 0
    num_skipped: int = 0
    """Lines whose results were there."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_live: int = 0
    bytes_done: int = 0
    """Of lines that need nothing more; skipped ones included."""
    bytes_skipped: int = 0
    start_s: float = field(default_factory=time.perf_counter)
    is_complete: bool = False

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.start_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of finished requests per second, over the whole run."""
        return self.num_output_tokens / max(self.seconds, 1e-9)

    @property
    def fraction(self) -> float:
        """Part of the input that is dealt with, in [0, 1]."""
        return self.bytes_done / self.total_bytes if self.total_bytes else 1.0

    @property
    def eta_s(self) -> float | None:
        """Seconds that the rest will take if it goes on like this; None before anything is done."""
        worked = self.bytes_done - self.bytes_skipped
        return (self.total_bytes - self.bytes_done) / worked * self.seconds if worked else None


class BatchRun:
    """Feeds an engine from a file.

    Args:
        engine: without requests of anybody else.
        lines, results, errors: the three files.
        on_progress: called after every step and every line.
        on_bad_line: called for a line that cannot be served.
        should_stop: asked before every step and every line; True ends the run at once.
    """

    def __init__(
        self,
        engine: Engine,
        lines: LineReader,
        results: ResultFile,
        errors: ErrorFile,
        *,
        on_progress: Callable[[BatchProgress], object] = lambda progress: None,
        on_bad_line: Callable[[int, str], object] = lambda line, reason: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine, self._lines, self._results, self._errors = engine, iter(lines), results, errors
        self._on_progress, self._on_bad_line, self._should_stop = on_progress, on_bad_line, should_stop
        self._live: dict[str, Job] = {}
        self._live_bytes = 0
        self._max_live = engine.memory.num_rows + MAX_QUEUED
        self.progress = BatchProgress(lines.total_bytes)

    def run(self) -> BatchProgress:
        """Serve every line, or stop when asked to; results are written as requests finish.

        Raises:
            InputError: a file cannot be written.
        """
        while not self._should_stop():
            self._refill()
            if not self._engine.has_unfinished:
                self.progress.is_complete = not self._should_stop()
                break
            for output in self._engine.step():
                if output.is_finished:
                    self._finish(output)
            self._on_progress(self.progress)
        return self.progress

    def _refill(self) -> None:
        """Read lines until the engine has enough to do."""
        while len(self._live) < self._max_live and (self._live_bytes < MAX_QUEUED_BYTES or not self._live):
            if self._should_stop():
                return
            line = next(self._lines, None)
            if line is None:
                return
            if isinstance(line, Job):
                self._add(line)
            elif isinstance(line, BadLine):
                self._refuse(line)
            else:
                self.progress.num_skipped += 1
                self.progress.bytes_skipped += line.num_bytes
                self.progress.bytes_done += line.num_bytes
            self._on_progress(self.progress)

    def _add(self, job: Job) -> None:
        try:
            self._engine.add_request(job.prompt, job.params, config=job.config, request_id=str(job.id), stream=False)
        except SparseKVError as error:
            self._refuse(BadLine(number=job.number, num_bytes=job.num_bytes, id=job.id, reason=str(error)))
            return
        self._live[str(job.id)] = job
        self._live_bytes += job.num_bytes
        self.progress.num_live = len(self._live)

    def _refuse(self, line: BadLine) -> None:
        self._errors.write(line.number, line.id, line.reason)
        self._on_bad_line(line.number, line.reason)
        self.progress.num_bad += 1
        self.progress.bytes_done += line.num_bytes

    def _finish(self, output: RequestOutput) -> None:
        job = self._live.pop(output.request_id)
        self._results.write(job.id, result_of(output))
        self._live_bytes -= job.num_bytes
        progress = self.progress
        progress.num_live = len(self._live)
        progress.num_done += 1
        progress.num_failed += output.error is not None
        progress.num_prompt_tokens += len(output.prompt_ids)
        progress.num_output_tokens += len(output.token_ids)
        progress.bytes_done += job.num_bytes


def result_of(output: RequestOutput) -> dict[str, Any]:
    """What a finished request leaves in the output file, its id aside."""
    assert output.finish_reason is not None and output.report is not None, "a finished request has both"
    report = asdict(output.report)
    itl = sorted(report.pop("itl_s"))
    report |= {
        "itl_p50_s": itl[len(itl) // 2] if itl else None,
        "itl_max_s": itl[-1] if itl else None,
        "num_prompt_tokens": len(output.prompt_ids),
        "num_output_tokens": len(output.token_ids),
    }
    result: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason.value,
        "error": output.error,
        "report": {name: round(v, 6) if isinstance(v, float) else v for name, v in report.items()},
    }
    if output.logprobs is not None:
        result["logprobs"] = [asdict(token) for token in output.logprobs]
    return result
