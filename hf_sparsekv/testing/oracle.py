"""The oracle of the whole: dense attention over the full history, masked to what a sparse cache kept.

It runs the same model with the same tokens and an ordinary DynamicCache that forgets nothing; evicted entries are only
hidden. Wherever a `SparseKVCache` computes something else than this, one of the two is wrong.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from hf_sparsekv.hf.cache_adapter import SparseKVCache
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.report import stored_positions

ORACLE_NAME = "masked_oracle"


@dataclass
class _Visible:
    """What the running forward pass may see, per layer: bool [B, K, T, N]."""

    layers: list[Tensor]


class Oracle:
    """Replays a sparse cache's forward passes densely."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Use `model`'s weights; its attention implementation is switched during `forward` and put back."""
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._visible = _Visible([])
        AttentionInterface.register(ORACLE_NAME, self._attention)
        AttentionMaskInterface.register(ORACLE_NAME, lambda **_: None)

    def forward(self, input_ids: Tensor, position_ids: Tensor, visible: list[Tensor]) -> Tensor:
        """Logits [B, T, V] of new columns, each layer seeing only `visible[layer]` bool [B, K, T, N]."""
        self._visible.layers = visible
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation(ORACLE_NAME)
        try:
            with torch.no_grad():
                output = self._model(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    use_cache=True,
                    **{CACHE_KEYWORD: self._cache},
                )
        finally:
            self._model.set_attn_implementation(before)
        logits: Tensor = output.logits
        return logits

    def select_rows(self, rows: Tensor) -> None:
        """Follow a beam reorder."""
        self._cache.reorder_cache(rows)  # type: ignore[arg-type]

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        visible = self._visible.layers[module.layer_idx]  # type: ignore[index]
        batch, _, rows, dim = query.shape
        grouped = query.view(batch, key.shape[1], -1, rows, dim).float()
        logits = torch.einsum("bkgtd,bknd->bkgtn", grouped, key.float()) * scaling
        probs = logits.masked_fill(~visible[:, :, None], float("-inf")).softmax(dim=-1).nan_to_num(0.0)
        out = torch.einsum("bkgtn,bknd->bkgtd", probs, value.float()).flatten(1, 2)
        return out.transpose(1, 2).to(query.dtype), None


def causal_visibility(cache: SparseKVCache, num_new: int, columns: Tensor, num_columns: int) -> Tensor:
    """bool [B, T, N]: rows of the last `num_new` columns over all columns up to themselves, padding hidden.

    Args:
        cache: only its batch's padding is read.
        num_new: T.
        columns: bool [B, N], which columns hold tokens.
        num_columns: N.
    """
    row = torch.arange(num_columns - num_new, num_columns)
    causal = torch.arange(num_columns)[None] <= row[:, None]
    return causal[None] & columns[:, None]


def kept_columns(cache: SparseKVCache, columns: Tensor) -> list[Tensor]:
    """Per layer, bool [B, K, N]: columns whose tokens the layer stores now.

    Args:
        cache: the sparse cache.
        columns: bool [B, N], which columns hold tokens; position p of a request is its p-th such column.
    """
    result = []
    for layer in cache.layers:
        mask = torch.zeros(columns.shape[0], cache.shape.num_kv_heads, columns.shape[1], dtype=torch.bool)
        for row in range(columns.shape[0]):
            column_of = columns[row].nonzero().flatten()
            for head, positions in enumerate(stored_positions(layer.state, row)):
                mask[row, head, column_of[torch.tensor(positions, dtype=torch.long)]] = True
        result.append(mask)
    return result


def forward_both(
    model: PreTrainedModel, cache: SparseKVCache, oracle: Oracle, input_ids: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """One forward pass of new columns through the sparse cache and through the oracle.

    Args:
        model: attn_implementation="sparsekv".
        cache: the sparse cache, already fed all earlier columns.
        oracle: likewise.
        input_ids: int64 [B, T], the new columns.
        columns: bool [B, N], which columns, the new ones included, hold tokens.
    Returns:
        (sparse, oracle) logits [B, T, V].
    """
    num_columns, num_new = columns.shape[1], input_ids.shape[1]
    position_ids = (columns.long().cumsum(-1) - 1).clamp_min(0)[:, -num_new:]
    seen = cache.get_seq_length()
    has_slots = [getattr(layer.state, "slots", None) is not None for layer in cache.layers]
    before = kept_columns(cache, columns[:, :seen]) if seen else []
    with torch.no_grad():
        sparse = model(
            input_ids=input_ids,
            attention_mask=columns.long(),
            position_ids=position_ids,
            use_cache=True,
            **{CACHE_KEYWORD: cache},
        ).logits
    causal = causal_visibility(cache, num_new, columns, num_columns)
    after = kept_columns(cache, columns)
    visible = []
    for idx in range(len(cache.layers)):
        mask = causal[:, None].expand(-1, cache.shape.num_kv_heads, -1, -1)
        if num_new == 1 and seen:
            mask = mask & after[idx][:, :, None]
        elif has_slots[idx]:
            stored = torch.nn.functional.pad(before[idx], (0, num_new), value=True)
            mask = mask & stored[:, :, None]
        visible.append(mask)
    return sparse, oracle.forward(input_ids, position_ids, visible)
