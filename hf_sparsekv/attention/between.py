"""What a prompt leaves from one selection to the next while a bounded prefill reads it in chunks.

Shapes: K KV head, N candidate, C kept slot.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerRemains:
    """What one window layer has kept so far; its keys and values are in pages, in this order."""

    positions: Tensor
    """int64 [1, K, C], ascending."""
    scores: Tensor
    """fp32 [1, K, C], what the scorer gave them, before pooling."""


@dataclass
class PromptRemains:
    """What one prompt has left behind, by layer; nothing of it is read from the device."""

    layers: dict[int, LayerRemains] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What the scorer raised at selections so far."""
    can_rank: Tensor | None = None
    """bool scalar: whether the scores of all selections so far can rank tokens; None before the first."""

    def candidates(self, layer_idx: int, start: int, end: int, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Positions int64 [1, K, N] and carried scores fp32 [1, K, N] of what a layer selects from.

        Args:
            layer_idx: which layer.
            start, end: positions of the chunk's tokens, which follow what was kept; their carried scores are 0.
            like: keys [1, K, N, D].
        Returns:
            None, None at a prompt's first selection.
        """
        before = self.layers.get(layer_idx)
        if before is None:
            return None, None
        new = torch.arange(start, end, device=like.device).expand(1, like.shape[1], -1)
        positions = torch.cat([before.positions, new], dim=-1)
        return positions, torch.nn.functional.pad(before.scores, (0, end - start))

    def keep(self, layer_idx: int, positions: Tensor, scores: Tensor, count: int) -> None:
        """Take note of a selection that is not the prompt's last; `count` slots are in use."""
        self.layers[layer_idx] = LayerRemains(positions[..., :count].contiguous(), scores[..., :count].contiguous())

    def note(self, can_rank: Tensor) -> Tensor:
        """Add what the device will know of one more step's scores; the answer for all of them."""
        self.can_rank = can_rank if self.can_rank is None else self.can_rank & can_rank
        return self.can_rank
