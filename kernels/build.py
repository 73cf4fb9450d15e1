"""Compiles the CUDA kernels of this folder with nvcc, called directly, and loads them into torch.

    python kernels/build.py                      everything, all architectures
    python kernels/build.py --archs 90a          one architecture
    python kernels/build.py --only select        one op's sources
    python kernels/build.py --check              no GPU needed: also registers, spills and undefined symbols

torch's own extension builder needs a CUDA build of torch; this one needs only nvcc and torch's headers. Objects are
kept in `build/obj` under a hash of everything that goes into them, so a second build compiles what changed.
"""

import argparse
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
NAME = "hf_sparsekv_kernels"

ARCHS = ("80", "89", "90a", "90+PTX")
"""Machine code for Ampere, Ada and Hopper, and code that the driver can compile for what comes after them."""

MAX_JOBS = int(os.environ.get("MAX_JOBS") or min(8, os.cpu_count() or 1))
"""Sources compiled at once; a compiler takes up to 2 GB."""
OLDEST_TORCH = (2, 11)
TORCH_TARGET = "0x020b000000000000"
"""The oldest torch (2.11) whose stable ABI the bindings may use."""

FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "--expt-relaxed-constexpr")

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ALLOWED_UNDEFINED = re.compile(
    r"^(aoti_torch_|torch_)\w+$"  # torch's C shims
    r"|@(GLIBC|GLIBCXX|CXXABI|GCC|GOMP)_"  # versioned symbols of libc, libstdc++ and libgcc
    r"|@libcudart\.so|^(_ITM_\w+|__gmon_start__|__cxa_finalize)$"
)


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says what is missing or what the compiler said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One source file and the object it becomes."""

    source: Path
    object: Path

    @property
    def log(self) -> Path:
        """What the compiler said about registers and spills."""
        return self.object.with_suffix(".log")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelUsage:
    """What one kernel takes of one architecture."""

    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def find_nvcc() -> Path:
    """The compiler: CUDA_HOME, PATH, the usual place, or a pip package.

    Raises:
        BuildError: there is none.
    """
    for candidate in _candidates():
        if candidate.is_file():
            return candidate
    raise BuildError(
        "no nvcc found: set CUDA_HOME to a CUDA toolkit (12.8 or later), put nvcc on PATH, or"
        " `pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm`"
    )


def _candidates() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            yield Path(home) / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(folder).glob("*/bin/nvcc"))


def torch_folder() -> Path:
    """Where torch is installed, without importing it.

    Raises:
        BuildError: it is not, or it is older than the stable ABI.
    """
    spec = importlib.util.find_spec("torch")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    # pip hides the environment that it installs into from a build; the headers there do all the same.
    for folder in (*places, Path(sysconfig.get_path("platlib")) / "torch"):
        if not (folder / "version.py").is_file():
            continue
        release = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "version.py").read_text())
        if release is None or (int(release[1]), int(release[2])) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            raise BuildError(f"the torch in {folder} is too old for the bindings: they need {oldest} or later")
        return folder
    raise BuildError("torch is not installed: its headers are needed to compile the bindings")


def sources(only: Sequence[str] = ()) -> list[Path]:
    """Every source of the library, or those of the ops named in `only` (`select` takes `select*`)."""
    found = sorted((ROOT / "csrc").rglob("*.cu")) + sorted((ROOT / "torch-ext").glob("*_binding.cpp"))
    if not only:
        return found
    chosen = [source for source in found if any(re.match(rf"{re.escape(op)}(_|$)", source.stem) for op in only)]
    if not chosen:
        raise BuildError(f"no source belongs to {', '.join(only)}; there are {', '.join(s.stem for s in found)}")
    return chosen


def gencode(archs: Sequence[str]) -> list[str]:
    """nvcc's flags for architectures such as "80" (machine code) and "90+PTX" (portable code only)."""
    flags = []
    for arch in archs:
        number, _, portable = arch.partition("+")
        if not re.fullmatch(r"\d{2,3}[af]?", number) or portable not in ("", "PTX"):
            raise BuildError(f"unknown architecture {arch!r}: write 80, 89, 90a or 90+PTX")
        code = f"compute_{number}" if portable else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def build(
    archs: Sequence[str] = ARCHS,
    only: Sequence[str] = (),
    output: Path | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[Path, list[Unit]]:
    """Compile and link the library, reusing what is up to date.

    Args:
        archs: see `gencode`.
        only: ops to build, all if empty.
        output: where the library goes; by default under `build/`, one file per choice of archs and ops.
        say: told, line by line, what is done; compiling everything takes minutes.
    Returns:
        the library, and its units.
    Raises:
        BuildError: no compiler, no torch, or a source does not compile.
    """
    nvcc = find_nvcc()
    include, release = torch_folder() / "include", torch_folder() / "version.py"
    compile_flags = [*FLAGS, f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DUSE_CUDA", "-Xptxas", "-v"]
    # torch's checks put their file's name into messages: not the name of a folder of the machine that compiled.
    compile_flags += ["-Xcompiler", f"-ffile-prefix-map={include}=include"]
    toolchain = _version(nvcc) + release.read_text()
    units = []
    commands = []
    for source in sources(only):
        is_device_code = source.suffix == ".cu"
        flags = [*compile_flags, *(gencode(archs) if is_device_code else [])]
        digest = _digest(source, [toolchain, *flags])
        unit = Unit(source=source, object=BUILD / "obj" / f"{source.stem}.{digest}.o")
        units.append(unit)
        if not unit.object.is_file() or not unit.log.is_file():
            commands.append((unit, [str(nvcc), *flags, "-I", str(include), "-c", str(source.relative_to(ROOT))]))
    if commands:
        say(f"{nvcc}: {len(commands)} of {len(units)} sources to compile for {', '.join(archs)}, {MAX_JOBS} at once")
    _compile_all(commands, say)
    tag = "_".join([*archs, *only])
    library = output or BUILD / "lib" / tag.replace("+", "") / f"{NAME}.so"
    _link(nvcc, [unit.object for unit in units], library)
    return library, units


def _version(nvcc: Path) -> str:
    return subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout


def _digest(source: Path, extra: Sequence[str]) -> str:
    """Hash of a source, of every header of ours that it reaches, and of the flags."""
    digest = hashlib.sha256("\0".join(extra).encode())
    waiting, seen = [source], set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text = path.read_text()
        digest.update(f"{path.relative_to(ROOT)}\0{text}\0".encode())
        nearby = ((path.parent / name).resolve() for name in sorted(_INCLUDE.findall(text)))
        waiting += [header for header in nearby if header.is_file() and header.is_relative_to(ROOT)]
    return digest.hexdigest()[:16]


def _compile_all(commands: Sequence[tuple[Unit, list[str]]], say: Callable[[str], object]) -> None:
    start = time.monotonic()
    with ThreadPoolExecutor(MAX_JOBS) as pool:
        running = {pool.submit(_compile, unit, command): unit for unit, command in commands}
        for count, future in enumerate(as_completed(running), start=1):
            if future.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            future.result()
            say(f"[{count}/{len(commands)}] {running[future].source.name}, {time.monotonic() - start:.0f} s so far")


def _compile(unit: Unit, command: Sequence[str]) -> None:
    unit.object.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, renamed at the end: two builds may run at once, and a killed one leaves no half an object.
    with tempfile.TemporaryDirectory(dir=unit.object.parent) as folder:
        partial = Path(folder) / unit.object.name
        done = subprocess.run([*command, "-o", str(partial)], cwd=ROOT, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        if done.returncode != 0:
            raise BuildError(f"{unit.source.relative_to(ROOT)} does not compile:\n{output}")
        unit.log.write_text(output)
        partial.replace(unit.object)


def _link(nvcc: Path, objects: Sequence[Path], library: Path) -> None:
    # `-z defs` reports a function that no source defines here rather than at load; libtorch_cpu has the C shims. It
    # can also have instances of std::string's functions, so the C++ runtime goes first.
    command = [str(nvcc), "-shared", "-nodlink", "-cudart", "static", "-Xlinker", "-z,defs"]
    command += ["-L", str(torch_folder() / "lib"), *map(str, objects), "-lstdc++", "-ltorch_cpu", "-ldl"]
    stamp = library.with_suffix(".link")
    if library.is_file() and stamp.is_file() and stamp.read_text() == "\n".join(command):
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        partial = Path(folder) / library.name
        done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"the library does not link:\n{done.stdout}{done.stderr}")
        partial.replace(library)
    stamp.write_text("\n".join(command))


def kernel_usage(units: Sequence[Unit]) -> list[KernelUsage]:
    """Registers, spills and static shared memory per kernel and architecture, from the compiler's report."""
    found = []
    for unit in units:
        name, arch, spills, stack = "", "", 0, 0
        for line in unit.log.read_text().splitlines():
            if entry := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
                name, arch, spills, stack = entry[1], entry[2], 0, 0
            elif frame := _FRAME.search(line):
                stack, spills = int(frame[1]), int(frame[2]) + int(frame[3])
            elif used := re.search(r"Used (\d+) registers", line):
                shared = re.search(r"(\d+) bytes smem", line)
                found.append(
                    KernelUsage(
                        kernel=name,
                        arch=arch,
                        registers=int(used[1]),
                        spill_bytes=spills,
                        stack_bytes=stack,
                        shared_bytes=int(shared[1]) if shared else 0,
                    )
                )
    return found


def warnings(units: Sequence[Unit]) -> list[str]:
    """What the compiler complained about."""
    lines = (line for unit in units for line in unit.log.read_text().splitlines())
    return [line for line in lines if re.search(r"\bwarning\b", line, re.IGNORECASE)]


def foreign_symbols(library: Path) -> list[str]:
    """Undefined symbols that are neither torch's C shims nor the C and C++ runtimes': there should be none.

    One C++ symbol of torch would tie the library to one version of it.
    """
    listing = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True)
    names = [line.split()[-1] for line in listing.stdout.splitlines() if line.strip()]
    return [name for name in names if not _ALLOWED_UNDEFINED.search(name)]


def local_archs() -> tuple[str, ...]:
    """The architecture of this machine's first GPU, or all when there is none."""
    import torch

    if not torch.cuda.is_available():
        return ARCHS
    major, minor = torch.cuda.get_device_capability()
    return ("90a",) if (major, minor) == (9, 0) else (f"{major}{minor}",)


@functools.cache
def load() -> Any:
    """Build what is out of date for this machine's GPU, load it, and return `torch.ops.hf_sparsekv_kernels`."""
    import torch

    library, _ = build(local_archs())
    ops: Any = torch.ops
    ops.load_library(str(library))
    return getattr(ops, NAME)


def _report(library: Path, units: Sequence[Unit]) -> bool:
    """Print what a check found; whether all is well."""
    usage = kernel_usage(units)
    mangled = "\n".join(item.kernel for item in usage)
    demangle = shutil.which("c++filt") or shutil.which("cu++filt") or "cat"
    names = subprocess.run([demangle], input=mangled, check=True, capture_output=True, text=True).stdout.splitlines()
    print(f"{'arch':8}{'registers':>10}{'spill B':>9}{'stack B':>9}{'static smem B':>15}  kernel")
    for item, name in sorted(zip(usage, names, strict=True), key=lambda pair: (pair[1], pair[0].arch)):
        short = re.sub(r"\(.*", "", name.removeprefix("void ")).replace("skv::", "")
        sizes = f"{item.registers:>10}{item.spill_bytes:>9}{item.stack_bytes:>9}{item.shared_bytes:>15}"
        print(f"{item.arch:8}{sizes}  {short}")
    complaints = warnings(units)
    foreign = foreign_symbols(library)
    for line in complaints:
        print(f"warning: {line}")
    for symbol in foreign:
        print(f"undefined symbol that is not part of a stable interface: {symbol}")
    print(f"{library}: {library.stat().st_size / 2**20:.2f} MiB, {len(units)} sources")
    return not foreign and not complaints


def main() -> int:
    """Command line, see this module's docstring."""
    parser = argparse.ArgumentParser(description="Build the CUDA kernels of hf_sparsekv.")
    parser.add_argument("--archs", default=",".join(ARCHS), help="comma-separated, default %(default)s")
    parser.add_argument("--only", default="", help="comma-separated ops, default all")
    parser.add_argument("--output", type=Path, help="path of the library, default under kernels/build")
    parser.add_argument("--check", action="store_true", help="report registers, spills, warnings, undefined symbols")
    options = parser.parse_args()
    only = [op for op in options.only.split(",") if op]
    try:
        library, units = build(
            options.archs.split(","), only, options.output, lambda line: print(line, file=sys.stderr)
        )
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    if options.check:
        return 0 if _report(library, units) else 1
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
