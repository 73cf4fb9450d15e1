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

from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.ops import reference
from hf_sparsekv.ops.launchers import launchers
from hf_sparsekv.ops.reference.diversity import DIVERSITY_BYTES
from hf_sparsekv.ops.shared_memory import two_lists_fit

LIBRARY_VARIABLE = "HF_SPARSEKV_KERNELS"
"""Path of the compiled library, or "off"; default: that of the installed package hf_sparsekv_kernels."""
OFF = "off"
PACKAGE = "hf_sparsekv_kernels"

HALF = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
MAX_DECODE_GROUP = 8
MAX_KEY_SPLITS = 64
KEYS_PER_SPLIT = 128
POOLINGS = {"none": 0, "avg": 1, "max": 2, "forward": 3}
REDUCTIONS = {"mean": 0, "max": 1}


def find_library() -> Path | None:
    """Where the compiled library is, or None.

    Raises:
        ConfigError: the environment variable names a file that is not there.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named == OFF:
        return None
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{LIBRARY_VARIABLE}={named}: no such file; build it with `python kernels/build.py`")
        return Path(named)
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    library = getattr(importlib.import_module(PACKAGE), "LIBRARY", None)
    return None if library is None else Path(library)


@functools.cache
def load() -> Any:
    """The compiled ops under our names, see `launchers`, or None when no library is there.

    Raises:
        ConfigError: there is one, and it does not load or lacks an op.
    """
    library = find_library()
    if library is None:
        return None
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ConfigError(
            f"{library} does not load: {error}; build it anew with `python kernels/build.py`, or set"
            f" {LIBRARY_VARIABLE}=off"
        ) from error
    return launchers(getattr(torch.ops, PACKAGE), str(library))


def window_lse(
    q: Tensor, k_pool: Tensor, lengths: Tensor, scale: float, max_length: int, block_table: Tensor | None = None
) -> Tensor:
    """See `reference.window_lse`."""
    ops = load()
    if ops is None or not _is_half(q, k_pool):
        return reference.window_lse(q, k_pool, lengths, scale, max_length, block_table)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    workspace = q.new_empty(2 * lse.numel() * _key_splits(max_length), dtype=torch.float32)
    ops.window_lse(lse, workspace, q, k_pool, lengths, block_table, scale, max_length)
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
    reductions = [
        _code(REDUCTIONS, name, value)
        for name, value in (("row_reduction", row_reduction), ("group_reduction", group_reduction))
    ]
    target = None if anchor is None else cosine
    ops.window_score(
        score, target, q, k_pool, lse, lengths, block_table, value_norm, anchor, scale, max_length, *reductions
    )
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


def kv_diversity(
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    temporary_bytes: int = DIVERSITY_BYTES,
) -> Tensor:
    """See `reference.kv_diversity`."""
    ops = load()
    if ops is None or not _is_half(keys, values):
        return reference.kv_diversity(keys, values, lengths, inv_freq, positions, temporary_bytes)
    result = keys.new_empty(keys.shape[:3], dtype=torch.float32)
    # Directions and moments of every split of keys and of values, and the values' part of every token.
    per_head = 2 * _key_splits(keys.shape[2]) * (keys.shape[3] + 2) + keys.shape[2]
    workspace = result.new_empty(keys.shape[0] * keys.shape[1] * per_head)
    ops.kv_diversity(result, workspace, keys, values, lengths, inv_freq, positions)
    return result


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
    if ops is None or (secondary is not None and not two_lists_fit(scores.shape[2], capacity, scores.device)):
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
        _code(POOLINGS, "pooling", pooling),
        pool_width,
        None if secondary is None else secondary.contiguous(),
        _code(POOLINGS, "secondary_pooling", secondary_pooling),
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


def compact_into(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, index: Tensor, block_table: Tensor) -> None:
    """See `reference.compact_into`."""
    ops = load()
    if ops is None or not _is_half(k_pool, v_pool, k, v):
        reference.compact_into(k_pool, v_pool, k, v, index, block_table)
    else:
        ops.compact_into(k_pool, v_pool, k, v, index, None, block_table)


def write_packed(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """See `reference.write_packed`."""
    ops = load()
    if ops is None or not _is_half(k_pool, v_pool, k, v):
        reference.write_packed(k_pool, v_pool, k, v, slots)
    else:
        ops.write_packed(k_pool, v_pool, k, v, slots)


def write_slots(
    k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, slots: Tensor, block_table: Tensor | None = None
) -> None:
    """See `reference.write_slots`."""
    ops = load()
    if ops is None or not _is_half(k_pool, v_pool, k, v):
        reference.write_slots(k_pool, v_pool, k, v, slots, block_table)
    else:
        ops.write_slots(k_pool, v_pool, k, v, slots, block_table)


def attend_slots(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    lengths: Tensor,
    scale: float,
    max_length: int,
    block_table: Tensor | None = None,
) -> Tensor:
    """See `reference.attend_slots`."""
    ops = load()
    group = _group(q, k_pool)
    if ops is None or not _is_half(q, k_pool) or group > MAX_DECODE_GROUP or max_length == 0:
        return reference.attend_slots(q, k_pool, v_pool, lengths, scale, max_length, block_table)
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    workspace = _decode_workspace(ops, q, k_pool, max_length, False)
    ops.attend_slots(output, None, workspace, q, k_pool, v_pool, lengths, block_table, scale, max_length)
    return output


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
    group = _group(q, k_pool)
    state = (positions, scores, lengths)
    rule: tuple[Any, ...] = (scale, decay, gain, num_sinks, num_recent, score_by_position)
    if ops is None or not _is_half(q, k_pool) or group > MAX_DECODE_GROUP:
        definition: Callable[..., Tensor] = reference.decode_step
        return definition(q, k, v, k_pool, v_pool, *state, budgets, victims, next_position, *rule, block_table)
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    workspace = _decode_workspace(ops, q, k_pool, scores.shape[2], True)
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
            with torch.inference_mode(False):  # others use it later, outside of that mode
                buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._buffers[key] = buffer
        return buffer


_workspaces = _Workspaces()


def _decode_workspace(ops: Any, q: Tensor, k_pool: Tensor, max_length: int, is_step: bool) -> Tensor:
    """What one decode launch needs; every launch of a stream shares it."""
    sizes = (q.shape[0], k_pool.shape[1], q.shape[1] // k_pool.shape[1], 1, q.shape[2], max_length, is_step)
    try:
        needed = ops.decode_workspace_bytes(*sizes)
    except RuntimeError as error:
        if "does not take" not in str(error):
            raise
        raise InputError(
            f"`q` is {list(q.shape)}, `k_pool` {list(k_pool.shape)}, with {max_length} slots per request: decoding"
            f" takes 1 to 65535 requests, 1 to {MAX_DECODE_GROUP} query heads per KV head, and at least one slot"
        ) from error
    return _workspaces.at_least(needed, q.device)


def decode_obstacle(dtype: torch.dtype, head_dim: int, group: int) -> str | None:
    """Why decoding runs the PyTorch definitions, which no CUDA graph can capture; None if it does not."""
    if load() is None:
        return "the compiled kernels are not installed"
    if dtype not in HALF:
        return f"the compiled kernels take bf16 and fp16, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"the compiled kernels take head dimensions {HEAD_DIMS}, not {head_dim}"
    if group > MAX_DECODE_GROUP:
        return f"the compiled kernels take {MAX_DECODE_GROUP} query heads per KV head, not {group}"
    return None


def reserve_decode_workspace(device: torch.device, sizes: list[tuple[int, int, int, int, int, bool]]) -> Tensor | None:
    """Allocate the current stream's workspace for all decode launches to come: a CUDA graph must not allocate it.

    Args:
        device: of the launches.
        sizes: of each kind of launch: requests, KV heads, query heads per KV head, head dim, largest length, and
            whether it is a `decode_step` (else `attend_slots`). Shapes that no kernel takes need nothing.
    Returns:
        What those launches will use, until a larger one is asked for: a graph that was captured has to hold it.
    """
    ops = load()
    if ops is None:
        return None
    needed = [
        ops.decode_workspace_bytes(batch, kv_heads, group, 1, dim, length, is_step)
        for batch, kv_heads, group, dim, length, is_step in sizes
        if dim in HEAD_DIMS and group <= MAX_DECODE_GROUP
    ]
    return _workspaces.at_least(max(needed), device) if needed else None


KERNELS = {
    "window_lse": window_lse,
    "window_score": window_score,
    "key_anchor": key_anchor,
    "kv_diversity": kv_diversity,
    "select": select,
    "compact": compact,
    "compact_into": compact_into,
    "write_packed": write_packed,
    "write_slots": write_slots,
    "attend_slots": attend_slots,
    "decode_step": decode_step,
}
"""Ops that a compiled kernel can take over on a GPU."""


def _is_half(*tensors: Tensor) -> bool:
    """Whether the matrix kernels were built for these tensors."""
    return all(t.dtype in HALF and t.dtype == tensors[0].dtype and t.shape[-1] in HEAD_DIMS for t in tensors)


def _group(q: Tensor, k_pool: Tensor) -> int:
    """G, query heads per KV head."""
    if q.dim() != 3 or k_pool.dim() != 4 or k_pool.shape[1] == 0:
        raise InputError(f"`q` must be [B, H, D], `k_pool` [P, K, S, D]: got {list(q.shape)} and {list(k_pool.shape)}")
    return q.shape[1] // k_pool.shape[1]


def _code(codes: dict[str, int], argument: str, value: str) -> int:
    """What the compiled ops call an option."""
    if value not in codes:
        raise InputError(f"`{argument}` is {value!r}: it must be one of {', '.join(codes)}")
    return codes[value]


def _key_splits(max_length: int) -> int:
    """Upper bound of the pieces that a row of keys is cut into."""
    return max(1, min(MAX_KEY_SPLITS, -(-max_length // KEYS_PER_SPLIT)))
