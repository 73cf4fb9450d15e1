"""R-KV: importance mixed with redundancy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.scorers.base import Pooling, ScoreInputs, Scorer, row_chunks
from hf_sparsekv.scorers.checks import check_fraction, check_int

_BYTES_PER_PAIR = 9
"""Of two keys: similarity, comparison, column."""


@dataclass(frozen=True, kw_only=True)
class RKV(Scorer):
    """weight * importance - (1 - weight) * redundancy.

    Importance is the attention from the last rows. Redundancy is how alike a key is to the others: the softmax over
    keys of its mean cosine to them, where each key's most recent near-copies are not counted, so that of several copies
    the newest stays.

    Source: Cai et al., R-KV (arXiv 2505.24133, section 3). Ours differs: importance is not max-pooled first; it selects
    once at the prompt's end, and decoding goes on by attention and rank rather than in bursts.

    Memory: fp32 similarities of as many keys as fit in `TEMPORARY_BYTES`, and one fp32 copy of the keys.
    """

    name = "rkv"
    queries = "last"
    uses_row_reduction = True
    uses_group_reduction = True
    is_probability = False
    default_pooling = Pooling()

    weight: float = 0.1
    """Share of importance, in [0, 1]."""
    threshold: float = 0.5
    """Cosine from which two keys are near-copies."""
    num_spared: int = 1
    """Most recent near-copies of each key that are not counted against it."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_fraction("weight", self.weight)
        check_fraction("threshold", self.threshold)
        check_int("num_spared", self.num_spared, at_least=0)

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        importance = inputs.attention_received()
        return self.weight * importance - (1 - self.weight) * self._redundancy(inputs.keys)

    def _redundancy(self, keys_BKND: Tensor) -> Tensor:
        """fp32 [B, K, N], sums to 1; similarity rows are made a chunk at a time, never all N x N."""
        return torch.stack([self._redundancy_of_one(keys_KND) for keys_KND in keys_BKND])

    def _redundancy_of_one(self, keys_KND: Tensor) -> Tensor:
        """fp32 [K, N] of one request: more of its rows then fit in a chunk, and one matrix product."""
        kv_heads, num_keys, _ = keys_KND.shape
        unit = torch.nn.functional.normalize(keys_KND.float(), dim=-1)
        total = unit.new_zeros(kv_heads, num_keys)
        column = torch.arange(num_keys, device=unit.device, dtype=torch.float32)
        for rows in row_chunks(num_keys, _BYTES_PER_PAIR * kv_heads * num_keys):
            cosine = unit[:, rows] @ unit.transpose(-1, -2)
            cosine.diagonal(rows.start, dim1=-2, dim2=-1).zero_()
            if self.num_spared > 0:
                copies = torch.where(cosine > self.threshold, column, -1.0)
                oldest_spared = _kth_largest(copies, min(self.num_spared, num_keys)).clamp_min_(0)
                cosine.masked_fill_(copies >= oldest_spared, 0.0)
            total += cosine.sum(dim=1)
        return (total / num_keys).softmax(dim=-1)


def _kth_largest(values: Tensor, k: int) -> Tensor:
    """Of each row, [..., 1]; the usual k of 1 is twice as fast by itself."""
    return values.amax(dim=-1, keepdim=True) if k == 1 else values.topk(k).values[..., -1:]
