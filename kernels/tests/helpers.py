"""Inputs that hurt, for every kernel test: NaN wherever a kernel must not read, tables that lead astray.

Shapes: B request, K KV head, C longest length, D head dim, P page, S slots per page, M pages in a block table.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_sparsekv.ops.kernels import LIBRARY_VARIABLE, OFF
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_policy

__all__ = [
    "assert_bitwise_equal",
    "assert_close_policy",
    "capture",
    "int32",
    "load_build",
    "load_ops",
    "make_pool",
    "needs_cuda",
    "padded_rows",
    "poisoned_rows",
]

POISON_ENTRIES = (-1, 2147480000)
"""What unused block table entries hold: following one is an illegal access."""

_BUILD_MODULE = "hf_sparsekv_kernels_build"

cuda: Any = torch.cuda
"""torch leaves its streams and graphs without types."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a CUDA GPU only")


def load_build() -> ModuleType:
    """`kernels/build.py` as a module; `kernels` is a folder of sources, not a package."""
    if _BUILD_MODULE not in sys.modules:
        spec = importlib.util.spec_from_file_location(_BUILD_MODULE, Path(__file__).parents[1] / "build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_BUILD_MODULE] = module
        spec.loader.exec_module(module)
    return sys.modules[_BUILD_MODULE]


@functools.cache
def load_ops() -> Any:
    """`torch.ops.hf_sparsekv_kernels`: the library that the environment names, which `hf_sparsekv` then loads as well;
    else built for this machine's GPU if it is out of date."""
    library = os.environ.get(LIBRARY_VARIABLE)
    if not library or library == OFF:
        return load_build().load()
    torch.ops.load_library(library)
    return torch.ops.hf_sparsekv_kernels


def int32(values: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def poisoned_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """NaN in a non-contiguous view: rows are 8 elements apart from each other, so they stay 16-byte aligned."""
    wide = torch.full((*shape[:-1], shape[-1] + 8), float("nan"), dtype=dtype, device=device)
    return wide[..., : shape[-1]]


def padded_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, seed: int) -> Tensor:
    """Normal values in a non-contiguous view: every row is followed by 8 NaN, and rows stay 16-byte aligned."""
    generator = torch.Generator().manual_seed(seed)
    view = poisoned_rows(shape, dtype, device)
    view.copy_(torch.randn(*shape, generator=generator).to(dtype))
    return view


def make_pool(
    lengths: Sequence[int],
    K: int,
    D: int,
    page_size: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    capacity: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Keys and values of requests of the given lengths, stored so that a stray read gives NaN or a fault.

    Args:
        lengths: tokens per request, 0 allowed.
        K, D: KV heads, head dim.
        page_size: S, or None for a pool without pages ([B, K, C, D]).
        dtype, device: of keys and values.
        seed: of the values and of the page order.
        capacity: C, slots per request; default the longest length, at least 1.
    Returns:
        k_pool, v_pool: [P, K, S, D], non-contiguous, NaN in every slot that holds no token, pages shuffled, some
        pages unused; block_table: int32 [B, M], unused entries poisoned, or None;
        dense_k, dense_v: contiguous [B, K, C, D], the same tokens in order, 0 past each length.
    """
    batch, capacity = len(lengths), capacity or max(1, *lengths)
    generator = torch.Generator().manual_seed(seed)
    dense = [torch.randn(batch, K, capacity, D, generator=generator).to(dtype).to(device) for _ in range(2)]
    valid = torch.arange(capacity)[None] < torch.tensor(list(lengths))[:, None]
    for values in dense:
        values.masked_fill_(~valid.to(device)[:, None, :, None], 0.0)
    if page_size is None:
        pools = [poisoned_rows((batch, K, capacity, D), dtype, device) for _ in range(2)]
        for b, length in enumerate(lengths):
            for pool, values in zip(pools, dense, strict=True):
                pool[b, :, :length] = values[b, :, :length]
        return pools[0], pools[1], None, dense[0], dense[1]
    num_used = [-(-length // page_size) for length in lengths]
    num_pages = sum(num_used) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.tensor(POISON_ENTRIES, dtype=torch.int32).repeat(batch, -(-capacity // page_size) // 2 + 2)
    pools = [poisoned_rows((num_pages, K, page_size, D), dtype, device) for _ in range(2)]
    for b, length in enumerate(lengths):
        for entry in range(num_used[b]):
            page = table[b, entry] = order.pop()
            slots = slice(entry * page_size, min((entry + 1) * page_size, length))
            for pool, values in zip(pools, dense, strict=True):
                pool[page, :, : slots.stop - slots.start] = values[b, :, slots]
    return pools[0], pools[1], table.to(device), dense[0], dense[1]


def capture(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `launch`, warmed up once on a side stream as capture requires."""
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        launch()
    cuda.current_stream().wait_stream(stream)
    graph: torch.cuda.CUDAGraph = cuda.CUDAGraph()
    with cuda.graph(graph):
        launch()
    return graph
