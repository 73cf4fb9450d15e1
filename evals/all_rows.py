"""What every key receives from all rows of a prompt, with and without noise on the logits, in one pass over them.

Shapes: S layer of a stack, H query head, K KV head, G query heads per KV head, N token of the prompt, R row of a chunk,
D head dim.
"""

import torch
from torch import Tensor

CHUNK_BYTES = 2 * 2**20
"""What the fp32 weights of one chunk of rows may take: they are read several times, and should stay in a cache."""
CUDA_CHUNK_BYTES = 2**26
"""The same on a GPU, where the number of launches counts."""


def summed_weights(queries: Tensor, keys: Tensor, scale: float, factors: Tensor | None = None) -> list[Tensor]:
    """Sum over all rows of the softmax of the logits, causal; with factors a second one.

    Noise on a key's logits is a factor on its weights, up to each row's sum: the weights are computed once for both.

    Args:
        queries: [S, H, N, D]. keys: [S, K, N, D].
        scale: factor on the logits.
        factors: fp32 [S, K, N], positive, exp of the noise.
    Returns:
        fp32 [S, K, G, N] without noise, then with it.
    """
    (num_layers, num_heads, num_tokens, dim), kv_heads = queries.shape, keys.shape[1]
    groups = num_heads // kv_heads
    queries = queries.float().mul_(scale) if queries.dtype != torch.float32 else queries * scale
    queries = queries.reshape(num_layers, kv_heads, groups, num_tokens, dim)
    keys_SKDN = keys.float().transpose(-1, -2)
    sums = keys_SKDN.new_zeros(1 if factors is None else 2, num_layers, kv_heads, groups, num_tokens)
    chunk_bytes = CUDA_CHUNK_BYTES if keys.is_cuda else CHUNK_BYTES
    step = max(1, min(num_tokens, chunk_bytes // (4 * num_layers * num_heads * num_tokens)))
    is_later = torch.ones(step, step, dtype=torch.bool, device=keys.device).triu_(1)
    for start in range(0, num_tokens, step):
        end = min(start + step, num_tokens)  # later keys are hidden from all of these rows
        rows = queries[..., start:end, :].flatten(2, 3)
        logits = (rows @ keys_SKDN[..., :end]).unflatten(2, (groups, -1))
        logits[..., start:].masked_fill_(is_later[: end - start, : end - start], float("-inf"))
        weights = logits.softmax(dim=-1)
        if factors is None:
            sums[0, ..., :end] += weights.sum(dim=-2)
            continue
        row_sums = (weights.flatten(2, 3) @ factors[:, :, :end, None]).view(num_layers, kv_heads, groups, 1, -1)
        both = torch.cat([torch.ones_like(row_sums), row_sums.reciprocal()], dim=-2) @ weights
        sums[..., :end] += both.movedim(-2, 0)
    if factors is not None:
        sums[1] *= factors[:, :, None]
    return list(sums)
