"""The output of a batch run: JSON lines of which, whatever happens to the process, each is whole and there once.

A line is one `write` at the end of the file. What a kill in the middle of it leaves has no line break, and the next run
cuts it off. A lock beside the file, which dies with its process, keeps a second run away.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from hf_sparsekv.errors import InputError

SYNC_EVERY_S = 5.0
"""A power cut costs at most what was written in this time."""

_RESULT_HEAD = b'{"id":'
_ERROR_HEAD = b'{"line":'


class LineFile:
    """Appends JSON objects to a file, one a line.

    Args:
        path: made if it is not there.
        sync_every_s: seconds between writes that wait for the disk; None = never.
        clock: seconds.
    Raises:
        InputError: it cannot be opened or written.
    """

    def __init__(
        self, path: Path, *, sync_every_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._sync_every_s, self._clock = path, sync_every_s, clock
        try:
            self._file = path.open("ab", buffering=0)
            self._length = self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise _unwritable(path, error) from error
        self._synced_s = clock()

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line."""
        line = json.dumps(values, ensure_ascii=False, separators=(", ", ": ")).encode("utf-8") + b"\n"
        try:
            written = self._file.write(line)
            while written < len(line):  # a disk that is almost full takes a part
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(self._length)
            raise _unwritable(self._path, error) from error
        self._length += len(line)
        if self._sync_every_s is not None and self._clock() - self._synced_s >= self._sync_every_s:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has everything."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self._path, error) from error
        self._synced_s = self._clock()

    def close(self) -> None:
        """Write through to the disk and close."""
        try:
            self.sync()
        finally:
            self._file.close()


class ResultFile:
    """The results of a run, as a context manager: locked, mended and read on entry, on the disk on exit.

    Args:
        path: the file; it may hold the results of an earlier run.
        sync_every_s: seconds between writes that wait for the disk.
        wait_s: how long to wait for a process that has the lock.
    """

    def __init__(self, path: Path, *, sync_every_s: float = SYNC_EVERY_S, wait_s: float = 0.0) -> None:
        self.path, self._sync_every_s, self._wait_s = path, sync_every_s, wait_s
        real = path.resolve()  # by whatever name: one file, one lock
        self._lock = FileLock(real.with_name(f".{real.name}.lock"))
        self.done: set[str] = set()
        """Ids of the results that were there on entry, as strings."""

    def __enter__(self) -> "ResultFile":
        """Take the lock, cut a torn line off, and learn which ids are done.

        Raises:
            InputError: another process writes to the file, it holds something else, or it cannot be opened.
        """
        if not self.path.resolve().parent.is_dir():  # the lock would make it
            raise InputError(f"cannot write {self.path}: no such folder; make it first")
        try:
            self._lock.acquire(timeout=self._wait_s)
        except Timeout as error:
            raise InputError(f"another process is writing to {self.path}: wait for it, or give another -o") from error
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            if self.path.exists():
                self._mend()
            self._lines = LineFile(self.path, sync_every_s=self._sync_every_s)
        except BaseException:
            self._lock.release()
            raise
        return self

    def write(self, name: str | int, values: Mapping[str, Any]) -> None:
        """Append the result of one id."""
        self._lines.write({"id": name, **values})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write through to the disk and let the lock go."""
        try:
            self._lines.close()
        finally:
            self._lock.release()

    def _mend(self) -> None:
        try:
            with self.path.open("r+b") as file:
                end = self._read_ids(file)
                if end < file.seek(0, os.SEEK_END):
                    file.truncate(end)
                    os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _read_ids(self, file: BinaryIO) -> int:
        """Fill `done`; where the last whole line ends."""
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                if not self.done and not _is_torn(line):
                    raise self._foreign(number)
                break
            self.done.add(self._id(number, line))
            end += len(line)
        return end

    def _id(self, number: int, line: bytes) -> str:
        try:
            name = json.loads(line)["id"]
        except (ValueError, TypeError, KeyError) as error:
            raise self._foreign(number) from error
        return str(name)

    def _foreign(self, number: int) -> InputError:
        return InputError(f"{self.path} holds something else: line {number} is no result with an id; give another -o")


class ErrorFile:
    """The lines that could not be served, written anew by each run; without any there is no file.

    Args:
        path: the file; what an earlier run left there is removed.
    Raises:
        InputError: the file holds something else, or cannot be removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: LineFile | None = None
        try:
            if path.exists():
                with path.open("rb") as file:
                    head = file.read(len(_ERROR_HEAD))
                if head != _ERROR_HEAD[: len(head)]:
                    raise InputError(f"{path} holds something else than the errors of a run: give another --errors")
                path.unlink()
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, line: int, name: str | int | None, reason: str) -> None:
        """Add a line of the input with what is wrong with it."""
        if self._lines is None:
            self._lines = LineFile(self.path)
        self._lines.write({"line": line, "id": name, "error": reason})

    def close(self) -> None:
        """Write through to the disk and close."""
        if self._lines is not None:
            self._lines.close()


def _is_torn(line: bytes) -> bool:
    """Whether this may be the beginning of a result; after a power cut a file may also end in zeros."""
    head = line.rstrip(b"\0")[: len(_RESULT_HEAD)]
    return head == _RESULT_HEAD[: len(head)]


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot write {path}: {error.strerror or error}")
