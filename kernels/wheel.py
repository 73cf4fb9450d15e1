"""Packs the compiled kernels as a wheel that every Python and every torch from 2.11 on can load.

    python kernels/wheel.py --platform manylinux_2_28_x86_64      writes dist/hf_sparsekv_kernels-...whl

The library uses neither Python's nor torch's C++ interface, so one wheel serves all. The platform tag is a claim about
the C library the wheel was built against: build in the image of that name, or leave the tag as it is.
"""

import argparse
import base64
import hashlib
import importlib.util
import platform
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent
NAME = "hf_sparsekv_kernels"

INIT = '''"""The compiled kernels of hf_sparsekv. Importing this loads nothing: hf_sparsekv does, when it uses them."""

from pathlib import Path

LIBRARY = Path(__file__).with_name("hf_sparsekv_kernels.so")
"""For `torch.ops.load_library`; its ops are then `torch.ops.hf_sparsekv_kernels`."""
'''
"""The package that comes with the library, here and in a wheel of hf_sparsekv that was built with kernels."""


def load_build() -> ModuleType:
    """`build.py` beside this file; the folder is no package."""
    spec = importlib.util.spec_from_file_location("hf_sparsekv_kernels_build", ROOT / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_wheel(library: Path, folder: Path, version: str, tag: str) -> Path:
    """A wheel with the library and a module that says where it is.

    Args:
        library: the compiled kernels.
        folder: where the wheel goes.
        version: of the distribution.
        tag: platform tag, such as manylinux_2_28_x86_64.
    Returns:
        the wheel.
    """
    info = f"{NAME}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {NAME.replace('_', '-')}\nVersion: {version}\n"
    metadata += "Summary: CUDA kernels of hf-sparsekv\nLicense: Apache-2.0\nRequires-Dist: torch>=2.11\n"
    wheel = f"Wheel-Version: 1.0\nGenerator: wheel.py\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n"
    files = {
        f"{NAME}/__init__.py": INIT.encode(),
        f"{NAME}/{NAME}.so": library.read_bytes(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
    }
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}-{version}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            # A fixed date: the same sources give the same wheel.
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> int:
    """Command line, see this module's docstring."""
    parser = argparse.ArgumentParser(description="Build the wheel of the kernels.")
    parser.add_argument("--platform", default=f"linux_{platform.machine()}", help="platform tag, default %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT.parent / "dist", help="folder, default %(default)s")
    options = parser.parse_args()
    build = load_build()
    try:
        library, _ = build.build()
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    if foreign := build.foreign_symbols(library):
        print(f"not portable, undefined: {', '.join(foreign)}", file=sys.stderr)
        return 1
    version = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["version"]
    print(write_wheel(library, options.output, version, options.platform))
    return 0


if __name__ == "__main__":
    sys.exit(main())
