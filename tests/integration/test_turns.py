"""Turns that fit the budget are one prompt: what was said in an earlier one counts, in a batch and alone.

Guards against scores of an earlier turn that are lost, or counted twice, when the next one is scored.
"""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD

pytestmark = pytest.mark.usefixtures("registered")

METHOD = {"num_full_layers": 0, "num_recent_tokens": 4, "observation_window": 4, "pooling": "none"}
CUTS = [(20, 40), (10, 20, 40), (1, 23, 60)]
"""Where turns end. Each fits the budget of 24 but for the last, which has to evict."""


def feed(model, cache, ids, mask=None):
    positions = None if mask is None else (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE_KEYWORD: cache})


def kept(cache, row=0):
    return [layer["positions"][row] for layer in cache.report(positions=True)["layers"]]


def after_turns(model, config, ids, ends):
    cache, start = skv.SparseKVCache(model.config, config), 0
    for end in ends:
        feed(model, cache, ids[:, start:end])
        cache.compress()
        start = end
    return cache


@pytest.mark.parametrize("scorer", ["h2o", "keyformer"])
@pytest.mark.parametrize("decode", ["replace_lowest", "grow"])
@pytest.mark.parametrize("ends", CUTS)
def test_turns_that_fit_keep_what_one_prompt_keeps(tiny_llama, scorer, decode, ends):
    model, ids = tiny_llama(num_layers=3, attn_implementation="sparsekv"), torch.randint(3, 256, (2, ends[-1]))
    config = skv.SparseKVConfig(**METHOD, budget=24, scorer=scorer, decode=decode)
    turns, whole = (after_turns(model, config, ids, cut) for cut in (ends, ends[-1:]))
    for row in (0, 1):
        assert kept(turns, row) == kept(whole, row)
    for one, other in zip(turns._window_layers(), whole._window_layers(), strict=True):
        assert one.slots is not None
        torch.testing.assert_close(one.slots.scores, other.slots.scores)


@pytest.mark.parametrize("scorer", ["h2o", "keyformer"])
def test_a_request_that_fits_beside_one_that_does_not_keeps_what_it_keeps_alone(tiny_llama, scorer):
    """The longer one moves the whole batch to slots; alone, the shorter one stays in columns."""
    model, ids = tiny_llama(num_layers=3, attn_implementation="sparsekv"), torch.randint(3, 256, (2, 60))
    config = skv.SparseKVConfig(**METHOD, budget=24, scorer=scorer)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :20] = 0
    batch, alone = skv.SparseKVCache(model.config, config), skv.SparseKVCache(model.config, config)
    for start, end in ((0, 40), (40, 60)):
        feed(model, batch, ids[:, start:end], mask[:, :end])
        batch.compress()
    for start, end in ((20, 40), (40, 60)):
        feed(model, alone, ids[:1, start:end])
        alone.compress()
    assert kept(batch) == kept(alone)


def test_what_decoding_added_to_the_scores_is_carried_too(tiny_llama):
    """H2O sums attention over all rows, decoded ones included."""
    model, ids = tiny_llama(num_layers=3, attn_implementation="sparsekv"), torch.randint(3, 256, (1, 50))
    config = skv.SparseKVConfig(**METHOD, budget=24, scorer="h2o")
    decoded = skv.SparseKVCache(model.config, config)
    for start, end in ((0, 16), *((step, step + 1) for step in range(16, 20)), (20, 50)):
        feed(model, decoded, ids[:, start:end])
    decoded.compress()
    assert kept(decoded) == kept(after_turns(model, config, ids, (50,)))


def test_ages_are_not_carried_as_scores(tiny_llama):
    seen = []

    class Watching(skv.Scorer):
        name = "watching"
        queries = "none"

        def score(self, inputs):
            seen.append(inputs.carried)
            return inputs.key_positions() + 1.0

    model, ids = tiny_llama(num_layers=1, attn_implementation="sparsekv"), torch.randint(3, 256, (1, 20))
    for decode, is_carried in (("ring", False), ("replace_lowest", True)):
        seen.clear()
        after_turns(model, skv.SparseKVConfig(**METHOD, budget=24, scorer=Watching(), decode=decode), ids, (12, 20))
        first, second = seen
        assert first is None
        assert (second is not None) == is_carried
    assert second.shape == (1, 2, 20)
    assert (second[..., :12] > 0).all() and (second[..., 12:] == 0).all()


def test_a_scorer_that_fails_once_leaves_the_prompt_open_and_counts_it_once(tiny_llama):
    class Moody(skv.Scorer):
        name = "moody"
        queries = "none"
        default_prompt_share = 0.0
        fails = False

        def score(self, inputs):
            calls.append(1)
            scores = torch.ones_like(inputs.keys[..., 0])
            scores = scores if inputs.carried is None else scores + inputs.carried
            return scores * float("nan") if len(calls) == 4 else scores

    calls = []
    model = tiny_llama(num_layers=1, attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, skv.SparseKVConfig(**METHOD, budget=24, scorer=Moody()))
    ids, mask = torch.randint(3, 256, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    for start, end in ((0, 12), (12, 20)):
        feed(model, cache, ids[:, start:end], mask[:, :end])
        try:
            cache.compress()
        except skv.ScoreError:
            cache.compress()
    assert len(calls) == 6
    scores = cache._window_layers()[0].column_scores[:, :, :20]
    assert torch.equal(scores[1], torch.tensor([2.0] * 12 + [1.0] * 8).expand(2, -1))
    assert torch.equal(scores[0], torch.tensor([0.0] * 3 + [2.0] * 9 + [1.0] * 8).expand(2, -1))
