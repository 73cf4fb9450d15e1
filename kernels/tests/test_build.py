"""The build script: what it compiles, when it compiles again, and what it refuses to ship. Needs no GPU."""

import importlib.util
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers import load_build

build = load_build()
KERNELS = Path(build.ROOT)


def test_architectures_become_compiler_flags() -> None:
    assert build.gencode(["80", "90a", "90+PTX"]) == [
        *("-gencode", "arch=compute_80,code=sm_80"),
        *("-gencode", "arch=compute_90a,code=sm_90a"),
        *("-gencode", "arch=compute_90,code=compute_90"),
    ]


@pytest.mark.parametrize("arch", ["", "sm_80", "90x", "90+SASS"])
def test_an_unknown_architecture_is_refused(arch: str) -> None:
    with pytest.raises(build.BuildError, match="unknown architecture"):
        build.gencode([arch])


def test_every_op_has_a_kernel_and_a_binding() -> None:
    stems = {source.stem for source in build.sources()}
    for op in ("compact", "decode", "diversity", "score", "select", "write"):
        assert {op, f"{op}_binding"} <= stems
        assert {op, f"{op}_binding"} <= {source.stem for source in build.sources([op])}


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(build.BuildError, match="no source belongs to sel;"):
        build.sources(["sel"])


def test_a_changed_header_or_flag_changes_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    source, header, other = tmp_path / "a.cu", tmp_path / "b.h", tmp_path / "other.h"
    source.write_text('#include "b.h"\n')
    header.write_text("// first\n")
    other.write_text("// first\n")
    before = build._digest(source, ["-O3"])
    other.write_text("// second\n")
    assert build._digest(source, ["-O3"]) == before
    assert build._digest(source, ["-O2"]) != before
    header.write_text("// second\n")
    assert build._digest(source, ["-O3"]) != before


def test_the_compiler_report_is_understood(tmp_path: Path) -> None:
    unit = build.Unit(source=tmp_path / "a.cu", object=tmp_path / "a.o")
    unit.log.write_text(
        "ptxas info    : Compiling entry function '_Z1fv' for 'sm_80'\n"
        "ptxas info    : Function properties for _Z1fv\n"
        "    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem, 400 bytes cmem[0]\n"
        "ptxas warning : something\n"
    )
    (usage,) = build.kernel_usage([unit])
    assert (usage.kernel, usage.arch, usage.registers) == ("_Z1fv", "sm_80", 40)
    assert (usage.spill_bytes, usage.stack_bytes, usage.shared_bytes) == (20, 24, 2048)
    assert build.warnings([unit]) == ["ptxas warning : something"]


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("nm") is None, reason="needs a C++ compiler and nm")
def test_a_symbol_of_torchs_cpp_interface_is_found(tmp_path: Path) -> None:
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text(
        "#include <cstdlib>\n#include <string>\n"
        'extern "C" int aoti_torch_get_dim(void*, long*);\n'
        "namespace at { void* empty(int); }\n"
        'extern "C" void f() { at::empty(std::abs(std::stoi("1")) + aoti_torch_get_dim(nullptr, nullptr)); }\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    assert build.foreign_symbols(library) == ["_ZN2at5emptyEi"]


def test_the_hub_build_lists_every_source() -> None:
    listing = tomllib.loads((KERNELS / "build.toml").read_text())
    device_code = {str(path.relative_to(KERNELS)) for path in (KERNELS / "csrc").iterdir()}
    bindings = {str(path.relative_to(KERNELS)) for path in (KERNELS / "torch-ext").glob("*.[ch]*")}
    assert set(listing["kernel"]["hf_sparsekv_kernels"]["src"]) == device_code
    # Their build generates registration.h.
    assert set(listing["torch"]["src"]) == bindings - {"torch-ext/registration.h"}


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_candidates", lambda: iter([tmp_path / "nvcc"]))
    with pytest.raises(build.BuildError, match="set CUDA_HOME"):
        build.find_nvcc()


def test_a_wheel_records_every_file(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("hf_sparsekv_wheel", KERNELS / "wheel.py")
    assert spec is not None and spec.loader is not None
    wheel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheel)
    library = tmp_path / "any.so"
    library.write_bytes(b"machine code")
    path = wheel.write_wheel(library, tmp_path, "1.2.3", "linux_x86_64")
    assert path.name == "hf_sparsekv_kernels-1.2.3-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path) as archive:
        assert archive.read("hf_sparsekv_kernels/hf_sparsekv_kernels.so") == b"machine code"
        record = archive.read("hf_sparsekv_kernels-1.2.3.dist-info/RECORD").decode()
        assert {line.split(",")[0] for line in record.splitlines()} == set(archive.namelist())
