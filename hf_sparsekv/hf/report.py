"""The report of a cache: measured bytes and counts, never nominal ones."""

from typing import TYPE_CHECKING, Any

import torch
import transformers

from hf_sparsekv.cache.layer import FullLayer, WindowLayer
from hf_sparsekv.version import __version__

if TYPE_CHECKING:
    from hf_sparsekv.hf.cache_adapter import SparseKVCache


def build_report(cache: "SparseKVCache", *, positions: bool) -> dict[str, Any]:
    """See `SparseKVCache.report`."""
    rows = range(len(cache.padding.tokens))
    layers = [_layer_report(layer.state, rows, positions=positions) for layer in cache.layers]
    element_bytes = _element_bytes(cache)
    dense = sum(cache.plan.dense_bytes(cache.padding.num_columns, element_bytes=element_bytes) for _ in rows)
    measured = cache.nbytes
    return {
        "tokens_seen": list(cache.padding.tokens),
        "columns_seen": cache.padding.num_columns,
        "cache_bytes": measured,
        "dense_bytes": dense,
        "ratio": measured / dense if dense else None,
        "compression": dense / measured if measured else None,
        "evicted_at_prompt": sum(layer["evicted_at_prompt"] for layer in layers),
        "evicted_while_decoding": sum(layer["evicted_while_decoding"] for layer in layers),
        "is_prompt_open": any(s.is_prompt_open for s in cache._window_layers()),
        "is_query_aware": cache.config.scorer_object.is_query_aware,
        "layers": layers,
        "config": cache.config.to_dict(must_be_registered=False),
        "in_force": cache.config.effective(),
        "backend": cache.backend,
        "versions": {
            "hf_sparsekv": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def stored_positions(state: FullLayer, row: int) -> list[list[int]]:
    """Positions that a layer holds of one request, ascending, per KV head."""
    seen = state.padding.tokens[row]
    if not isinstance(state, WindowLayer) or state.slots is None:
        heads = state.columns.keys.shape[1] if state.columns.num_columns else 0
        return [list(range(seen)) for _ in range(heads)]
    stored, new = state.num_in_slots(row), state.num_new(row)
    kept = state.slots.positions[row, :, :stored].sort(dim=-1).values.tolist()
    return [head + list(range(seen - new, seen)) for head in kept]


def _layer_report(state: FullLayer, rows: range, *, positions: bool) -> dict[str, Any]:
    is_window = isinstance(state, WindowLayer)
    stored = [state.num_stored(row) if isinstance(state, WindowLayer) else state.padding.tokens[row] for row in rows]
    at_prompt = [state.prompts[row].evicted if isinstance(state, WindowLayer) and state.prompts else 0 for row in rows]
    gone = [seen - have for seen, have in zip(state.padding.tokens, stored, strict=True)]
    report: dict[str, Any] = {
        "layer": state.spec.layer_idx,
        "kind": "window" if is_window else "full",
        "budget": state.spec.budget,
        "budget_tokens": [record.budget for record in state.prompts] if isinstance(state, WindowLayer) else [],
        "stored": stored,
        "evicted_at_prompt": sum(at_prompt),
        "evicted_while_decoding": sum(gone) - sum(at_prompt),
        "bytes": state.nbytes,
    }
    if positions:
        report["positions"] = [stored_positions(state, row) for row in rows]
    return report


def _element_bytes(cache: "SparseKVCache") -> int:
    for layer in cache.layers:
        state = layer.state
        if isinstance(state, WindowLayer) and state.slots is not None:
            return state.slots.keys.element_size()
        if state.columns.num_columns:
            return state.columns.keys.element_size()
    return 0
