"""The files of a batch run by several replicas: parts of the output, see `part_files`, and of the errors.

Each serves every n-th line.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from hf_sparsekv.engine.batch_lines import line_numbers
from hf_sparsekv.engine.batch_options import check_options
from hf_sparsekv.engine.batch_results import ErrorFile, ResultFile, check_errors, remove_with_lock
from hf_sparsekv.engine.part_files import PartFiles


class ReplicaFiles:
    """Where one of several replicas writes, as a context manager; merged on entry and on exit.

    Args:
        input: the lines of all replicas, for their order; None = it can be read only once, so that results stay in the
            order in which they came.
        output: results of all, in the end.
        errors: lines that could not be served, of all, in the end.
        replica, num_replicas: which of how many this is.
        options, may_mix: see `check_options`; None = whatever made them, results are gone on with.
    """

    def __init__(
        self,
        input: Path | None,
        output: Path,
        errors: Path,
        *,
        replica: int = 0,
        num_replicas: int = 1,
        options: Mapping[str, Any] | None = None,
        may_mix: bool = False,
    ) -> None:
        self._output, self._errors, self._options, self._may_mix = output, errors, options, may_mix
        self._replica, self._num_replicas = replica, num_replicas
        self._parts = PartFiles(
            output,
            lambda: {} if input is None else line_numbers(input),
            replica=replica,
            num_replicas=num_replicas,
            on_merged=self._forget_errors,
        )
        self._stack = ExitStack()

    def serves(self, number: int) -> bool:
        """Whether the line of this number, from 1, is this replica's."""
        return (number - 1) % self._num_replicas == self._replica

    def __enter__(self) -> tuple[ResultFile, ErrorFile]:
        """The open files. What is done already counts as done in `ResultFile.done`.

        Raises:
            InputError: another run writes to the output, a file holds something else or cannot be opened, or results
                were made with other options.
        """
        with self._stack:
            if self._num_replicas == 1:
                self._parts.merge_leftovers()
                results = self._stack.enter_context(ResultFile(self._output))
                self._check_options(has_results=bool(results.done))
                bad_lines = ErrorFile(self._errors)
            else:
                with self._parts.whole() as merged:
                    check_errors(self._errors)
                    self._parts.merge_into(merged)
                    self._check_options(has_results=bool(merged.done) or self._parts.is_anyone_at_work())
                    results = self._stack.enter_context(self._parts.part())
                results.done |= merged.done
                bad_lines = ErrorFile(self._parts.own_of(self._errors))
            self._stack.callback(bad_lines.close)
            self._stack = self._stack.pop_all()
        return results, bad_lines

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write through, merge, and let go."""
        if self._num_replicas == 1:
            self._stack.close()
            return
        with self._parts.whole() as merged:
            self._stack.close()
            self._parts.merge_into(merged)
            self._merge_errors()

    def _check_options(self, *, has_results: bool) -> None:
        if self._options is not None:
            check_options(self._output, self._options, has_results=has_results, may_mix=self._may_mix)

    def _forget_errors(self, part: Path) -> None:
        """Remove the errors beside a part that has moved into the output."""
        errors = self._errors.with_name(self._errors.name + part.name.removeprefix(self._output.name))
        if errors != self._parts.own_of(self._errors):  # that one is merged next
            remove_with_lock(errors)

    def _merge_errors(self) -> None:
        """Replace this replica's lines among the errors of all by those of this run."""
        own = self._parts.own_of(self._errors)
        lines = [e for e in _error_lines(self._errors) if not self.serves(e["line"])] + _error_lines(own)
        if lines:
            text = "".join(f"{json.dumps(e, ensure_ascii=False)}\n" for e in sorted(lines, key=lambda e: e["line"]))
            _replace(self._errors, text.encode("utf-8"))
        else:
            self._errors.unlink(missing_ok=True)
        remove_with_lock(own)


def _error_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _replace(path: Path, content: bytes) -> None:
    target = path.with_name(f".{path.name}.merging")
    target.write_bytes(content)
    target.replace(path)
