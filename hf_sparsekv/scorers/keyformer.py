"""Keyformer: accumulated attention, regularised with Gumbel noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.scorers.base import ScoreInputs, Scorer
from hf_sparsekv.scorers.checks import check_range, check_seed
from hf_sparsekv.scorers.random import position_noise

TEMPERATURES = (1e-6, 1e6)
"""Beyond these a quotient of logits is no fp32 number, or no order."""


@dataclass(frozen=True, kw_only=True)
class Keyformer(Scorer):
    """Sum over all rows of softmax((logit + Gumbel noise) / temperature).

    The noise keeps tokens in play that would be cut too early by the few that lead.

    Source: Adnan et al., Keyformer (arXiv 2403.09054, section 3). Ours differs: the noise of a position is fixed for
    all rows, so that a result does not depend on how a prompt was cut into chunks; the temperature does not rise;
    decoding goes on with the running sum of plain weights.

    Memory: fp32 logits of as many rows as fit in `TEMPORARY_BYTES`, at least one row, and one fp32 copy of the keys.
    """

    name = "keyformer"
    queries = "all"
    uses_group_reduction = True
    default_prompt_share = 0.0
    decode_decay = 1.0
    decode_gain = 1.0

    temperature: float = 1.0
    """Divides the noisy logits; larger = flatter."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range("temperature", self.temperature, *TEMPERATURES)
        check_seed(self.seed)

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        batch, kv_heads, num_keys, _ = inputs.keys.shape
        num_seen = max(inputs.num_seen, num_keys)
        uniform = position_noise(self.seed, inputs.layer_idx, kv_heads, num_seen, inputs.heads)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6))).to(inputs.keys.device).expand(batch, -1, -1)
        noise = gumbel.gather(-1, inputs.key_positions())
        total = inputs.noisy_attention_received(noise, self.temperature)
        return total if inputs.carried is None else total + inputs.carried
