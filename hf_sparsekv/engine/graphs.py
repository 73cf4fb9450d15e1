"""Decode steps as CUDA graphs: captured once for each shape of a step, replayed with one call."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.attention.packed import DecodeRows, PackedStep
from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.engine.batch import Batch
from hf_sparsekv.engine.group import Group
from hf_sparsekv.engine.sampler import SampledTokens
from hf_sparsekv.ops.kernels import reserve_decode_workspace

_FINE_STEP = 8
"""Batch sizes from this on are rounded up to its multiples; smaller ones to powers of two."""
_SHORTEST = 1024
"""Bounds of the length are rounded up to powers of two, from this on."""

Body = Callable[[PackedStep, list[Group]], list[SampledTokens]]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: list[SampledTokens]
    groups: list[Group]
    """Whose state it works on. Held, so that no other group can get the id that the key names."""
    workspace: Tensor | None
    """Of the kernels. Held, because a later group may need a larger one in its place."""


def batch_bucket(count: int, limit: int) -> int:
    """The batch size that a graph for `count` rows has, at most `limit`."""
    rounded = -(-count // _FINE_STEP) * _FINE_STEP if count > _FINE_STEP else 1 << (count - 1).bit_length()
    return min(rounded, limit)


def length_bucket(length: int, limit: int) -> int:
    """The bound of the length that a graph for `length` tokens has, at most `limit`."""
    return min(max(_SHORTEST, 1 << (length - 1).bit_length()), limit)


class DecodeGraphs:
    """Graphs by their key: everything that reaches a launch as a Python number, and nothing else.

    That is, per group: which state, how many rows, what sampling does; and the bound of the length. Lengths, tables,
    tokens and sampling parameters are read from the device by the replay.
    """

    def __init__(self, pool: PagePool, num_heads: int, body: Body) -> None:
        """No graph yet.

        Args:
            pool: keys and values.
            num_heads: H, query heads of this rank.
            body: launches one decode step; it must neither ask the device anything nor allocate by what it finds.
        """
        self._pool, self._num_heads, self._body = pool, num_heads, body
        self._captured: dict[Hashable, _Captured] = {}
        self._stream = torch.cuda.Stream(pool.keys.device)
        self._memory = torch.cuda.graph_pool_handle()

    def reserve(self, rows: RowState) -> Tensor | None:
        """Allocate what the kernels need between launches, for every size that can come with a group's rows."""
        max_rows, max_length = rows.num_rows, rows.max_length
        capacities = {place.capacity for place in rows.places if not place.is_append}
        group, dim = self._num_heads // self._pool.num_kv_heads, self._pool.keys.shape[3]
        buckets = {batch_bucket(count, max_rows) for count in range(1, max_rows + 1)}
        lengths = {length_bucket(1 << i, max_length) for i in range(max_length.bit_length() + 1)}
        needs = [(length, False) for length in lengths] + [(capacity, True) for capacity in capacities]
        with torch.cuda.stream(self._stream):
            return reserve_decode_workspace(
                self._pool.keys.device,
                [(batch, self._pool.num_kv_heads, group, dim, *need) for batch in buckets for need in needs],
            )

    def run(self, batch: Batch) -> list[SampledTokens]:
        """Replay the graph of a batch without prompts, capturing it first if there is none.

        Returns:
            Per group; rows past the batch's are padding. Valid until the next `run`.
        """
        parts = [
            DecodeRows(
                part.rows,
                0,
                batch_bucket(part.count, part.rows.num_rows),
                length_bucket(part.max_length, part.rows.max_length),
            )
            for part in batch.step.decode
        ]
        groups = [part.group for part in batch.groups]
        key = tuple((id(g), p.count, p.max_length, g.features) for p, g in zip(parts, groups, strict=True))
        if key not in self._captured:
            self._captured[key] = self._capture(parts, groups)
        captured = self._captured[key]
        captured.graph.replay()
        return captured.outputs

    def forget(self, group: Group) -> None:
        """Drop the graphs that work on a group's state, before the state goes."""
        keys = [key for key, captured in self._captured.items() if group in captured.groups]
        if keys:
            torch.cuda.synchronize(self._pool.keys.device)  # a replay of the last step may still be running
        for key in keys:
            del self._captured[key]

    def _capture(self, parts: list[DecodeRows], groups: list[Group]) -> _Captured:
        workspace = [self.reserve(part.rows) for part in parts][-1]  # the largest so far
        offset, placed = 0, []
        for part in parts:
            placed.append(DecodeRows(part.rows, offset, part.count, part.max_length))
            offset += part.count
        step, graph = PackedStep(self._pool, placed, [], []), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            outputs = self._body(step, groups)
        return _Captured(graph, outputs, groups, workspace)


def rows_of(sampled: SampledTokens, count: int) -> SampledTokens:
    """The first `count` rows."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:count]

    return SampledTokens(
        sampled.ids[:count],
        sampled.is_bad[:count],
        cut(sampled.logprobs),
        cut(sampled.top_ids),
        cut(sampled.top_logprobs),
    )
