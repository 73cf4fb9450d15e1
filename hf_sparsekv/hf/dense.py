"""Dense attention while every token of a layer is at hand: transformers' own functions, or a backend of the table.

Shapes: B request, H query head, K KV head, T new token, N column, D head dim.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_sparsekv import ops
from hf_sparsekv.hf.masks import dense_mask

DEFAULT = "sdpa"
EAGER = "eager"


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    backend: str,
    is_token: Tensor | None,
) -> Tensor:
    """Causal attention of the last T columns over all of them.

    "sdpa" and "eager" are transformers' own functions, so that results are the dense model's, bit for bit. Any other
    name is of the table of prefill backends, and its backend is in use; single rows go to sdpa even then, since they
    are decoded rather than read.

    Args:
        module: the model's attention module.
        query: [B, H, T, D]. key, value: [B, K, N, D].
        mask: bool [B, N] as the model's mask function gave it, or None.
        scale: factor on the logits.
        backend: a name.
        is_token: bool [B, N], which columns are no padding; None = all.
    Returns:
        [B, T, H, D].
    """
    if backend == EAGER:
        return _eager(module, query, key, value, mask, scale)
    if backend == DEFAULT or query.shape[2] == 1:
        built = dense_mask(mask, query, key.shape[2], allow_none=True)
        output, _ = sdpa_attention_forward(module, query, key, value, built, scaling=scale)
        return output
    if is_token is None:
        return ops.attention(query, key, value, scale, None, True)[0].transpose(1, 2)
    return _packed(query, key, value, scale, is_token)


def _eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    built = dense_mask(mask, query, key.shape[2], allow_none=False)
    assert built is not None
    lowest = torch.finfo(query.dtype).min
    bias = torch.where(built, torch.tensor(0.0, dtype=query.dtype, device=built.device), lowest)
    output: Tensor
    output, _ = eager_attention_forward(module, query, key, value, bias, scaling=scale)
    return output


def _packed(query: Tensor, key: Tensor, value: Tensor, scale: float, is_token: Tensor) -> Tensor:
    """The same without the padding, for backends that take no mask: requests one after the other; zeros in padding."""
    is_row = is_token[:, -query.shape[2] :]
    q, k, v = (t.transpose(1, 2)[where] for t, where in ((query, is_row), (key, is_token), (value, is_token)))
    counts = [where.sum(dim=1, dtype=torch.int32) for where in (is_row, is_token)]
    bounds = [pad(count.cumsum(0, dtype=torch.int32), (1, 0)) for count in counts]
    longest = [int(count.max()) for count in counts]
    attended, _ = ops.attention_varlen(q, k, v, *bounds, *longest, scale, True)
    output = torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    output[is_row] = attended
    return output
