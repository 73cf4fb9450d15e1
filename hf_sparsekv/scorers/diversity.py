"""How unlike the others a token is: by its key, by its value, or by both.

Shapes: B request, K KV head, N key, D head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Chunk = Callable[[slice], Tensor]
"""fp32 [B, K, n, D] of some columns."""

CHUNK_BYTES = 32 * 2**20
"""What one fp32 chunk of keys or values may take."""


def unlikeness(num_columns: int, step: int, chunk: Chunk) -> Tensor:
    """fp32 [B, K, N]: negative cosine between each vector and the mean direction of all, in [-1, 1].

    Source: key diversity, KeyDiff (Park et al., arXiv 2504.15364, section 3).

    Args:
        num_columns: N, at least one.
        step: columns of a chunk.
        chunk: asked for every chunk, twice where there are several.
    """
    columns = [slice(start, min(start + step, num_columns)) for start in range(0, num_columns, step)]
    chunks = [chunk(columns[0])] if len(columns) == 1 else None
    normal = torch.nn.functional.normalize
    directions = [normal(part, dim=-1).sum(dim=2, keepdim=True) for part in chunks or map(chunk, columns)]
    total = torch.stack(directions).sum(dim=0)
    cosines = [torch.nn.functional.cosine_similarity(part, total, dim=-1) for part in chunks or map(chunk, columns)]
    return -torch.cat(cosines, dim=-1)


def sum_of_unlikeness(num_columns: int, step: int, *chunks: Chunk) -> Tensor:
    """fp32 [B, K, N]: `unlikeness` of several kinds of vectors, each standardised per head, summed."""
    return torch.stack([standardised(unlikeness(num_columns, step, chunk)) for chunk in chunks]).sum(dim=0)


def standardised(scores: Tensor) -> Tensor:
    """Scores of each head with mean 0 and deviation 1, or 0 where they are all alike."""
    centred = scores - scores.mean(dim=-1, keepdim=True)
    deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
    return centred / deviation.clamp_min(torch.finfo(torch.float32).eps)
