"""The output of a batch run: JSON lines of which, whatever happens to the process, each is whole and there once.

A line is one `write` at the end of the file. What a kill in the middle of it leaves has no line break, and the next run
cuts it off. A lock beside the file, which dies with its process, keeps a second run away.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from hf_sparsekv.errors import InputError

SYNC_EVERY_S = 5.0
"""A power cut costs at most what was written in this time."""

RESULT_FIELDS = frozenset(("id", "token_ids", "finish_reason", "report"))
"""What a line has that is a result of a batch run, beside others."""
_ERROR_FIELDS = frozenset(("line", "id", "error"))
_RESULT_HEAD = '{"id": '
_AGAIN = "the lines before it are whole: run the same command again to go on"


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
            raise unwritable(path, error) from error
        self._synced_s = clock()

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            InputError: it cannot be written, or the file is not in its place any more.
        """
        line = json.dumps(values, ensure_ascii=False, separators=(", ", ": ")).encode("utf-8") + b"\n"
        self._check_place()
        try:
            written = self._file.write(line)
            while written < len(line):  # a disk that is almost full takes a part
                written += self._file.write(line[written:])
        except OSError as error:
            with suppress(OSError):  # the next run cuts it off otherwise
                self._file.truncate(self._length)
            raise InputError(f"{unwritable(self._path, error)}; {_AGAIN}") from error
        self._length += len(line)
        if self._sync_every_s is not None and self._clock() - self._synced_s >= self._sync_every_s:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has everything."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._synced_s = self._clock()

    def close(self) -> None:
        """Write through to the disk and close.

        Raises:
            InputError: the disk does not take it, or the file is not in its place any more.
        """
        if self._file.closed:
            return
        try:
            self.sync()
            self._check_place()
        finally:
            self._file.close()

    def _check_place(self) -> None:
        """Whether what is written can be found by the path: somebody may have deleted or replaced the file."""
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            is_there = False
        if not is_there:
            raise InputError(
                f"{self._path} was deleted, moved or replaced while it was written to: the lines in it went with it; "
                "put it back, or run the same command again to make them anew"
            )


class ResultFile:
    """The results of a run, as a context manager: locked, mended and read on entry, on the disk on exit.

    Args:
        path: the file; it may hold the results of an earlier run.
        fields: what each line has beside others, "id" among them; a file of other lines is refused.
        first_field: what follows the id, which tells a torn result from a torn line of something else; None = anything.
        sync_every_s: seconds between writes that wait for the disk.
        wait_s: how long to wait for a process that has the lock.
    """

    def __init__(
        self,
        path: Path,
        *,
        fields: frozenset[str] = RESULT_FIELDS,
        first_field: str | None = "text",
        sync_every_s: float = SYNC_EVERY_S,
        wait_s: float = 0.0,
    ) -> None:
        self.path, self._sync_every_s, self._wait_s = path, sync_every_s, wait_s
        self._fields, self._first_field = fields, first_field
        self._lock = lock_of(path)
        self.done: set[str] = set()
        """Ids of the results that were there on entry, as strings."""

    def __enter__(self) -> "ResultFile":
        """Take the lock, cut a torn line off, and learn which ids are done.

        Raises:
            InputError: another process writes to the file, it holds something else, or it cannot be opened.
        """
        _acquire(self._lock, self.path, "-o", self._wait_s)
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

    def give_way(self, other: Path) -> None:
        """Let another file, which is on the disk, take the place of this one, and append to that from now on.

        Raises:
            InputError: the file is not in its place any more, or cannot be replaced.
        """
        self._lines.close()
        try:
            other.replace(self.path.resolve())
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._lines = LineFile(self.path, sync_every_s=self._sync_every_s)

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
            raise unwritable(self.path, error) from error

    def _read_ids(self, file: BinaryIO) -> int:
        """Fill `done`; where the last whole line ends."""
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                if not self.done and not _is_torn(line.rstrip(b"\0"), self._first_field):
                    raise self._foreign(number)
                break
            self.done.add(self._id(number, line))
            end += len(line)
        return end

    def _id(self, number: int, line: bytes) -> str:
        name = result_id(line, self._fields)
        if name is None:
            raise self._foreign(number)
        return name

    def _foreign(self, number: int) -> InputError:
        return InputError(
            f"{self.path} holds something else: line {number} is no result of a run, which has "
            f"{', '.join(sorted(self._fields))}; give another -o, or move the file away"
        )


