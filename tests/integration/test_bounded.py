"""Bounded prefill of one cache: a chunk attends to what is kept and to itself, and never is more at hand than that.

Guards against a layer that quietly holds the whole prompt, results that depend on how the passes were cut, and rows of
a padded batch that lose what earlier chunks kept.
"""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD, can_chunk_a_later_turn
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.oracle import Oracle, forward_both

pytestmark = pytest.mark.usefixtures("registered")

CHUNK, BUDGET = 16, 21
BOUNDED = skv.SparseKVConfig(
    num_full_layers=1,
    budget=BUDGET,
    num_sink_tokens=2,
    num_recent_tokens=8,
    observation_window=6,
    prefill="bounded",
    prefill_chunk_tokens=CHUNK,
)
EXACT = BOUNDED.with_(prefill="exact", prefill_chunk_tokens=None)
GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prompt_of(length, seed=1, batch=1):
    return torch.randint(3, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def feed(model, cache, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache}).logits


def kept(cache):
    return [layer["positions"] for layer in cache.report(positions=True)["layers"]]


@pytest.mark.parametrize("scorer", scorer_names())
@pytest.mark.parametrize("is_padded", [False, True], ids=["alone", "padded"])
def test_every_chunk_attends_to_what_is_kept_and_to_itself(model, scorer, is_padded):
    cache, oracle = skv.SparseKVCache(model.config, BOUNDED.with_(scorer=scorer)), Oracle(model)
    columns = torch.ones(2, 0, dtype=torch.bool)
    for start, length in ((0, 16), (16, 16), (32, 16), (48, 9), (57, 1), (58, 1)):
        new = torch.ones(2, length, dtype=torch.bool)
        if is_padded and start < 32:
            new[0] = False  # the first request begins with the third chunk
        columns = torch.cat([columns, new], dim=1)
        sparse, dense = forward_both(model, cache, oracle, prompt_of(length, seed=start, batch=2), columns)
        torch.testing.assert_close(sparse[new], dense[new], rtol=1e-4, atol=1e-4)
    assert cache.report()["evicted_at_prompt"] > 0


@pytest.mark.parametrize("decode", ["replace_lowest", "ring", "grow"])
def test_a_window_layer_never_holds_more_than_its_budget_and_a_chunk(model, decode):
    cache, longest = skv.SparseKVCache(model.config, BOUNDED.with_(decode=decode)), 0
    for start in range(0, 160, CHUNK):
        feed(model, cache, prompt_of(CHUNK, seed=start))
        for layer in cache._window_layers():
            assert layer.num_stored(0) == min(start + CHUNK, BUDGET)
            assert layer.columns.capacity <= BUDGET + CHUNK
            longest = max(longest, layer.nbytes)
    assert longest < 2 * cache._window_layers()[0].nbytes
    assert cache.report()["evicted_at_prompt"] == 2 * (160 - BUDGET)


@pytest.mark.parametrize("length", [6, 13, CHUNK])
def test_a_prompt_of_one_chunk_is_exact_to_the_bit(model, length):
    ids = prompt_of(length)
    exact, bounded = (skv.generate(model, ids, config.with_(budget=12), **GREEDY) for config in (EXACT, BOUNDED))
    assert torch.equal(exact.sequences, bounded.sequences)
    assert kept(exact.cache) == kept(bounded.cache)
    for one, other in zip(exact.cache._window_layers(), bounded.cache._window_layers(), strict=True):
        assert torch.equal(one.slots.keys, other.slots.keys)
        assert torch.equal(one.slots.scores, other.slots.scores)


@pytest.mark.parametrize("scorer", scorer_names())
def test_nothing_evicted_means_the_tokens_of_the_dense_cache(model, scorer):
    ids = prompt_of(70)
    dense = skv.generate(model, ids, EXACT.with_(num_full_layers=3), **GREEDY)
    bounded = skv.generate(model, ids, BOUNDED.with_(budget=100, scorer=scorer), **GREEDY)
    assert torch.equal(bounded.sequences, dense.sequences)


