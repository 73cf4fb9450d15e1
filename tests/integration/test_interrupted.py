"""A forward pass that ended in an exception leaves either a cache that is still right, or one that says it is not."""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv import ops
from hf_sparsekv.hf import attention
from hf_sparsekv.hf.compat import CACHE_KEYWORD

pytestmark = pytest.mark.usefixtures("registered")

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)


def feed(model, cache, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{CACHE_KEYWORD: cache}).logits


def fail(*_):
    raise KeyboardInterrupt


def interrupted_in_layer(model, cache, ids, layer):
    hook = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        feed(model, cache, ids)
    hook.remove()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("turns", [(), (80,), (80, 1, 1), (10,), (80, 30)], ids=str)
@pytest.mark.parametrize("num_new", [80, 1])
@pytest.mark.parametrize("num_after", [80, 1])
def test_a_pass_that_did_not_reach_every_layer_ends_the_cache(model, layer, turns, num_new, num_after):
    cache = skv.SparseKVCache(model.config, SMALL)
    for length in turns:
        feed(model, cache, torch.randint(3, 256, (1, length)))
    interrupted_in_layer(model, cache, torch.randint(3, 256, (1, num_new)), layer)
    for _ in range(2):  # it does not go away
        with pytest.raises(skv.CacheError, match=r"interrupted: layer \d has seen \d+ tokens, the cache \d+.*reset"):
            feed(model, cache, torch.randint(3, 256, (1, num_after)))
    ids = torch.randint(3, 256, (1, 80))
    cache.reset()
    assert torch.equal(feed(model, cache, ids), feed(model, skv.SparseKVCache(model.config, SMALL), ids))


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("num_new", [80, 1])
def test_an_error_inside_the_attention_of_any_layer_ends_the_cache(model, monkeypatch, layer, num_new):
    """In the last layer too, where no other layer comes after it."""
    cache = skv.SparseKVCache(model.config, SMALL)
    feed(model, cache, torch.randint(3, 256, (1, 80)))
    feed(model, cache, torch.randint(3, 256, (1, 1)))
    with monkeypatch.context() as patch:
        if layer and num_new == 1:  # a window layer decodes in its slots
            patch.setattr(ops, "decode_step", failing_at_call(layer, ops.decode_step))
        else:
            patch.setattr(cache.layers[layer].state.columns, "append", fail)
        with pytest.raises(KeyboardInterrupt):
            feed(model, cache, torch.randint(3, 256, (1, num_new)))
    with pytest.raises(skv.CacheError, match="interrupted"):
        feed(model, cache, torch.randint(3, 256, (1, 1)))


def failing_at_call(number, function):
    calls = []

    def call(*args):
        calls.append(1)
        return fail() if len(calls) == number else function(*args)

    return call


def test_an_interruption_before_anything_is_stored_harms_nothing(model, monkeypatch):
    cache = skv.SparseKVCache(model.config, SMALL)
    ids = torch.randint(3, 256, (1, 80))
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_check_call", fail)
        with pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids)
    assert torch.equal(feed(model, cache, ids), feed(model, skv.SparseKVCache(model.config, SMALL), ids))


def test_what_is_refused_before_the_first_layer_harms_nothing(model):
    ids, more = torch.randint(3, 256, (1, 80)), torch.randint(3, 256, (1, 1))
    cache, untouched = (skv.SparseKVCache(model.config, SMALL) for _ in range(2))
    for one in (cache, untouched):
        feed(model, one, ids)
    with pytest.raises(skv.CacheError, match="1 requests"):
        feed(model, cache, torch.randint(3, 256, (2, 1)))
    assert torch.equal(feed(model, cache, more), feed(model, untouched, more))


def test_our_generate_says_so_too(model):
    ids = torch.randint(3, 256, (1, 80))
    output = skv.generate(model, ids, SMALL, max_new_tokens=4, do_sample=False, pad_token_id=2, eos_token_id=None)
    interrupted_in_layer(model, output.cache, ids[:, :1], 1)
    longer = torch.cat([output.sequences, ids], dim=1)
    with pytest.raises(skv.CacheError, match="interrupted"):
        skv.generate(model, longer, cache=output.cache, max_new_tokens=4, pad_token_id=2)
