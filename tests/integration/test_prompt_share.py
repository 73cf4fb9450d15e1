"""A prompt keeps its share of the budget however long the answer gets, and decoding has the rest.

Guards against answers that push out all of what was asked about, against prompts that leave decoding no place, and
against scores of infinity that a later turn would go on with.
"""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD

pytestmark = pytest.mark.usefixtures("registered")

SINKS, RECENT, BUDGET, ANSWER = 4, 8, 32, 70
FREE = BUDGET - SINKS - RECENT
METHOD = {"num_full_layers": 1, "budget": BUDGET, "num_recent_tokens": RECENT, "observation_window": 8}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def stored(cache):
    """Positions in each window layer and head of each request."""
    layers = cache.report(positions=True)["layers"]
    return [set(head) for layer in layers[1:] for row in layer["positions"] for head in row]


def feed(model, cache, ids):
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{CACHE_KEYWORD: cache})


@pytest.mark.parametrize("prompt", [90, 20, 9], ids=["evicted", "fits", "hardly more than is recent"])
@pytest.mark.parametrize("scorer", ["hybrid", "snapkv", "kv_diversity"])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_so_many_tokens_of_the_prompt_are_left_after_a_long_answer(tiny_llama, prompt, scorer, share):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    config = skv.SparseKVConfig(**METHOD, scorer=scorer, prompt_share=share)
    cache = skv.SparseKVCache(model.config, config)
    feed(model, cache, torch.randint(3, 256, (2, prompt)))
    cache.compress()
    held = []
    for window in cache._window_layers():
        scores = window.column_scores[..., :prompt] if window.slots is None else window.slots.scores
        held += (scores == float("inf")).sum(dim=-1).flatten().tolist()
    at_most = min(int(share * FREE), prompt - SINKS)
    assert held == [at_most] * len(held)
    before = stored(cache)
    for _ in range(ANSWER):
        feed(model, cache, torch.randint(3, 256, (2, 1)))
    for first, last in zip(before, stored(cache), strict=True):
        left = {position for position in last if SINKS <= position < prompt}
        assert left <= first
        assert len(left) >= at_most
        assert len(last) == BUDGET
        assert len(last) - len(left) - SINKS >= RECENT


def test_without_a_share_an_answer_may_push_out_the_prompt(tiny_llama):
    """Else the counts above would say nothing."""
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    ids = torch.randint(3, 256, (1, 90))
    left = {}
    for share in (0.0, 0.5):
        config = skv.SparseKVConfig(**METHOD, decay=0.5, prompt_share=share)
        cache = skv.generate(model, ids, config, max_new_tokens=ANSWER, **GREEDY).cache
        left[share] = sum(SINKS <= position < 90 for head in stored(cache) for position in head)
    assert left[0.0] < left[0.5]


@pytest.mark.parametrize("scorer", ["hybrid", "h2o", "keyformer"])
@pytest.mark.parametrize("prompt", [60, 12], ids=["evicted", "fits"])
def test_a_later_turn_selects_anew_and_holds_its_own_share(tiny_llama, scorer, prompt):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, skv.SparseKVConfig(**METHOD, scorer=scorer, prompt_share=0.5))
    for turn in (prompt, 25, 10):
        feed(model, cache, torch.randint(3, 256, (1, turn)))
        cache.compress()
        for _ in range(3):
            feed(model, cache, torch.randint(3, 256, (1, 1)))
    for window in cache._window_layers():
        assert ((window.slots.scores == float("inf")).sum(dim=-1) == FREE // 2).all()
        assert not window.slots.scores.isnan().any()


def test_a_later_turn_may_replace_what_the_prompt_held(tiny_llama):
    """A scorer that adds up must not go on with what sinks have gathered: nothing of the turn would ever score more."""
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, skv.SparseKVConfig(**METHOD, scorer="h2o", prompt_share=1.0))
    held = []
    for turn in (60, 200):
        feed(model, cache, torch.randint(3, 256, (1, turn)))
        cache.compress()
        held.append([{p for p in head if SINKS <= p < 60 - RECENT} for head in stored(cache)])
    assert all(len(first) == FREE for first in held[0])
    assert all(len(later) < FREE for later in held[1])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("scorer", ["hybrid", "h2o"])
def test_the_engine_holds_what_generate_holds(tiny_llama, scorer, share):
    model, config = tiny_llama(num_layers=3), skv.SparseKVConfig(**METHOD, scorer=scorer, prompt_share=share)
    prompts = [torch.randint(3, 256, (length,)).tolist() for length in (5, 12, 30, 90)]
    expected = [
        skv.generate(model, torch.tensor([prompt]), config, max_new_tokens=ANSWER, **GREEDY).new_tokens[0].tolist()
        for prompt in prompts
    ]
    options = skv.EngineConfig(kv_memory_bytes=8 << 20, max_num_seqs=4, max_batch_tokens=64, max_model_len=256)
    with skv.Engine(model, config, options) as engine:
        outputs = engine.generate(prompts, skv.SamplingParams(max_tokens=ANSWER, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == expected


def test_beams_move_with_what_is_held(tiny_llama):
    model = tiny_llama(num_layers=3)
    config = skv.SparseKVConfig(**METHOD)
    output = skv.generate(model, torch.randint(3, 256, (2, 60)), config, max_new_tokens=30, num_beams=3, **GREEDY)
    for window in output.cache._window_layers():
        assert ((window.slots.scores == float("inf")).sum(dim=-1) == FREE // 2).all()