@pytest.mark.parametrize("scorer", ["snapkv", "hybrid", "h2o", "keydiff"])
def test_what_is_kept_depends_on_chunks_not_on_passes(model, scorer):
    """Passes that divide a chunk wait for its end; a pass that would reach over it selects first."""
    config, ids, found = BOUNDED.with_(scorer=scorer), prompt_of(60), []
    for step in (4, 8, CHUNK):
        cache = skv.SparseKVCache(model.config, config, prompt_length=60)
        for start in range(0, 60, step):
            feed(model, cache, ids[:, start : start + step])
            assert all(layer.num_unselected <= CHUNK for layer in cache._window_layers())
        found.append(kept(cache))
    assert found[0] == found[1] == found[2]
    cache = skv.SparseKVCache(model.config, config)
    for start in range(0, 60, 12):
        feed(model, cache, ids[:, start : start + 12])
        assert all(layer.num_unselected == 12 for layer in cache._window_layers())
        assert all(layer.columns.num_columns <= BUDGET + CHUNK for layer in cache._window_layers())


def test_the_rows_of_the_chunk_before_help_a_short_last_chunk_to_observe(model):
    """Two tokens are no observation window: the last rows of the prompt are, wherever chunks end."""
    ids, seen = prompt_of(2 * CHUNK + 2), []

    class Counting(skv.Scorer):
        name = "counting"

        def score(self, inputs):
            seen.append((inputs.queries.shape[2], inputs.keys.shape[2]))
            return inputs.attention_received()

    skv.generate(model, ids, BOUNDED.with_(scorer=Counting()), **GREEDY)
    assert seen == [(6, 16)] * 2 + [(6, 32)] * 2 + [(6, BUDGET + 2)] * 2


def test_a_pass_longer_than_a_chunk_is_refused_and_harms_nothing(model):
    cache, ids = skv.SparseKVCache(model.config, BOUNDED), prompt_of(CHUNK)
    feed(model, cache, ids)
    before = kept(cache)
    with pytest.raises(skv.InputError, match=r"17 tokens, but .*prefill_chunk_tokens=16 .*prefill_chunk_size=16"):
        feed(model, cache, prompt_of(CHUNK + 1))
    assert kept(cache) == before
    feed(model, cache, ids)


def test_transformers_own_chunks_give_what_generate_gives(model):
    ids = prompt_of(2, batch=2).repeat(1, 35)
    expected = skv.generate(model, ids, BOUNDED, **GREEDY)
    cache = skv.SparseKVCache(model.config, BOUNDED, prompt_length=70)
    out = model.generate(ids, prefill_chunk_size=CHUNK, **{CACHE_KEYWORD: cache}, **GREEDY)
    assert torch.equal(out, expected.sequences)
    assert kept(cache) == kept(expected.cache)


@pytest.mark.parametrize("scorer", scorer_names())
def test_a_request_padded_by_whole_chunks_gets_what_it_gets_alone(model, scorer):
    config, lengths = BOUNDED.with_(scorer=scorer), (80, 64, 32, 16)
    ids, mask = torch.zeros(4, 80, dtype=torch.long), torch.zeros(4, 80, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 80 - length :], mask[row, 80 - length :] = prompt_of(length, seed=row), 1
    together = skv.generate(model, {"input_ids": ids, "attention_mask": mask}, config, **GREEDY)
    for row, length in enumerate(lengths):
        alone = skv.generate(model, prompt_of(length, seed=row), config, **GREEDY)
        assert torch.equal(together.new_tokens[row], alone.new_tokens[0])


@pytest.mark.parametrize("scorer", ["snapkv", "h2o"])
def test_a_second_turn_and_beams(model, scorer):
    config = BOUNDED.with_(scorer=scorer)
    first = skv.generate(model, prompt_of(50), config, **GREEDY)
    conversation = torch.cat([first.sequences, prompt_of(40, seed=2)], dim=1)
    mask = torch.ones_like(conversation)  # an answer may hold the padding's id
    turn = {"input_ids": conversation, "attention_mask": mask}
    if not can_chunk_a_later_turn():
        with pytest.raises(skv.InputError, match="new tokens, more than prefill_chunk_tokens=16"):
            skv.generate(model, turn, cache=first.cache, **GREEDY)
        return
    second = skv.generate(model, turn, cache=first.cache, **GREEDY)
    for layer in second.report["layers"][1:]:
        assert layer["stored"] == [BUDGET]
    assert not second.report["is_prompt_open"]
    assert all(layer.tail.is_empty for layer in second.cache._window_layers())
    beams = skv.generate(model, prompt_of(50), config, num_beams=3, **GREEDY)
    assert beams.sequences.shape == (1, 60)
