"""Random eviction: the floor that every method has to beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.scorers.base import ALL_HEADS, HeadShard, ScoreInputs, Scorer
from hf_sparsekv.scorers.checks import check_seed


@dataclass(frozen=True, kw_only=True)
class RandomScorer(Scorer):
    """Uniform noise per layer, KV head and position, the same for every request and device."""

    name = "random"
    queries = "none"
    is_query_aware = False
    is_probability = False

    seed: int = 0

    def __post_init__(self) -> None:
        """Check the seed."""
        check_seed(self.seed)

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        _, kv_heads, num_keys, _ = inputs.keys.shape
        noise = position_noise(self.seed, inputs.layer_idx, kv_heads, max(inputs.num_seen, num_keys), inputs.heads)
        rows = noise.to(inputs.keys.device).expand(inputs.keys.shape[0], -1, -1)
        return rows.gather(-1, inputs.key_positions())


def position_noise(
    seed: int, layer_idx: int, kv_heads: int, num_positions: int, heads: HeadShard = ALL_HEADS
) -> Tensor:
    """Uniform fp32 [K, N] in [0, 1): entry [k, p] depends on the seed, the layer, k and p only.

    Drawn on the CPU, position by position, so that a longer request starts with the same noise as a shorter one; for
    all heads of the layer, so that a head has the same noise on whatever rank it is.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer_idx)
    noise = torch.rand(num_positions, heads.total or kv_heads, generator=generator)
    return noise[:, heads.first : heads.first + kv_heads].T.contiguous()
