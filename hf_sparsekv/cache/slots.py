"""SlotStore: the fixed places of a window layer, with everything that decoding reads or changes."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

UNLIMITED = torch.iinfo(torch.int32).max
"""Budget of a request whose slots grow."""


@dataclass
class SlotStore:
    """C slots per request and KV head. Slot s of two heads may hold different tokens; both hold equally many."""

    keys: Tensor
    """[B, K, C, D], after RoPE."""
    values: Tensor
    """[B, K, C, D]."""
    positions: Tensor
    """int32 [B, K, C], position of the token in each slot; -1 = free."""
    scores: Tensor
    """fp32 [B, K, C], lowest goes first; infinity = never."""
    lengths: Tensor
    """int32 [B], slots in use; they are the first ones."""
    budgets: Tensor
    """int32 [B], slots that may be used, each <= C or UNLIMITED."""
    victims: Tensor
    """int64 [B, K], the slot that the next token takes."""
    next_positions: Tensor
    """int32 [B], position of the next token."""

    @property
    def capacity(self) -> int:
        """C."""
        return self.scores.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: keys, values, positions, scores and tables."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))

    @property
    def headless_nbytes(self) -> int:
        """Of these, the bytes of what belongs to no KV head, so that each rank of a model in parts holds it."""
        return sum(t.nbytes for t in (self.lengths, self.budgets, self.next_positions))

    def select_rows(self, rows: Tensor) -> None:
        """Make request i what request rows[i] was; rows may repeat."""
        for f in fields(self):
            tensor = getattr(self, f.name)
            setattr(self, f.name, tensor.index_select(0, rows.to(tensor.device)))

    def reserve(self, capacity: int) -> None:
        """Grow to at least `capacity` slots; new ones are free."""
        extra = capacity - self.capacity
        if extra <= 0:
            return
        pad = torch.nn.functional.pad
        self.keys, self.values, self.positions, self.scores = (  # all or, when memory is short, none of them
            pad(self.keys, (0, 0, 0, extra)),
            pad(self.values, (0, 0, 0, extra)),
            pad(self.positions, (0, extra), value=-1),
            pad(self.scores, (0, extra)),
        )

    def trim(self, capacity: int) -> None:
        """Shrink to at most `capacity` slots; the others must be free."""
        if capacity < self.capacity:
            self.keys, self.values, self.positions, self.scores = (
                t[:, :, :capacity].contiguous() for t in (self.keys, self.values, self.positions, self.scores)
            )

    @staticmethod
    def join_rows(parts: list["SlotStore"]) -> "SlotStore":
        """One store from the stores of single requests, all with equal capacity."""
        return SlotStore(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(SlotStore)})
