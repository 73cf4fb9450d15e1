"""The compiled kernels, where there are any: found, loaded once, and fitted to the signatures of our ops.

A kernel takes an op over when the tensors are on a GPU and have a dtype and shape it was built for; everything else
runs the PyTorch definition. Which is used never changes what is computed, see `kernels/README.md`.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv.errors import ConfigError
from hf_sparsekv.ops import reference

LIBRARY_VARIABLE = "HF_SPARSEKV_KERNELS"
"""Path of the compiled library, or "off"; default: that of the installed package hf_sparsekv_kernels."""
PACKAGE = "hf_sparsekv_kernels"

HALF = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
MAX_DECODE_GROUP = 8
MAX_KEY_SPLITS = 64
KEYS_PER_SPLIT = 128
MAX_TWO_LIST_KEYS = 16_384
"""Longer rows with two lists need more shared memory than the smallest supported GPU has."""
POOLINGS = {"none": 0, "avg": 1, "max": 2, "forward": 3}
REDUCTIONS = {"mean": 0, "max": 1}


def find_library() -> Path | None:
    """Where the compiled library is, or None.

    Raises:
        ConfigError: the environment variable names a file that is not there.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named == "off":
        return None
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{LIBRARY_VARIABLE}={named}: no such file; build it with `python kernels/build.py`")
        return Path(named)
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    return Path(importlib.import_module(PACKAGE).LIBRARY)


@functools.cache
def load() -> Any:
    """`torch.ops.hf_sparsekv_kernels`, or None when no library is there."""
    library = find_library()
    if library is None:
        return None
    torch.ops.load_library(str(library))
    return getattr(torch.ops, PACKAGE)


def window_lse(
    q: Tensor, k_pool: Tensor, lengths: Tensor, scale: float, max_length: int, block_table: Tensor | None = None
) -> Tensor:
    """See `reference.window_lse`."""
    ops = load()
    if ops is None or not _is_half(q, k_pool):
        return reference.window_lse(q, k_pool, lengths, scale, max_length, block_table)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    workspace = q.new_empty(2 * lse.numel() * _key_splits(max_length), dtype=torch.float32)
    ops.lse_tail(lse, workspace, q, k_pool, lengths, block_table, scale, max_length)
    return lse


