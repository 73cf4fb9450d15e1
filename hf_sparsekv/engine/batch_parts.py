"""The output of a batch run by several replicas: a part file for each while it runs, then one in the input's order.

Replicas share nothing but the folder. Each serves every n-th line and holds the lock of its own part; whoever comes or
goes takes the output's lock and moves what nobody writes to any more into the output: the parts of an earlier run, of
a replica that has died, and at the end its own. So the last one to end leaves a whole output, and after a kill the next
run, of however many replicas, does. A crash in the middle of that loses nothing: parts go when the output is on disk,
and an id that is in both is taken once.
"""

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import Timeout

from hf_sparsekv.engine.batch_lines import line_numbers
from hf_sparsekv.engine.batch_results import ErrorFile, ResultFile, check_errors, lock_of, result_id
from hf_sparsekv.errors import InputError

WAIT_S = 120.0
"""For another replica that is merging."""


class ReplicaFiles:
    """Where one of several replicas writes, as a context manager; merged on entry and on exit.

    Args:
        input: the lines of all replicas, for their order; None = it can be read only once, so that results stay in the
            order in which they came.
        output: results of all, in the end.
        errors: lines that could not be served, of all, in the end.
        replica, num_replicas: which of how many this is.
    """

    def __init__(
        self, input: Path | None, output: Path, errors: Path, *, replica: int = 0, num_replicas: int = 1
    ) -> None:
        self._input, self._output, self._errors = input, output, errors
        self._replica, self._num_replicas = replica, num_replicas
        self._stack = ExitStack()

    def serves(self, number: int) -> bool:
        """Whether the line of this number, from 1, is this replica's."""
        return (number - 1) % self._num_replicas == self._replica

    def __enter__(self) -> tuple[ResultFile, ErrorFile]:
        """The open files. What is done already counts as done in `ResultFile.done`.

        Raises:
            InputError: another run writes to the output, or a file holds something else or cannot be opened.
        """
        with self._stack:
            if self._num_replicas == 1:
                self._merge_leftovers()
                results = self._stack.enter_context(ResultFile(self._output))
                bad_lines = ErrorFile(self._errors)
            else:
                # Part locks are taken under the output's lock only: nobody is turned away by a sibling that merges.
                with ResultFile(self._output, wait_s=WAIT_S) as merged:
                    check_errors(self._errors)
                    self._merge_leftovers_into(merged)
                    results = self._stack.enter_context(ResultFile(self._part(self._output)))
                done = merged.done
                results.done |= done
                bad_lines = ErrorFile(self._part(self._errors))
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
        with ResultFile(self._output, wait_s=WAIT_S) as merged:
            self._stack.close()
            self._merge_leftovers_into(merged)
            self._merge_errors()

    def _part(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.part-{self._replica}-of-{self._num_replicas}")

    def _merge_leftovers(self) -> None:
        if _parts(self._output):
            with ResultFile(self._output, wait_s=WAIT_S) as merged:
                self._merge_leftovers_into(merged)

    def _merge_leftovers_into(self, merged: ResultFile) -> None:
        """Move the parts that nobody writes to into the output, whose lock is held.

        Raises:
            InputError: a replica of a run with another number of them is at work.
        """
        with ExitStack() as held:
            parts = []
            for path, num_replicas in _parts(self._output).items():
                try:
                    held.enter_context(lock_of(path).acquire(timeout=0))
                except Timeout:
                    if num_replicas != self._num_replicas:
                        raise InputError(
                            f"{path} is being written by one of {num_replicas} replicas: wait for that run, or give "
                            "another -o"
                        ) from None
                    continue
                parts.append(path)
            if parts:
                order = {} if self._input is None else line_numbers(self._input)
                merged.done |= _rewrite(merged, parts, order)
            for path in parts:
                _remove(path)
                errors = self._errors.with_name(self._errors.name + path.name.removeprefix(self._output.name))
                if errors != self._part(self._errors):  # that one is merged next
                    _remove(errors)

    def _merge_errors(self) -> None:
        """Replace this replica's lines among the errors of all by those of this run."""
        own = self._part(self._errors)
        lines = [e for e in _error_lines(self._errors) if not self.serves(e["line"])] + _error_lines(own)
        if lines:
            text = "".join(f"{json.dumps(e, ensure_ascii=False)}\n" for e in sorted(lines, key=lambda e: e["line"]))
            _replace(self._errors, text.encode("utf-8"))
        else:
            self._errors.unlink(missing_ok=True)
        _remove(own)


def _parts(output: Path) -> dict[Path, int]:
    """The part files of an output, and of how many replicas each is one."""
    pattern = re.compile(re.escape(output.name) + r"\.part-\d+-of-(\d+)")
    try:
        names = sorted(os.listdir(output.parent))
    except OSError:
        return {}  # opening the output will say it better
    found = {name: pattern.fullmatch(name) for name in names}
    return {output.with_name(name): int(match[1]) for name, match in found.items() if match}


def _remove(part: Path) -> None:
    """Remove a part file, if it is there, and its lock."""
    part.unlink(missing_ok=True)
    Path(lock_of(part).lock_file).unlink(missing_ok=True)


def _rewrite(merged: ResultFile, parts: list[Path], order: dict[str, int]) -> set[str]:
    """Write the output anew with the results of the parts, in order; the ids that it has then.

    Raises:
        InputError: a part holds something else, or the output cannot be written.
    """
    output = merged.path
    places: dict[str, tuple[int, int, Path, int, int]] = {}
    for path in (output, *parts):
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # else torn by a kill
                    name = result_id(line)
                    if name is None:
                        raise InputError(f"{path} holds something else than results of a run: move it away")
                    key = (order.get(name, len(order) + 1), len(places))
                    places.setdefault(name, (*key, path, offset, len(line)))
                offset += len(line)
    with ExitStack() as files:
        readers = {path: files.enter_context(path.open("rb")) for path in (output, *parts)}
        real = output.resolve()  # a link stays one
        target = real.with_name(f".{real.name}.merging")
        with target.open("wb") as file:
            for _, _, path, offset, length in sorted(places.values(), key=lambda place: place[:2]):
                readers[path].seek(offset)
                file.write(readers[path].read(length))
            file.flush()
            os.fsync(file.fileno())
    merged.give_way(target)
    return set(places)


def _error_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _replace(path: Path, content: bytes) -> None:
    target = path.with_name(f".{path.name}.merging")
    target.write_bytes(content)
    target.replace(path)
