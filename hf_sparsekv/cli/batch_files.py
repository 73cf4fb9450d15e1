"""The files of a batch run: three of them, none another by whatever name, checked before a model is loaded."""

import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hf_sparsekv.errors import InputError

STDIN = "-"
_NAMES_OF_STREAMS = ("/dev", "/dev/fd", "/proc/self/fd")


@dataclass(frozen=True)
class BatchFiles:
    """Three different files."""

    input: Path
    """Lines to answer; "-" or a pipe until `readable` has read it."""
    output: Path
    errors: Path

    @classmethod
    def of(cls, file: Path, output: Path, errors: Path | None) -> "BatchFiles":
        """Fill in the default: out.jsonl has its errors in out.errors.jsonl, any other NAME in NAME-errors.jsonl.

        Raises:
            InputError: no input, something in place of a file that is none, or one file would be two of them.
        """
        if str(output) == STDIN:
            raise InputError(
                "-o -: results need a file of their own, so that a run can go on where it stopped; name it"
            )
        _check_writable_kind("-o", output)
        files = cls(file, output, _default_errors(output) if errors is None else errors)
        _check_writable_kind("--errors", files.errors)
        if not is_piped(file):
            _check_input(file)
        for one, other in ((file, output), (file, files.errors), (output, files.errors)):
            if _are_one(one, other):
                raise InputError(
                    f"input {file}, output {output} and errors {files.errors} must be three different files: "
                    f"{one} and {other} are one (by name, or by a link)"
                )
        return files

    def check_readers(self, count: int) -> None:
        """Refuse an input that only one process could read.

        Raises:
            InputError: it is a pipe, and there are more processes that serve lines.
        """
        if count > 1 and is_piped(self.input):
            raise InputError(f"{count} replicas cannot share the pipe {self.input}: write it to a file and give that")

    @contextmanager
    def readable(self) -> Iterator["BatchFiles"]:
        """The same with an input that has a size and can be read twice: what comes from a pipe is stored first."""
        if not is_piped(self.input):
            yield self
            return
        with tempfile.NamedTemporaryFile(prefix="hf-sparsekv-", suffix=".jsonl") as copy:
            try:
                if str(self.input) == STDIN:
                    shutil.copyfileobj(sys.stdin.buffer, copy)
                else:
                    with self.input.open("rb") as pipe:
                        shutil.copyfileobj(pipe, copy)
                copy.flush()
            except OSError as error:
                raise InputError(f"cannot read {self.input}: {error.strerror or error}") from error
            yield replace(self, input=Path(copy.name))


def is_piped(file: Path) -> bool:
    """Whether an input can be read only once, and has no size before that."""
    mode = _mode(file)
    return str(file) == STDIN or (mode is not None and stat.S_ISFIFO(mode))


def _default_errors(output: Path) -> Path:
    # Two outputs never have one default: a dash stands where the others have a dot.
    name = f"{output.stem}.errors.jsonl" if output.suffix == ".jsonl" else f"{output.name}-errors.jsonl"
    return output.with_name(name)


def _check_input(file: Path) -> None:
    mode = _mode(file)
    if mode is None:
        raise InputError(f"no such file: {file}")
    if not stat.S_ISREG(mode):
        raise InputError(f"{file} is {_kind(mode)}: give a file, or - for standard input")


def _check_writable_kind(option: str, path: Path) -> None:
    if not path.name:
        raise InputError(f"{option} {str(path)!r} names no file: give one, such as {option} out.jsonl")
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        raise InputError(f"cannot write {option} {path}: it is {_kind(mode)}, give a file")
    if str(path.absolute().parent) in _NAMES_OF_STREAMS:  # of a file, where the shell has redirected it
        raise InputError(f"cannot write {option} {path}: it is a name of a stream, give the file's own")
    if not path.resolve().parent.is_dir():
        raise InputError(f"cannot write {option} {path}: no such folder; make it first")


def _mode(path: Path) -> int | None:
    """Kind and permissions of what is there, links followed; None without it.

    Raises:
        InputError: nobody can say, such as of links that lead to each other.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"cannot use {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"


def _are_one(one: Path, other: Path) -> bool:
    """Whether two names are one file: equal, linked, or two hard links of it."""
    if str(one) == STDIN:
        return False
    if one.resolve() == other.resolve():
        return True
    return one.exists() and other.exists() and one.samefile(other)
