"""Rows of scores for the selection tests, and the launch that every one of them makes.

Most rows hold small multiples of a power of two: their sums are exact in fp32 in any order, so the kernel and the
reference must agree to the last bit, ties included.
"""

from dataclasses import dataclass
from typing import Any

import torch
from helpers import int32
from torch import Tensor

from hf_sparsekv.ops import reference

POOLINGS = ("none", "avg", "max", "forward")
"""In the order of the op's codes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Arguments of one selection."""

    scores: Tensor
    lengths: Tensor
    budgets: Tensor
    capacity: int
    num_sinks: int = 0
    num_recent: int = 0
    pooling: str = "none"
    pool_width: int = 1
    secondary: Tensor | None = None
    secondary_pooling: str = "none"
    secondary_width: int = 1
    share: float = 1.0

    def run(self, ops: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel's index, count and retained scores, checked to have stayed inside their tensors."""
        batch, heads, _ = self.scores.shape
        shape = (batch, heads, self.capacity)
        # Every row is followed by places that are not the kernel's.
        wide_index = torch.full((batch, heads, self.capacity + 3), -777, dtype=torch.int64, device=self.scores.device)
        wide_retained = torch.full((batch, heads, self.capacity + 5), float("nan"), device=self.scores.device)
        index, retained = wide_index[..., : shape[-1]], wide_retained[..., : shape[-1]]
        count = torch.full((batch,), -777, dtype=torch.int32, device=self.scores.device)
        self.launch(ops, index, count, retained)
        assert (wide_index[..., self.capacity :] == -777).all(), "wrote past the end of an index row"
        assert wide_retained[..., self.capacity :].isnan().all(), "wrote past the end of a retained row"
        return index.clone(), count, retained.clone()

    def launch(self, ops: Any, index: Tensor, count: Tensor, retained: Tensor) -> None:
        ops.select(
            index,
            count,
            retained,
            self.scores,
            self.lengths,
            self.budgets,
            self.num_sinks,
            self.num_recent,
            POOLINGS.index(self.pooling),
            self.pool_width,
            self.secondary,
            POOLINGS.index(self.secondary_pooling),
            self.secondary_width,
            self.share,
        )

    def run_reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """The definition, on the CPU: a sort that treats -0 and 0 as equal."""
        secondary = None if self.secondary is None else self.secondary.cpu()
        index, count, retained = reference.select(
            self.scores.cpu(),
            self.lengths.cpu(),
            self.budgets.cpu(),
            self.capacity,
            self.num_sinks,
            self.num_recent,
            self.pooling,
            self.pool_width,
            secondary,
            self.secondary_pooling,
            self.secondary_width,
            self.share,
        )
        device = self.scores.device
        return index.to(device), count.to(device), retained.to(device)


def score_rows(kind: str, heads: int, num_keys: int, lengths: list[int], seed: int) -> Tensor:
    """fp32 [B, K, N] in a non-contiguous view, NaN past each length.

    Args:
        kind: "exact" multiples of 1/1024; "ties" four values; "equal" one value; "signs" exact with zeros of both
            signs; "softmax" probabilities, whose sums depend on the order.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), heads, num_keys)
    if kind == "softmax":
        values = (3 * torch.randn(shape, generator=generator)).softmax(-1)
    else:
        bounds = {"exact": (-4096, 4096), "ties": (0, 4), "equal": (7, 8), "signs": (-2, 3)}[kind]
        values = torch.randint(*bounds, shape, generator=generator) / 1024
        if kind == "signs":
            values = torch.where(torch.rand(shape, generator=generator) < 0.5, values, -values)
    wide = torch.full((len(lengths), heads, num_keys + 3), float("nan"))
    for b, length in enumerate(lengths):
        wide[b, :, :length] = values[b, :, :length]
    return wide.cuda()[..., :num_keys]


def make_case(kind: str, lengths: list[int], budgets: list[int], num_keys: int, seed: int, **options: Any) -> Case:
    """A case of three heads; `secondary=True` asks for a second list of the same kind."""
    secondary = score_rows(kind, 3, num_keys, lengths, seed + 1) if options.pop("secondary", False) else None
    return Case(
        scores=score_rows(kind, 3, num_keys, lengths, seed),
        lengths=int32(lengths, "cuda"),
        budgets=int32(budgets, "cuda"),
        capacity=options.pop("capacity", max(budgets)),
        secondary=secondary,
        **options,
    )
