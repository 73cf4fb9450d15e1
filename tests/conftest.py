"""Fixtures and markers that every test shares."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_sparsekv.errors import InputError
from hf_sparsekv.models_store import BUILTIN_ALIAS, resolve_model
from hf_sparsekv.testing.models import tiny_llama as build_tiny_llama

COMPAT_FOLDERS = ("integration", "seam")

torch.set_num_threads(1)  # tiny models: more threads only wait for one another


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what must also pass on the oldest transformers; skip, with its reason, what this machine cannot run."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        if item.path.relative_to(config.rootpath).parts[1] in COMPAT_FOLDERS:
            item.add_marker(pytest.mark.compat)
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {num_gpus}"))


@pytest.fixture(autouse=True)
def seed() -> int:
    """The global random state, set before every test; the value, for generators of a test's own."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """The builder of tiny Llamas: `tiny_llama(num_layers=4, num_heads=8, num_kv_heads=2, ...)`."""
    return build_tiny_llama


@pytest.fixture(scope="session")
def builtin_model_path() -> Path:
    """Folder of the built-in model; skips where it was never fetched (CI fetches it first)."""
    try:
        return Path(resolve_model(BUILTIN_ALIAS).path_or_id)
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
