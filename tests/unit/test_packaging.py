"""What goes into a source distribution and into a wheel, with kernels and without. Needs no CUDA compiler."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from hf_sparsekv.ops.kernels import LIBRARY_VARIABLE, PACKAGE, find_library

ROOT = Path(__file__).parents[2]
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")
FAKE_NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "a compiler of this test" && exit
echo "$@" >> "{log}"
while [ "$1" != -o ]; do shift; done
echo code > "$2"
"""


def load_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hook = load_hook()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (hook.BUILD_VARIABLE, hook.ARCHS_VARIABLE, "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    kernels_build = sys.modules.pop("hf_sparsekv_kernels_build", None)
    yield
    sys.modules.pop("hf_sparsekv_kernels_build", None)  # the copied project's
    if kernels_build is not None:
        sys.modules["hf_sparsekv_kernels_build"] = kernels_build


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what a build reads, so that nothing is written to the real one."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("build", "__pycache__")
    for name in ("kernels", "hf_sparsekv", "evals"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes down its arguments; the file with them."""
    nvcc, log = tmp_path / "cuda" / "bin" / "nvcc", tmp_path / "calls"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(FAKE_NVCC.format(log=log))
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    return log


def no_compiler() -> None:
    raise RuntimeError("no nvcc found")


def a_compiler() -> None:
    """There is one."""


@pytest.mark.parametrize(
    ("asked", "is_editable", "platform", "find_compiler", "expected"),
    [
        (None, False, "linux", a_compiler, True),
        (None, False, "linux", no_compiler, False),
        (None, False, "darwin", a_compiler, False),
        (None, True, "linux", a_compiler, False),
        ("", False, "linux", no_compiler, False),
        ("0", False, "linux", a_compiler, False),
        ("1", False, "linux", a_compiler, True),
        ("1", True, "linux", a_compiler, True),
    ],
)
def test_kernels_are_built_where_asked_or_where_a_compiler_is(
    monkeypatch, asked, is_editable, platform, find_compiler, expected
):
    monkeypatch.setattr(sys, "platform", platform)
    if asked is not None:
        monkeypatch.setenv(hook.BUILD_VARIABLE, asked)
    assert hook.wants_kernels(is_editable, find_compiler) is expected


def test_asking_for_kernels_without_a_compiler_is_an_error(monkeypatch):
    monkeypatch.setenv(hook.BUILD_VARIABLE, "1")
    with pytest.raises(RuntimeError, match="HF_SPARSEKV_BUILD_KERNELS=1, but no nvcc found"):
        hook.wants_kernels(False, no_compiler)


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(hook.BUILD_VARIABLE, "yes")
    with pytest.raises(ValueError, match="HF_SPARSEKV_BUILD_KERNELS=yes: set it to 1"):
        hook.wants_kernels(False, a_compiler)


@pytest.mark.parametrize(("named", "expected"), [("", ("80",)), ("90a", ("90a",)), ("80, 90+PTX,", ("80", "90+PTX"))])
def test_architectures_come_from_the_environment(monkeypatch, named, expected):
    monkeypatch.setenv(hook.ARCHS_VARIABLE, named)
    assert hook.chosen_archs(("80",)) == expected


def test_a_wheel_without_kernels_is_pure_python(project, tmp_path, monkeypatch, fake_nvcc):
    monkeypatch.setenv(hook.BUILD_VARIABLE, "0")
    builder = WheelBuilder(str(project))
    assert builder.config.dependencies == []
    (wheel,) = builder.build(directory=str(tmp_path), versions=["standard"])
    assert wheel.endswith("-py3-none-any.whl")
    assert not fake_nvcc.exists()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed", [name for name in names if name.startswith("hf_sparsekv/")])
    folders = {name.split("/")[0] for name in names}
    assert folders == {"hf_sparsekv", f"{Path(wheel).name.split('-py3')[0]}.dist-info"}
    # `hf-sparsekv eval` needs its files there; in a process of its own, so that they are not the checkout's.
    assert not [name for name in names if "evals/results" in name]
    code = "from hf_sparsekv.cli.eval import evals_module; print(evals_module('session').__file__)"
    installed = tmp_path / "installed"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)}, capture_output=True
    )
    expected = installed / "hf_sparsekv" / "bundled" / "evals" / "session.py"
    assert (found.stdout.decode().strip(), found.stderr) == (str(expected), b"")


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_a_wheel_with_kernels_holds_the_library_and_fits_every_python(project, tmp_path, monkeypatch, fake_nvcc, capfd):
    monkeypatch.setenv(hook.ARCHS_VARIABLE, "90a")
    (wheel,) = WheelBuilder(str(project)).build(directory=str(tmp_path), versions=["standard"])
    assert wheel.endswith(f"-py3-none-{PLATFORM}.whl")
    calls = fake_nvcc.read_text()
    sources = [path.name for path in (ROOT / "kernels" / "csrc").glob("*.cu")]
    assert all(source in calls for source in sources)
    assert "code=sm_90a" in calls and "sm_80" not in calls
    printed = "".join(capfd.readouterr())
    assert "HF_SPARSEKV_BUILD_KERNELS=0 leaves them out" in printed and "sources to compile for 90a" in printed
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed", [n for n in archive.namelist() if n.startswith("hf_sparsekv_k")])
    package = tmp_path / "installed" / "hf_sparsekv_kernels"
    assert {path.name for path in package.iterdir()} == {"__init__.py", "hf_sparsekv_kernels.so"}
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.syspath_prepend(str(package.parent))
    try:
        assert find_library() == package / "hf_sparsekv_kernels.so"
    finally:
        sys.modules.pop(PACKAGE, None)
    assert (package / "hf_sparsekv_kernels.so").read_text() == "code\n"


@pytest.mark.parametrize("asked", [False, True])
def test_an_editable_installation_compiles_only_when_asked(project, monkeypatch, fake_nvcc, asked):
    if asked:
        monkeypatch.setenv(hook.BUILD_VARIABLE, "1")
    builder, build_data = WheelBuilder(str(project)), {"force_include": {}}
    own = hook.KernelBuildHook(str(project), {}, builder.config, builder.metadata, "", "wheel", builder.app)
    own.initialize("editable", build_data)
    assert fake_nvcc.exists() is asked
    assert bool(build_data["force_include"]) is asked


def test_torch_is_needed_to_build_only_where_none_lends_its_headers(project, tmp_path, monkeypatch, fake_nvcc):
    monkeypatch.setenv(hook.BUILD_VARIABLE, "1")
    assert WheelBuilder(str(project)).config.dependencies == []
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    assert WheelBuilder(str(project)).config.dependencies == []  # as in a build that pip isolates
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert WheelBuilder(str(project)).config.dependencies == ["torch>=2.11"]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    assert WheelBuilder(str(project)).config.dependencies == ["torch>=2.11"]
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    assert WheelBuilder(str(project)).config.dependencies == []


def test_what_does_not_compile_says_how_to_install_without(project, tmp_path, monkeypatch, fake_nvcc, capfd):
    monkeypatch.setenv(hook.ARCHS_VARIABLE, "9x")
    monkeypatch.setenv(hook.BUILD_VARIABLE, "1")
    with pytest.raises(SystemExit):
        list(WheelBuilder(str(project)).build(directory=str(tmp_path), versions=["standard"]))
    told = "".join(capfd.readouterr())
    assert "unknown architecture '9x'" in told and "HF_SPARSEKV_BUILD_KERNELS=0 installs without them" in told


def test_a_source_distribution_has_what_a_build_with_kernels_needs(tmp_path, monkeypatch):
    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as sdist:
        sdist.extractall(tmp_path, filter="data")
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels").rglob("*.[ch]*") if "build" not in path.parts}
    assert len(sources) > 30
    assert (
        sources | {".ci/run", "hatch_build.py", "kernels/build.py", "kernels/wheel.py", "pyproject.toml", "LICENSE"}
        <= files
    )
    assert not [name for name in files if name.startswith("kernels/build/") or name.endswith((".o", ".so", ".pyc"))]
    monkeypatch.setenv(hook.BUILD_VARIABLE, "0")
    wheels = [
        next(WheelBuilder(str(source)).build(directory=str(tmp_path / name), versions=["standard"]))
        for name, source in (("direct", ROOT), ("by_sdist", folder))
    ]
    assert Path(wheels[0]).read_bytes() == Path(wheels[1]).read_bytes()
