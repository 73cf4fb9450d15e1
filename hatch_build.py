"""Compiles the CUDA kernels into the wheel where there is a compiler. hatchling runs this for wheels, not for sdists.

Environment:
    HF_SPARSEKV_BUILD_KERNELS: 1 builds them or fails; 0 leaves them out; unset, they are built where nvcc is, except
        for an editable installation.
    HF_SPARSEKV_CUDA_ARCHS: architectures, such as 90a or 80,90a; unset, those of `kernels/build.py`.
    MAX_JOBS: sources compiled at once.
"""

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD_VARIABLE = "HF_SPARSEKV_BUILD_KERNELS"
ARCHS_VARIABLE = "HF_SPARSEKV_CUDA_ARCHS"


def wants_kernels(is_editable: bool, find_compiler: Callable[[], object]) -> bool:
    """Whether to compile, by the environment and by what this machine has.

    Args:
        is_editable: of the installation.
        find_compiler: raises a RuntimeError where there is none.
    Raises:
        RuntimeError: they must be built and there is no compiler.
        ValueError: the environment says something else than 0 or 1.
    """
    asked = os.environ.get(BUILD_VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{BUILD_VARIABLE}={asked}: set it to 1 (build or fail) or 0 (leave out), or unset it")
    if asked == "0" or (not asked and (is_editable or sys.platform != "linux")):
        return False
    try:
        find_compiler()
    except RuntimeError as error:
        if asked:
            raise RuntimeError(f"{BUILD_VARIABLE}=1, but {error}") from error
        return False
    return True


def chosen_archs(default: tuple[str, ...]) -> tuple[str, ...]:
    """The architectures that the environment names, or the default."""
    named = os.environ.get(ARCHS_VARIABLE, "")
    return tuple(arch.strip() for arch in named.split(",") if arch.strip()) or default


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # generic in some releases of hatchling only
    """Adds the package `hf_sparsekv_kernels` to the wheel, which then fits one platform and every Python."""

    def dependencies(self) -> list[str]:
        """torch, for its headers, where kernels are built and no torch is installed that could lend them."""
        build = self._script("wheel").load_build()
        if not self._wants_kernels(build, is_editable=False):
            return []
        try:
            build.torch_folder()
        except build.BuildError:
            return ["torch>=" + ".".join(map(str, build.OLDEST_TORCH))]
        return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what goes into the wheel."""
        wheel = self._script("wheel")
        build = wheel.load_build()
        if not self._wants_kernels(build, is_editable=version == "editable"):
            return
        self.app.display_info(f"CUDA kernels: may take minutes; {BUILD_VARIABLE}=0 leaves them out")
        try:
            library, _ = build.build(chosen_archs(build.ARCHS), say=self.app.display_info)
        except build.BuildError as error:
            self.app.abort(f"CUDA kernels: {error}\n{BUILD_VARIABLE}=0 installs without them")
        package = library.with_name("package_init.py")
        package.write_text(wheel.INIT)
        build_data["force_include"] |= {
            str(package): f"{wheel.NAME}/__init__.py",
            str(library): f"{wheel.NAME}/{library.name}",
        }
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def _wants_kernels(self, build: ModuleType, is_editable: bool) -> bool:
        try:
            return wants_kernels(is_editable, build.find_nvcc)
        except (RuntimeError, ValueError) as error:
            self.app.abort(str(error))
            raise  # abort does not return, but does not say so

    def _script(self, name: str) -> ModuleType:
        """A script of `kernels/`, which is a folder of sources and not a package."""
        spec = importlib.util.spec_from_file_location(name, Path(self.root) / "kernels" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
