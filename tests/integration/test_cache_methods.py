"""What may be done to a cache between two passes: copies, pickles, rows, casts; and what is refused by name."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD

pytestmark = pytest.mark.usefixtures("registered")

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
COPIES = [copy.deepcopy, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))]
IDS = ["deepcopy", "copy", "pickle"]


def feed(model, cache, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{CACHE_KEYWORD: cache}).logits


def used_cache(model, *, batch=2, decoded=1):
    cache = skv.SparseKVCache(model.config, SMALL)
    for length in (80, *[1] * decoded):
        feed(model, cache, torch.randint(3, 256, (batch, length)))
    return cache


# --- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", COPIES, ids=IDS)
def test_a_copy_goes_on_like_the_original_after_our_generate(tiny_llama, copied):
    """The model is back on its own attention when the copy is made, and on ours when the copy is used."""
    plain, ids = tiny_llama(num_layers=3), torch.randint(3, 256, (1, 80))
    first = skv.generate(plain, ids, SMALL, **GREEDY)
    longer = torch.cat([first.sequences, ids], dim=1)
    from_copy = skv.generate(plain, longer, cache=copied(first.cache), **GREEDY)
    assert torch.equal(from_copy.sequences, skv.generate(plain, longer, cache=first.cache, **GREEDY).sequences)


@pytest.mark.parametrize("copied", COPIES, ids=IDS)
@pytest.mark.parametrize("num_new", [30, 1])
def test_a_copy_on_a_model_with_another_attention_is_refused_and_stays_good(model, copied, num_new):
    cache, ids = used_cache(model), torch.randint(3, 256, (2, num_new))
    twin = copied(cache)
    expected = feed(model, cache, ids)
    model.set_attn_implementation("sdpa")
    # Where no model is known yet, sdpa may stumble over the mask of several tokens before we notice.
    error, message = skv.CacheError, r"attn_implementation='sparsekv'.*set_attn_implementation"
    if copied is COPIES[-1] and num_new > 1:
        error, message = RuntimeError, None
    with pytest.raises(error, match=message):
        feed(model, twin, ids)
    model.set_attn_implementation("sparsekv")
    assert torch.equal(feed(model, twin, ids), expected)


def test_a_deep_copy_shares_the_configuration_of_the_model_and_nothing_that_changes(model):
    cache = used_cache(model)
    twin = copy.deepcopy(cache)
    assert twin.model_config is cache.model_config
    before = cache.report(positions=True)
    feed(model, twin, torch.randint(3, 256, (2, 1)))
    assert cache.report(positions=True) == before
    pair = copy.deepcopy({"one": cache, "two": cache})
    assert pair["one"] is pair["two"] is not cache
    assert pair["one"].layers[1].cache is pair["one"]
    assert pair["one"].layers[1].state.padding is pair["one"].padding


def test_a_cache_made_from_another_configuration_object_serves_the_model(tiny_llama, model):
    """What counts is the attention that the model calls, not what some configuration says."""
    other = tiny_llama(num_layers=3).config
    assert other._attn_implementation == "sdpa"
    ids = torch.randint(3, 256, (1, 40))
    cache = skv.SparseKVCache(other, SMALL)
    assert torch.equal(feed(model, cache, ids), feed(model, skv.SparseKVCache(model.config, SMALL), ids))


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["batch_select_indices", "reorder_cache"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0], r"int64 tensor \[requests\].*got \[0\]"),
        (None, "got None"),
        (torch.tensor([True, False]), r"torch.bool \[2\]"),
        (torch.tensor([0.0]), "torch.float32"),
        (torch.tensor(0), r"torch.int64 \[\]"),
        (torch.tensor([[0]]), r"torch.int64 \[1, 1\]"),
        (torch.tensor([0, 2]), r"\[0, 2\).*got \[0, 2\]"),
        (torch.tensor([-1]), r"\[0, 2\)"),
        (torch.tensor([], dtype=torch.long), "at least one request"),
    ],
)
def test_what_is_no_choice_of_requests_is_refused_and_harms_nothing(model, method, rows, message):
    cache = used_cache(model)
    before = cache.report(positions=True)
    with pytest.raises(skv.InputError, match=message):
        getattr(cache, method)(rows)
    assert cache.report(positions=True) == before


@pytest.mark.parametrize("repeats", [0, -1, 2.0, True, None, torch.tensor(2)])
def test_only_a_positive_number_of_repeats_is_taken(model, repeats):
    with pytest.raises(skv.InputError, match="repeats must be a positive int"):
        used_cache(model).batch_repeat_interleave(repeats)


def test_requests_that_are_selected_go_on_as_before(model):
    cache, ids = used_cache(model, batch=3), torch.randint(3, 256, (3, 1))
    expected = feed(model, copy.deepcopy(cache), ids)
    cache.batch_select_indices(torch.tensor([2, 0], dtype=torch.int32))
    cache.batch_repeat_interleave(2)
    rows = [2, 2, 0, 0]
    torch.testing.assert_close(feed(model, cache, ids[rows]), expected[rows])


def test_an_empty_cache_has_no_requests(model):
    cache = skv.SparseKVCache(model.config, SMALL)
    for call in (
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
    ):
        with pytest.raises(skv.CacheError, match="the cache is empty"):
            call()
    with pytest.raises(skv.InputError, match="got \\[0\\]"):
        cache.batch_select_indices([0])


# --- what a sparse cache does not do ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, "3", 1.0, [1]])
def test_cropping_takes_an_int(model, tokens):
    with pytest.raises(skv.InputError, match="crop takes a number of tokens"):
        used_cache(model).crop(tokens)


def test_offloading_is_refused(model):
    cache = used_cache(model)
    for call in (
        lambda: cache.offload(1),
        lambda: cache.prefetch(1, only_non_sliding=False),
        cache.layers[0].offload,
        cache.layers[1].prefetch,
    ):
        with pytest.raises(skv.CacheError, match="cannot be offloaded"):
            call()


@pytest.mark.parametrize("num_new", [1, 20])
def test_a_model_that_was_cast_since_is_refused_and_harms_nothing(model, num_new):
    cache, ids = used_cache(model), torch.randint(3, 256, (2, num_new))
    expected = feed(model, copy.deepcopy(cache), ids)
    with pytest.raises(skv.CacheError, match=r"torch.float32 keys on cpu, the model now makes torch.bfloat16"):
        feed(copy.deepcopy(model).bfloat16(), cache, ids)
    assert torch.equal(feed(model, cache, ids), expected)


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [(80,), (80, 1), (80, 1, 30), (10, 1)], ids=str)
def test_a_backward_pass_is_refused_and_no_graph_stays_in_the_cache(model, turns):
    cache = skv.SparseKVCache(model.config, SMALL)
    for length in turns:
        output = model(input_ids=torch.randint(3, 256, (2, length)), use_cache=True, **{CACHE_KEYWORD: cache})
    for layer in cache.layers:
        assert not layer.state.columns.num_columns or not layer.state.columns.keys.requires_grad
        slots = getattr(layer.state, "slots", None)
        for tensor in () if slots is None else vars(slots).values():
            assert not tensor.requires_grad
    with pytest.raises(skv.CacheError, match=r"no gradients.*no_grad"):
        output.logits.sum().backward()


def test_outside_no_grad_the_logits_are_the_same(model):
    caches = [skv.SparseKVCache(model.config, SMALL) for _ in range(2)]
    for length in (80, 1, 1, 30, 1):
        ids = torch.randint(3, 256, (2, length))
        with_graph = model(input_ids=ids, use_cache=True, **{CACHE_KEYWORD: caches[0]}).logits
        assert torch.equal(with_graph, feed(model, caches[1], ids))


def test_without_our_cache_gradients_are_those_of_sdpa(model):
    ids, gradients = torch.randint(3, 256, (2, 40)), []
    for attention in ("sparsekv", "sdpa"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("copied", [lambda cache: cache, *COPIES], ids=["itself", *IDS])
def test_the_memory_of_a_cache_goes_with_it_without_a_garbage_collection(model, copied):
    gc.collect()
    gc.disable()
    try:
        cache = copied(used_cache(model))
        feed(model, cache, torch.randint(3, 256, (2, 1)))
        layer, keys = cache.layers[0], weakref.ref(cache.layers[1].state.stored_keys)
        del cache
        assert keys() is None
    finally:
        gc.enable()
    with pytest.raises(skv.CacheError, match="keep the cache, not only its layers"):
        layer.reset()
