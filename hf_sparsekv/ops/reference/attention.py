"""Attention that also returns its log-sum-exp: the definition behind every prefill backend."""

import torch
from torch import Tensor

from hf_sparsekv.ops.reference.pool import chunk_length


def attention(
    q_BHTD: Tensor, k_BKND: Tensor, v_BKND: Tensor, scale: float, mask_BTN: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention and its LSE, query rows taken in chunks.

    Args:
        q_BHTD: queries, any float dtype.
        k_BKND, v_BKND: keys and values; H is a multiple of K.
        scale: factor on the logits.
        mask_BTN: bool, True where a row may look, or None. Masked keys and values may hold anything, NaN included.
        is_causal: row i sees keys j <= i + N - T (aligned bottom-right: the last row sees all).
    Returns:
        output [B, H, T, D] in q's dtype, and LSE fp32 [B, H, T], natural log over the keys a row may see;
        a row that sees nothing gives output 0 and LSE -inf.
    """
    batch, heads, num_rows, dim = q_BHTD.shape
    kv_heads, num_keys = k_BKND.shape[1], k_BKND.shape[2]
    groups = heads // kv_heads
    keys = k_BKND.float()
    values = v_BKND.float()
    if mask_BTN is not None:  # a key that no row sees may be NaN, and 0 * NaN is NaN
        seen = mask_BTN.any(dim=1)[:, None, :, None]
        keys, values = keys.masked_fill(~seen, 0.0), values.masked_fill(~seen, 0.0)
    output = torch.empty(batch, heads, num_rows, dim, dtype=q_BHTD.dtype, device=q_BHTD.device)
    lse = torch.empty(batch, heads, num_rows, dtype=torch.float32, device=q_BHTD.device)
    step = chunk_length(batch * heads * num_keys * 4)
    key_index = torch.arange(num_keys, device=q_BHTD.device)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        q = q_BHTD[:, :, rows].float().reshape(batch, kv_heads, groups, -1, dim)
        logits = torch.einsum("bkgtd,bknd->bkgtn", q, keys) * scale
        if is_causal:
            row_index = torch.arange(rows.start, rows.stop, device=q_BHTD.device)
            hidden = key_index[None, :] > row_index[:, None] + (num_keys - num_rows)
            logits.masked_fill_(hidden, float("-inf"))
        if mask_BTN is not None:
            logits.masked_fill_(~mask_BTN[:, None, None, rows], float("-inf"))
        chunk_lse = logits.logsumexp(dim=-1)
        probs = (logits - chunk_lse.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp_()
        out = torch.einsum("bkgtn,bknd->bkgtd", probs, values)
        output[:, :, rows] = out.flatten(1, 2).to(output.dtype)
        lse[:, :, rows] = chunk_lse.flatten(1, 2)
    return output, lse


def attention_varlen(
    q_THD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """`attention` for requests packed one after the other.

    Args:
        q_THD, k_NKD, v_NKD: all requests' tokens, packed.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], where each request begins and the last one ends.
        max_seqlen_q, max_seqlen_k: the longest request; sizes launches in compiled backends, unused here.
        scale, is_causal: as in `attention`.
    Returns:
        output [T, H, D] in q's dtype, LSE fp32 [H, T], natural log.
    """
    del max_seqlen_q, max_seqlen_k
    output = torch.empty_like(q_THD)
    lse = torch.empty(q_THD.shape[1], q_THD.shape[0], dtype=torch.float32, device=q_THD.device)
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q_bounds) - 1):
        rows, keys = slice(q_bounds[b], q_bounds[b + 1]), slice(k_bounds[b], k_bounds[b + 1])
        out, row_lse = attention(
            q_THD[rows].transpose(0, 1)[None],
            k_NKD[keys].transpose(0, 1)[None],
            v_NKD[keys].transpose(0, 1)[None],
            scale,
            None,
            is_causal,
        )
        output[rows] = out[0].transpose(0, 1)
        lse[:, rows] = row_lse[0]
    return output, lse
