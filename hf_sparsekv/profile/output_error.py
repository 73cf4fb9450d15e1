"""What a selection costs: the attention output of the rows after the prompt, cut against dense.

Shapes: C budget, K KV head, G query heads per KV head, H = K * G, R row of a chunk, T row, N key, D head dim. One
request.
"""

import torch
from torch import Tensor

from hf_sparsekv.hf.observe import AttentionCall
from hf_sparsekv.profile.result import Curve

_TINY = torch.finfo(torch.float32).tiny


class OutputErrors:
    """One layer's errors: sums over rows, for each budget."""

    def __init__(self, num_budgets: int, num_kv_heads: int) -> None:
        self._num_rows = 0
        self._kept_CK = torch.zeros(num_budgets, num_kv_heads, dtype=torch.float64)
        self._head_CK = torch.zeros(num_budgets, num_kv_heads, dtype=torch.float64)
        self._layer_C = torch.zeros(num_budgets, dtype=torch.float64)
        self._residual_C = torch.zeros(num_budgets, dtype=torch.float64)

    def add(self, call: AttentionCall, weights_KGRN: Tensor, rows: slice, kept_CKN: Tensor, hidden_TE: Tensor) -> None:
        """Take some rows that follow the prompt.

        Args:
            call: the layer's attention on the rows after the prompt.
            weights_KGRN: fp32 softmax weights of `rows`.
            rows: of the call's T rows.
            kept_CKN: bool, what each budget keeps of the prompt; keys after the prompt are kept besides.
            hidden_TE: the residual stream that the layer reads.
        """
        self._num_rows += weights_KGRN.shape[2]
        values_KND = call.value[0].float()
        dense_KGRD = torch.matmul(weights_KGRN, values_KND[:, None])
        stream_RE = (hidden_TE[rows] + _projected(call, dense_KGRD)).float()
        nothing_RE = _projected(call, torch.zeros_like(dense_KGRD)).float()
        for c, kept_KN in enumerate(kept_CKN):
            cut_KGRN = weights_KGRN.masked_fill(~_with_what_follows(kept_KN, weights_KGRN.shape[3])[:, None, None], 0.0)
            mass_KGR = cut_KGRN.sum(dim=-1)
            cut_KGRD = torch.matmul(cut_KGRN, values_KND[:, None]) / mass_KGR.clamp_min(_TINY)[..., None]
            difference_KGRD = cut_KGRD - dense_KGRD
            self._kept_CK[c] += mass_KGR.mean(dim=1).sum(dim=-1).double().cpu()
            self._head_CK[c] += _relative(difference_KGRD, dense_KGRD, (1, 3)).sum(dim=-1).double().cpu()
            self._layer_C[c] += float(_relative(difference_KGRD, dense_KGRD, (0, 1, 3)).sum())
            added_RE = _projected(call, difference_KGRD).float() - nothing_RE
            self._residual_C[c] += float(_relative(added_RE, stream_RE, (1,)).sum())

    def kept_mass(self, head: int) -> Curve:
        """Mean over a KV head's rows."""
        return tuple((self._kept_CK[:, head] / self._num_rows).tolist())

    def of_head(self, head: int) -> Curve:
        """Mean relative error of a KV head's output."""
        return tuple((self._head_CK[:, head] / self._num_rows).tolist())

    @property
    def of_layer(self) -> Curve:
        """Mean relative error over all heads together."""
        return tuple((self._layer_C / self._num_rows).tolist())

    @property
    def in_residual(self) -> Curve:
        """Mean of what it adds to the residual stream, relative to that."""
        return tuple((self._residual_C / self._num_rows).tolist())


def cut_attention(call: AttentionCall, kept_KN: Tensor) -> Tensor:
    """Attention [1, T, H, D] of rows after the prompt that see what was kept of it, and all that follows.

    Args:
        call: the layer's attention on these rows.
        kept_KN: bool, of the prompt.
    """
    num_rows, num_keys = call.query.shape[2], call.key.shape[2]
    group = call.query.shape[1] // call.key.shape[1]
    column_N = torch.arange(num_keys, device=call.key.device)
    causal_TN = column_N <= torch.arange(num_keys - num_rows, num_keys, device=call.key.device)[:, None]
    visible_HTN = (_with_what_follows(kept_KN, num_keys)[:, None] & causal_TN).repeat_interleave(group, dim=0)
    output = torch.nn.functional.scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=visible_HTN[None], scale=call.scale, enable_gqa=True
    )
    return output.transpose(1, 2)


def _with_what_follows(kept_KN: Tensor, num_keys: int) -> Tensor:
    return torch.nn.functional.pad(kept_KN, (0, num_keys - kept_KN.shape[1]), value=True)


def _projected(call: AttentionCall, output_KGRD: Tensor) -> Tensor:
    """[R, E] of the residual stream."""
    output_RHD = output_KGRD.flatten(0, 1).transpose(0, 1).to(call.query.dtype)
    return call.project(output_RHD[None])[0]


def _relative(difference: Tensor, whole: Tensor, over: tuple[int, ...]) -> Tensor:
    norm = torch.linalg.vector_norm
    ratio: Tensor = norm(difference, dim=over) / norm(whole, dim=over).clamp_min(_TINY)
    return ratio
