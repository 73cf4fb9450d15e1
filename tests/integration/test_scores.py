"""What a prompt's tokens are ranked by is the attention that the model itself computes: softmax over all a row sees.

Guards against rows normalised over the scored keys alone, without sinks or recent tokens, against another scale or LSE
than attention's, and against padding that takes part.
"""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.ops.prefill_table import BACKENDS
from hf_sparsekv.testing.compare import (
    assert_close_fp32,
    assert_same_selection_up_to_near_ties,
    assert_same_up_to_rounding,
)
from hf_sparsekv.testing.models import tiny_llama, tiny_qwen3

pytestmark = pytest.mark.usefixtures("registered")

NAMES = [None, *(backend.name for backend in BACKENDS if backend.device != "cuda")]
LENGTH, WINDOW = 90, 8
CONFIG = skv.SparseKVConfig(
    num_full_layers=0,
    budget=40,
    num_recent_tokens=8,
    observation_window=WINDOW,
    scorer="snapkv",
    pooling="none",
    prompt_share=0,
)


def attention_of(model, ids):
    """Weights fp32 [B, H, T, T] of each layer, by transformers' own eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=ids, output_attentions=True, use_cache=False).attentions


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3], ids=["plain", "query and key norms"])
@pytest.mark.parametrize("rows", ["mean", "max"])
def test_scores_are_the_models_own_attention(build, backend, rows):
    model, ids = build(num_layers=3, head_dim=32), torch.randint(3, 256, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    config = CONFIG.with_(row_reduction=rows)
    expected = []
    for row, pads in enumerate((30, 0)):
        weights = torch.stack(attention_of(model, ids[row : row + 1, pads:]))[:, 0, :, -WINDOW:]
        per_head = weights.mean(dim=2) if rows == "mean" else weights.amax(dim=2)
        expected.append(per_head.unflatten(1, (2, -1)).mean(dim=2))
    model.set_attn_implementation("sparsekv")
    cache = skv.SparseKVCache(model.config, config, backend=backend, prompt_length=LENGTH)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE_KEYWORD: cache})
    for window in cache._window_layers():
        for row, of_row in enumerate(expected):
            reference, slots = of_row[window.spec.layer_idx], window.slots
            kept = slots.positions[row].long()
            scores = torch.zeros_like(reference).scatter(1, kept, slots.scores[row])
            among_kept = torch.zeros_like(reference).scatter(1, kept, reference.gather(1, kept))
            compare = assert_close_fp32 if window.spec.layer_idx == 0 else assert_same_up_to_rounding
            compare(scores, among_kept)
            best = reference[:, 4:-8].topk(40 - 4 - 8, dim=-1).indices + 4  # neither sinks nor recent
            chosen = kept.sort(dim=-1).values[:, 4:-8]
            assert_same_selection_up_to_near_ties(chosen, best.sort(dim=-1).values, reference)
