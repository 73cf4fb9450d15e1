"""ExpectedAttention: the attention that future queries are expected to pay."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.errors import ConfigError
from hf_sparsekv.scorers.base import ScoreInputs, Scorer
from hf_sparsekv.scorers.checks import check_flag, check_int
from hf_sparsekv.scorers.rotation import rotate

MAX_FUTURE = 2**17
"""Positions whose rotations are averaged at once, in fp32."""


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Scorer):
    """Expected softmax weight under a Gaussian of the queries seen, turned to the positions to come.

    With mean m and covariance S of the un-rotated queries and R the rotation averaged over the next positions:
    softmax over keys of scale * k . Rm + scale^2 / 2 * k' (R S R') k, mean over the group, times the value's norm.

    Source: Devoto et al., Expected Attention (arXiv 2510.00636, section 3). Ours differs: the queries are un-rotated
    from what attention got, so q/k norms and biases are included; the first rows and keys count like all others.

    Memory: a few fp32 copies of the keys.
    """

    name = "expected_attention"
    queries = "all"
    is_query_aware = True
    is_probability = False

    num_future: int = 512
    """Positions ahead over which the rotation is averaged."""
    value_norm: bool = True
    """Multiply by the norm of the key's value."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_int("num_future", self.num_future, at_least=1, at_most=MAX_FUTURE)
        check_flag("value_norm", self.value_norm)

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        if inputs.inv_freq is None:
            raise ConfigError(
                "scorer 'expected_attention' needs rotary positions with fixed frequencies, which this model has not: "
                "choose another scorer"
            )
        batch, kv_heads, num_keys, dim = inputs.keys.shape
        inv_freq = inputs.inv_freq.to(inputs.keys.device)
        num_rows = min(inputs.queries.shape[2], num_keys)  # rows before the first key do not exist
        if num_rows == 0:
            return inputs.keys.new_zeros((batch, kv_heads, num_keys), dtype=torch.float32)
        positions = torch.arange(inputs.num_seen - num_rows, inputs.num_seen, device=inputs.keys.device)
        groups = inputs.queries.shape[1] // kv_heads
        queries = inputs.queries[:, :, inputs.queries.shape[2] - num_rows :]
        queries = queries.reshape(batch, kv_heads, groups, num_rows, dim)
        ahead = torch.arange(self.num_future, device=inputs.keys.device) + inputs.num_seen
        turn = _mean_rotation(ahead[:, None] * inv_freq)
        keys = inputs.keys.float()
        weights = []
        for group in range(groups):  # one query head of each KV head at a time: no fp32 [H, N, D]
            plain = rotate(queries[:, :, group].float(), positions[:, None] * inv_freq, backwards=True)
            mean = plain.mean(dim=2, keepdim=True)
            centred = plain - mean
            covariance = turn @ (centred.transpose(-1, -2) @ centred / num_rows) @ turn.T
            linear = (keys @ (mean @ turn.T).transpose(-1, -2)).squeeze(-1)
            square = (keys @ covariance * keys).sum(dim=-1)
            weights.append((inputs.scale * linear + inputs.scale**2 / 2 * square).softmax(dim=-1))
        score = torch.stack(weights).mean(dim=0)
        return score * inputs.values.float().norm(dim=-1) if self.value_norm else score


def _mean_rotation(angles: Tensor) -> Tensor:
    """[D, D]: the rotation matrix, averaged over positions."""
    cos, sin = angles.cos().mean(dim=0).diag(), angles.sin().mean(dim=0).diag()
    return torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)])
