"""How unlike the others a token is: by its key before the rotation, and by its value.

Shapes: B request, K KV head, N token, D head dim, n tokens of a chunk.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_sparsekv.errors import InputError
from hf_sparsekv.ops.reference.pool import valid_slots
from hf_sparsekv.ops.reference.rotation import rotate

Chunk = Callable[[slice], Tensor]
"""fp32 [B, K, n, D] of some columns, 0 where there is no token."""

DIVERSITY_BYTES = 32 * 2**20
"""What one fp32 chunk of keys or values may take, unless told otherwise."""


def kv_diversity(
    keys_BKND: Tensor,
    values_BKND: Tensor,
    lengths_B: Tensor,
    inv_freq: Tensor | None = None,
    positions_BKN: Tensor | None = None,
    temporary_bytes: int = DIVERSITY_BYTES,
) -> Tensor:
    """Sum of two diversities, each standardised over the tokens of its head: of keys un-rotated, and of values.

    A diversity is the negative cosine between a vector and the mean direction x / |x| of its head's vectors.

    Args:
        keys_BKND: after RoPE in rotate-half layout; what is past `lengths` may be anything.
        values_BKND: as the keys.
        lengths_B: int32 tokens per request.
        inv_freq: fp32 [D / 2] RoPE frequencies in radians per position; None compares the keys as they are.
        positions_BKN: int64 position of every key; None where key j has position j.
        temporary_bytes: bound of one fp32 temporary of keys or values, one column at a time at least; no result
            depends on it but for the order of sums. A compiled kernel makes no such temporary.
    Returns:
        fp32 [B, K, N], larger = more unlike the others, 0 past `lengths` and where all tokens of a head are alike.
    Raises:
        InputError: a tensor whose shape does not fit the keys', or positions without frequencies, which would change
            nothing.
    Source: key diversity is KeyDiff's (Park et al., arXiv 2504.15364, section 3), of rotated keys and alone there.
    """
    if positions_BKN is not None and inv_freq is None:
        raise InputError("`positions` must not be given without `inv_freq`: without it no key is turned back")
    if keys_BKND.dim() != 4:
        raise InputError(f"`keys` is {list(keys_BKND.shape)}: it must be [B, K, N, D]")
    batch, kv_heads, num_keys, dim = keys_BKND.shape
    _check_shape("values", values_BKND, "`keys`", keys_BKND.shape)
    _check_shape("lengths", lengths_B, "the requests of `keys`", (batch,))
    _check_shape("inv_freq", inv_freq, "half the head dimension of `keys`", (dim // 2,))
    _check_shape("positions", positions_BKN, "the tokens of `keys`", keys_BKND.shape[:3])
    if num_keys == 0:
        return keys_BKND.new_zeros(batch, kv_heads, 0, dtype=torch.float32)
    step = max(1, temporary_bytes // (4 * max(1, batch * kv_heads * dim)))
    columns = [slice(start, min(start + step, num_keys)) for start in range(0, num_keys, step)]
    valid = valid_slots(lengths_B, num_keys)[:, None]

    def tokens(rows: Tensor, at: slice) -> Tensor:
        return rows[:, :, at].float().masked_fill(~valid[:, :, at, None], 0.0)

    def plain_keys(at: slice) -> Tensor:
        keys = tokens(keys_BKND, at)
        if inv_freq is None:
            return keys
        positions = torch.arange(at.start, at.stop, device=keys.device)
        if positions_BKN is not None:
            positions = positions_BKN[:, :, at]
        return rotate(keys, positions[..., None] * inv_freq, backwards=True)

    parts = (_unlikeness(columns, plain_keys), _unlikeness(columns, lambda at: tokens(values_BKND, at)))
    return torch.stack([_standardised(part, valid, lengths_B) for part in parts]).sum(dim=0)


def _check_shape(argument: str, tensor: Tensor | None, reason: str, shape: Sequence[int]) -> None:
    """Refuse what broadcasting would quietly stretch, or stumble over without a name."""
    if tensor is not None and tuple(tensor.shape) != tuple(shape):
        raise InputError(f"`{argument}` is {list(tensor.shape)}: it must be {list(shape)}, {reason}")


def _unlikeness(columns: Sequence[slice], chunk: Chunk) -> Tensor:
    """fp32 [B, K, N]: negative cosine between each vector and the mean direction, in [-1, 1]."""
    chunks = [chunk(columns[0])] if len(columns) == 1 else None  # made once where one is all
    normal = torch.nn.functional.normalize
    directions = [normal(part, dim=-1).sum(dim=2, keepdim=True) for part in chunks or map(chunk, columns)]
    total = torch.stack(directions).sum(dim=0)
    cosines = [torch.nn.functional.cosine_similarity(part, total, dim=-1) for part in chunks or map(chunk, columns)]
    return -torch.cat(cosines, dim=-1)


def _standardised(scores_BKN: Tensor, valid_B1N: Tensor, lengths_B: Tensor) -> Tensor:
    """Scores of each head with mean 0 and deviation 1, or 0 where they are all alike; 0 where there is no token."""
    count = lengths_B.clamp_min(1)[:, None, None]
    mean = scores_BKN.sum(dim=-1, keepdim=True) / count  # absent tokens add 0
    centred = (scores_BKN - mean).masked_fill(~valid_B1N, 0.0)
    deviation = (centred.square().sum(dim=-1, keepdim=True) / count).sqrt()
    return centred / deviation.clamp_min(torch.finfo(torch.float32).eps)
