"""Evicted means gone: what a sparse cache saves is memory, measured outside the cache's own books.

Guards against an eviction that only masks, against copies expanded to the query heads, against views that keep a whole
prompt alive, and against a cache that grows with a long answer.
"""

import copy
import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import hf_sparsekv as skv
from hf_sparsekv.cache.slots import SlotStore
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.scorers import scorer_names

pytestmark = pytest.mark.usefixtures("registered")

SMALL = {"num_full_layers": 1, "budget": 24, "num_recent_tokens": 8, "observation_window": 8}


def live_storages():
    """Bytes of every storage that a tensor of this process holds, by address."""
    gc.collect()
    # type(), not isinstance: asking some lazy objects for their class warns.
    tensors = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    # Other tests may leave fakes, and sparse tensors, which have no storage of their own.
    tensors = [t for t in tensors if not (type(t) is FakeTensor or t.is_meta) and t.layout is torch.strided]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def feed(model, cache, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache}).logits


@pytest.mark.parametrize(
    ("scorer", "decode"),
    [
        ("snapkv", "replace_lowest"),
        ("snapkv", "ring"),
        ("snapkv", "grow"),
        ("h2o", "replace_lowest"),  # observes every row of the prompt
        ("hybrid", "replace_lowest"),  # two lists
    ],
)
def test_after_a_prompt_and_some_tokens_only_the_kept_tensors_are_alive(tiny_llama, scorer, decode):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    config = skv.SparseKVConfig(**SMALL, scorer=scorer, decode=decode)
    cache = skv.SparseKVCache(model.config, config, prompt_length=200)
    prompt, token = torch.randint(3, 256, (2, 200)), torch.randint(3, 256, (2, 1))
    before = live_storages()
    for ids in (prompt, token, token):
        feed(model, cache, ids)
    rope = cache._inv_freq  # a constant of the model
    after = live_storages()
    new = sum(size for address, size in after.items() if address not in before and address != rope.data_ptr())
    # Buffers that the model itself keeps from one forward pass to the next would show here too: there are none.
    assert new == cache.nbytes == cache.plan.total_bytes(202, element_bytes=4, prompt_length=200, batch_size=2)


@pytest.mark.parametrize("scorer", scorer_names())
def test_keys_are_held_per_kv_head_under_every_scorer(tiny_llama, scorer):
    model = tiny_llama(num_heads=8, num_kv_heads=2, attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, skv.SparseKVConfig(**SMALL, scorer=scorer), prompt_length=60)
    feed(model, cache, torch.randint(3, 256, (1, 60)))
    assert cache.layers[0].state.columns.keys.shape == (1, 2, 60, 16)
    for window in cache._window_layers():
        assert window.slots.keys.shape == window.slots.values.shape == (1, 2, 24, 16)
        assert window.slots.scores.shape == (1, 2, 24)


@pytest.mark.parametrize("decode", ["replace_lowest", "ring"])
@pytest.mark.parametrize("prompt", [6, 24, 100])
def test_a_long_answer_takes_no_more_than_the_budget(tiny_llama, decode, prompt):
    """Short prompts too: then everything that is evicted is evicted while decoding."""
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, skv.SparseKVConfig(**SMALL, decode=decode), prompt_length=prompt)
    feed(model, cache, torch.randint(3, 256, (1, prompt)))
    sizes = []
    for _ in range(2 * 24 + 20):
        feed(model, cache, torch.randint(3, 256, (1, 1)))
        seen = cache.get_seq_length()
        for layer in cache.report(positions=True)["layers"][1:]:
            assert layer["stored"] == [min(seen, 24)]
            for head in layer["positions"][0]:
                assert {*range(4), *range(seen - 8, seen)} & set(range(seen)) <= set(head)
        if seen > 24:
            sizes.append(sum(window.nbytes for window in cache._window_layers()))
    assert len(sizes) >= 48
    assert len(set(sizes)) == 1
    assert cache.report()["evicted_while_decoding"] == 2 * (2 * 24 + 20 - max(0, 24 - prompt))


@pytest.mark.parametrize("pads", [(50, 7, 0), (0, 0, 0)], ids=["padded", "not padded"])
def test_what_kernels_read_is_contiguous_and_its_lengths_are_true(tiny_llama, pads):
    """After a prompt, decoding, a second turn, a reorder and a copy: no stride or length leads out of bounds."""
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, skv.SparseKVConfig(**{**SMALL, "budget": 0.4}))
    columns = torch.ones(3, 0, dtype=torch.long)
    for length in (90, 1, 1, 30, 1, 1):
        new = torch.ones(3, length, dtype=torch.long)
        if length == 90:
            new[0, : pads[0]], new[1, : pads[1]] = 0, 0
        columns = torch.cat([columns, new], dim=1)
        with torch.no_grad():
            model(
                input_ids=torch.randint(3, 256, (3, length)),
                attention_mask=columns,
                position_ids=(columns.cumsum(-1) - 1).clamp_min(0)[:, -length:],
                use_cache=True,
                **{CACHE_KEYWORD: cache},
            )
        assert_safe(cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert_safe(cache)
    assert_safe(copy.deepcopy(cache))


def assert_safe(cache):
    for window in cache._window_layers():
        store = window.slots
        if store is None:
            continue
        assert isinstance(store, SlotStore)
        for name, tensor in vars(store).items():
            assert tensor.is_contiguous(), name
        rows = range(len(store.lengths))
        assert store.lengths.tolist() == [window.num_in_slots(row) for row in rows]
        assert (store.lengths <= store.budgets).all()
        assert int(store.budgets.max()) <= store.capacity
        assert ((store.victims >= 0) & (store.victims <= store.lengths[:, None])).all()
        assert (store.victims < store.capacity).all()
        in_use = torch.arange(store.capacity)[None] < store.lengths[:, None]
        assert torch.equal(store.positions >= 0, in_use[:, None].expand_as(store.positions))
        assert torch.isfinite(store.keys).all()


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_gets_back_what_was_evicted(tiny_llama):
    """Allocated memory after the prompt, all layers full against sparse; a cache that only masks fails."""
    model = tiny_llama(num_heads=8, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16, attn_implementation="sparsekv")
    model.cuda()
    sparse, full = skv.SparseKVConfig(num_full_layers=1, budget=256), skv.SparseKVConfig(num_full_layers=4)
    ids = torch.randint(3, 256, (2, 3968), device="cuda")
    held, planned = [], []
    for config in (sparse, full, sparse):  # the first run warms up: libraries take their workspaces
        cache = skv.SparseKVCache(model.config, config, prompt_length=3968)
        gc.collect()
        before = torch.cuda.memory_allocated()
        feed(model, cache, ids)
        held.append(torch.cuda.memory_allocated() - before)
        planned.append(cache.plan.total_bytes(3968, element_bytes=2, batch_size=2))
        assert cache.nbytes == planned[-1]
        del cache
    rounding = 512 * 8 * 4  # the allocator rounds each tensor up to 512 bytes
    assert planned[2] < 0.4 * planned[1]
    assert abs(held[2] - planned[2]) <= rounding
    unsplit = 2 * 2**20  # of a large block, the allocator does not split off what is left when that is small
    assert abs((held[1] - held[2]) - (planned[1] - planned[2])) <= unsplit
