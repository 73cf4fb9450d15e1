"""Whichever dense attention reads the prompt, and wherever full and window layers stand, the cache keeps the same.

Guards against masks taken from the first layer's length, and against one backend that scores another thing.
"""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.attention import BACKENDS
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.compare import assert_same_up_to_rounding
from hf_sparsekv.testing.oracle import Oracle, forward_both

pytestmark = pytest.mark.usefixtures("registered")

METHOD = {"budget": 24, "num_recent_tokens": 8, "observation_window": 8}
LENGTH = 90


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("full_layers", [(0,), (3,), (1, 3), ()])
@pytest.mark.parametrize("pads", [(0, 0, 0), (50, 7, 0), (-50, -7, 0)], ids=["no padding", "left", "right"])
def test_layers_of_different_length_get_their_own_masks(tiny_llama, backend, full_layers, pads):
    model = tiny_llama(attn_implementation="sparsekv")
    config = skv.SparseKVConfig(**METHOD, full_layers=full_layers)
    cache, oracle = skv.SparseKVCache(model.config, config, backend=backend), Oracle(model)
    columns = torch.ones(3, LENGTH, dtype=torch.bool)
    for row, count in enumerate(pads):
        columns[row, slice(0, count) if count > 0 else slice(LENGTH + count, LENGTH)] = False
    for length in (LENGTH, 1, 1, 9, 1, 1):
        if length < LENGTH:
            columns = torch.cat([columns, torch.ones(3, length, dtype=torch.bool)], dim=1)
        ids = torch.randint(3, 256, (3, length))
        sparse, dense = forward_both(model, cache, oracle, ids, columns)
        is_token = columns[:, -length:]
        assert_same_up_to_rounding(sparse[is_token], dense[is_token])
    assert cache.report()["evicted_at_prompt"] > 0


@pytest.mark.parametrize("scorer", scorer_names())
def test_backends_keep_the_same_tokens(tiny_llama, scorer):
    """At least 99 % of them: backends may round differently, but not choose differently."""
    model = tiny_llama(num_layers=6)
    ids = torch.randint(3, 256, (2, 300))
    config = skv.SparseKVConfig(num_full_layers=1, budget=64, scorer=scorer)
    kept = {}
    for backend in BACKENDS:
        model.set_attn_implementation("sparsekv")
        cache = skv.SparseKVCache(model.config, config, backend=backend, prompt_length=300)
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{CACHE_KEYWORD: cache})
        kept[backend] = {
            (layer["layer"], row, head, position)
            for layer in cache.report(positions=True)["layers"][1:]
            for row, heads in enumerate(layer["positions"])
            for head, positions in enumerate(heads)
            for position in positions
        }
    one, two = kept.values()
    assert len(one) == len(two) == 5 * 2 * 2 * 64
    assert len(one & two) >= 0.99 * len(one)