def window_score(
    q: Tensor,
    k_pool: Tensor,
    lse: Tensor,
    lengths: Tensor,
    scale: float,
    max_length: int,
    row_reduction: str = "mean",
    group_reduction: str = "mean",
    block_table: Tensor | None = None,
    value_norm: Tensor | None = None,
    anchor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.window_score`."""
    ops = load()
    if ops is None or not _is_half(q, k_pool) or q.shape[2] == 0:
        options = (row_reduction, group_reduction, block_table, value_norm, anchor)
        return reference.window_score(q, k_pool, lse, lengths, scale, max_length, *options)
    score = q.new_empty((q.shape[0], k_pool.shape[1], max_length), dtype=torch.float32)
    cosine = score.new_empty(score.shape if anchor is not None else (0,))
    reductions = REDUCTIONS[row_reduction], REDUCTIONS[group_reduction]
    target = None if anchor is None else cosine
    ops.score(score, target, q, k_pool, lse, lengths, block_table, value_norm, anchor, scale, max_length, *reductions)
    return score, cosine


def key_anchor(k_pool: Tensor, lengths: Tensor, max_length: int, block_table: Tensor | None = None) -> Tensor:
    """See `reference.key_anchor`."""
    ops = load()
    if ops is None or not _is_half(k_pool):
        return reference.key_anchor(k_pool, lengths, max_length, block_table)
    shape = (lengths.shape[0], k_pool.shape[1], k_pool.shape[3])
    anchor = k_pool.new_empty(shape, dtype=torch.float32)
    workspace = anchor.new_empty(anchor.numel() * _key_splits(max_length))
    ops.key_anchor(anchor, workspace, k_pool, lengths, block_table, max_length)
    return anchor


def select(
    scores: Tensor,
    lengths: Tensor,
    budgets: Tensor,
    capacity: int,
    num_sinks: int,
    num_recent: int,
    pooling: str,
    pool_width: int,
    secondary: Tensor | None = None,
    secondary_pooling: str = "none",
    secondary_width: int = 1,
    share: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.select`."""
    ops = load()
    second = (secondary, secondary_pooling, secondary_width, share)
    if ops is None or (secondary is not None and scores.shape[2] > MAX_TWO_LIST_KEYS):
        first = (num_sinks, num_recent, pooling, pool_width)
        return reference.select(scores, lengths, budgets, capacity, *first, *second)
    shape = (scores.shape[0], scores.shape[1], capacity)
    index = scores.new_empty(shape, dtype=torch.int64)
    count = scores.new_empty(shape[:1], dtype=torch.int32)
    retained = scores.new_empty(shape)
    ops.select(
        index,
        count,
        retained,
        scores.contiguous(),
        lengths,
        budgets,
        num_sinks,
        num_recent,
        POOLINGS[pooling],
        pool_width,
        None if secondary is None else secondary.contiguous(),
        POOLINGS[secondary_pooling],
        secondary_width,
        share,
    )
    return index, count, retained


def compact(k_pool: Tensor, v_pool: Tensor, index: Tensor, block_table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.compact`."""
    ops = load()
    if ops is None or not _is_half(k_pool, v_pool):
        return reference.compact(k_pool, v_pool, index, block_table)
    shape = (*index.shape, k_pool.shape[3])
    keys, values = k_pool.new_empty(shape), v_pool.new_empty(shape)
    ops.compact(keys, values, k_pool, v_pool, index, block_table)
    return keys, values


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    positions: Tensor,
    scores: Tensor,
    lengths: Tensor,
    budgets: Tensor,
    victims: Tensor,
    next_position: Tensor,
    scale: float,
    decay: float,
    gain: float,
    num_sinks: int,
    num_recent: int,
    score_by_position: bool,
    block_table: Tensor | None = None,
) -> Tensor:
    """See `reference.decode_step`."""
    ops = load()
    group = q.shape[1] // k_pool.shape[1]
    state = (positions, scores, lengths)
    rule: tuple[Any, ...] = (scale, decay, gain, num_sinks, num_recent, score_by_position)
    if ops is None or not _is_half(q, k_pool) or group > MAX_DECODE_GROUP:
        definition: Callable[..., Tensor] = reference.decode_step
        return definition(q, k, v, k_pool, v_pool, *state, budgets, victims, next_position, *rule, block_table)
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    needed = ops.decode_workspace_bytes(q.shape[0], k_pool.shape[1], group, 1, q.shape[2], scores.shape[2], True)
    workspace = _workspaces.at_least(needed, q.device)
    ops.decode_step(
        output, k_pool, v_pool, *state, victims, next_position, workspace, q, k, v, budgets, block_table, *rule
    )
    return output


class _Workspaces:
    """One zeroed buffer per device and stream; kernels that use it leave its counters at zero."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], Tensor] = {}

    def at_least(self, num_bytes: int, device: torch.device) -> Tensor:
        """The buffer of the current stream, replaced by a larger one when it is too small."""
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._buffers[key] = buffer
        return buffer


_workspaces = _Workspaces()

KERNELS = {
    "window_lse": window_lse,
    "window_score": window_score,
    "key_anchor": key_anchor,
    "select": select,
    "compact": compact,
    "decode_step": decode_step,
}
"""Ops that a compiled kernel can take over on a GPU."""


def _is_half(*tensors: Tensor) -> bool:
    """Whether the matrix kernels were built for these tensors."""
    return all(t.dtype in HALF and t.dtype == tensors[0].dtype and t.shape[-1] in HEAD_DIMS for t in tensors)


def _key_splits(max_length: int) -> int:
    """Upper bound of the pieces that a row of keys is cut into."""
    return max(1, min(MAX_KEY_SPLITS, -(-max_length // KEYS_PER_SPLIT)))
