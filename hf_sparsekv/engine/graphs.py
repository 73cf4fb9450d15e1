"""Decode steps as CUDA graphs: captured once for each shape of a step, replayed with one call."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.attention.packed import DecodeRows, PackedStep
from hf_sparsekv.cache.pages import PagePool
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

    def reserve(self, max_rows: int, max_length: int, capacities: list[int]) -> None:
        """Allocate what the kernels need between launches, for every size that can come.

        Args:
            max_rows: R.
            max_length: of an appending layer.
            capacities: slots of the replacing layers.
        """
        group, dim = self._num_heads // self._pool.num_kv_heads, self._pool.keys.shape[3]
        buckets = {batch_bucket(count, max_rows) for count in range(1, max_rows + 1)}
        lengths = {length_bucket(1 << i, max_length) for i in range(max_length.bit_length() + 1)}
        needs = [(length, False) for length in lengths] + [(capacity, True) for capacity in set(capacities)]
        with torch.cuda.stream(self._stream):
            reserve_decode_workspace(
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
        key = tuple((id(p.rows), p.count, p.max_length, g.features) for p, g in zip(parts, groups, strict=True))
        if key not in self._captured:
            self._captured[key] = self._capture(parts, groups)
        captured = self._captured[key]
        captured.graph.replay()
        return captured.outputs

    def _capture(self, parts: list[DecodeRows], groups: list[Group]) -> _Captured:
        offset, placed = 0, []
        for part in parts:
            placed.append(DecodeRows(part.rows, offset, part.count, part.max_length))
            offset += part.count
        step, graph = PackedStep(self._pool, placed, [], []), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            outputs = self._body(step, groups)
        return _Captured(graph, outputs)


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