class ErrorFile:
    """The lines that could not be served, written anew by each run; without any there is no file.

    Args:
        path: the file; what an earlier run left there is removed.
    Raises:
        InputError: another process writes to the file, it holds something else, or cannot be removed or made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: LineFile | None = None
        self._lock = lock_of(path)
        _acquire(self._lock, path, "--errors")
        try:
            check_errors(path)
            path.unlink(missing_ok=True)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise unwritable(path, error) from error
            raise

    def write(self, line: int, name: str | int | None, reason: str) -> None:
        """Add a line of the input with what is wrong with it."""
        if self._lines is None:
            self._lines = LineFile(self.path)
        self._lines.write({"line": line, "id": name, "error": reason})

    def close(self) -> None:
        """Write through to the disk and close."""
        try:
            if self._lines is not None:
                self._lines.close()
        finally:
            self._lock.release()


def result_id(line: bytes, fields: frozenset[str] = RESULT_FIELDS) -> str | None:
    """The id of a whole line of a result file; None if it is none."""
    values = _json(line)
    return str(values["id"]) if isinstance(values, dict) and values.keys() >= fields else None


def check_errors(path: Path) -> None:
    """Refuse to replace a file that is not there for errors.

    Raises:
        InputError: it holds something else.
    """
    if path.exists():
        with path.open("rb") as file:
            if not _is_error(file.readline()):
                raise InputError(f"{path} holds something else than the errors of a run: give another --errors")


def lock_of(path: Path) -> FileLock:
    """What a process holds while it writes to a file."""
    real = path.resolve()  # by whatever name: one file, one lock
    return FileLock(real.with_name(f".{real.name}.lock"))


def remove_with_lock(path: Path) -> None:
    """Remove a file that one run needed, if it is there, and its lock."""
    path.unlink(missing_ok=True)
    Path(lock_of(path).lock_file).unlink(missing_ok=True)


def _acquire(lock: FileLock, path: Path, option: str, wait_s: float = 0.0) -> None:
    if not path.resolve().parent.is_dir():  # the lock would make it
        raise InputError(f"cannot write {path}: no such folder; make it first")
    try:
        lock.acquire(timeout=wait_s)
    except Timeout as error:
        raise InputError(f"another process is writing to {path}: wait for it, or give another {option}") from error
    except OSError as error:
        raise unwritable(path, error) from error


def _json(line: bytes) -> Any:
    """What a line says; None if it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_error(line: bytes) -> bool:
    """Whether this is a line of an error file, or the beginning of one that was torn."""
    if not line.endswith(b"\n"):
        return line.rstrip(b"\0").startswith(b'{"line": ') or b'{"line": '.startswith(line.rstrip(b"\0"))
    values = _json(line)
    return isinstance(values, dict) and values.keys() == _ERROR_FIELDS


def _is_torn(line: bytes, first_field: str | None) -> bool:
    """Whether this may be the beginning of a result; after a power cut a file may also end in zeros."""
    text = line.decode("utf-8", "replace")
    if not text.startswith(_RESULT_HEAD):
        return _RESULT_HEAD.startswith(text)
    try:
        _, end = json.JSONDecoder().raw_decode(text, len(_RESULT_HEAD))
    except ValueError:
        return True  # torn within the id
    rest, following = text[end:], ", " if first_field is None else f', "{first_field}": '
    return rest.startswith(following) or following.startswith(rest)


def unwritable(path: Path, error: OSError) -> InputError:
    """What to raise where a file cannot be opened, read back or written."""
    return InputError(f"cannot write {path}: {error.strerror or error}")
