"""What the queue's head found in the prefix cache is remembered from step to step, and is what a new search finds."""

import weakref
from dataclasses import dataclass
from random import Random

import pytest

from hf_sparsekv.engine.prefix_cache import NO_PREFIX, PrefixCache
from hf_sparsekv.engine.prefix_reuse import PrefixReuse
from hf_sparsekv.engine.request import Request
from hf_sparsekv.engine.scheduler import Scheduler
from hf_sparsekv.engine.tables import RequestTables
from hf_sparsekv.plan import LayerPlan, LayerSpec, ModelShape

SIZE, LAYERS = 2, 3
SHAPE = ModelShape(num_layers=LAYERS, num_heads=2, num_kv_heads=1, head_dim=8)
SPECS = [LayerSpec(layer_idx=i, is_full=i == 1, budget=None if i == 1 else 6, num_protected=3) for i in range(LAYERS)]
PLAN = LayerPlan(shape=SHAPE, layers=tuple(SPECS), grows=False, chunk_tokens=None)


@dataclass(frozen=True)
class Params:
    max_tokens: int = 4


def request_of(prompt):
    return Request(request_id="head", prompt_ids=list(prompt), params=Params(), plan=PLAN)


def shown(prefix):
    """By entry, its number and its blocks."""
    return list(zip(prefix.numbers, prefix.blocks.tolist(), strict=True))


class Traffic:
    """Requests that leave prefixes, hold them, and push others out."""

    def __init__(self, cache, seed):
        self.cache, self.rng, self.held = cache, Random(seed), []

    def prompt(self):
        return [self.rng.randint(0, 1) for _ in range(self.rng.randint(2, 16))]

    def one(self):
        move = self.rng.random()
        if move < 0.4 and self.held:
            self.cache.free(self.held.pop(self.rng.randrange(len(self.held))))
        elif move < 0.6:
            tokens = self.prompt()
            prefix = self.cache.find(tokens, len(tokens))
            blocks = prefix.blocks.ravel()
            self.cache.share(prefix, blocks)
            self.held.append(blocks)
        else:
            tokens = self.prompt()
            count = len(tokens) // SIZE
            if count * LAYERS <= self.cache.num_free:
                blocks = self.cache.allocate(count * LAYERS)
                self.cache.insert(tokens, blocks.reshape(LAYERS, count))
                self.held.append(blocks)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_remembered_is_what_is_there(seed):
    cache = PrefixCache(60, SIZE)
    traffic = Traffic(cache, seed)
    heads = [(request_of([*traffic.prompt(), 0]), PrefixReuse(cache)) for _ in range(4)]
    for _ in range(300):
        traffic.one()
        for request, reuse in heads:
            tables = RequestTables(PLAN, request.prompt_length, request.max_length, SIZE, stages_all=True)
            fresh = PrefixReuse(cache)
            for found, expected in zip(reuse.offers(request), fresh.offers(request), strict=True):
                assert shown(found) == shown(expected)
                assert reuse.num_shared(tables, found) == fresh.num_shared(tables, expected)
    assert cache.num_evicted > 50 and cache.num_holder_changes > 100


@pytest.fixture
def seen(monkeypatch):
    """The pieces of prompts that a cache looks at, in order."""
    seen, pieces = [], PrefixCache._pieces

    def counted(self, *args):
        for piece in pieces(self, *args):
            seen.append(piece)
            yield piece

    monkeypatch.setattr(PrefixCache, "_pieces", counted)
    return seen


def cache_of(tokens):
    """A cache that knows them, and whoever stored them still there."""
    cache, count = PrefixCache(6 * len(tokens) // SIZE, SIZE), len(tokens) // SIZE
    cache.insert(tokens, cache.allocate(count * LAYERS).reshape(LAYERS, count))
    return cache


def test_a_blocked_head_does_not_walk_its_prefix_again(seen):
    tokens = list(range(1000))
    cache = cache_of(tokens)
    seen.clear()
    reuse, request = PrefixReuse(cache), request_of([*tokens, -1, -2, -3])
    first = next(reuse.offers(request))
    assert len(first) == 500 and len(seen) == 501
    seen.clear()
    assert next(reuse.offers(request)) is first
    assert len(seen) == 1  # the one that might have come since
    other = request_of([*tokens[:10], -1, -2, -3])
    assert len(next(reuse.offers(other))) == 5
    assert shown(next(reuse.offers(request))) == shown(first)


def test_a_prompt_is_stored_from_the_prefix_on_that_it_began_with(seen):
    tokens = list(range(1000))
    cache = cache_of(tokens)
    reuse, request = PrefixReuse(cache), request_of([*tokens, -1, -2, -3])
    prefix = next(reuse.offers(request))
    request.tables = RequestTables(PLAN, request.prompt_length, request.max_length, SIZE, stages_all=True)
    reuse.begin(request, request.tables, prefix)
    request.tables.allocate(cache, request.prompt_length + 1, staged=True)
    seen.clear()
    reuse.store_prompt(request)
    assert seen == [(-1, -2)] * 2  # looked for, and stored
    assert len(cache.find(request.prompt_ids, 1002)) == 501
    seen.clear()
    reuse.store_prompt(request)
    assert seen == []


def test_an_aborted_head_is_remembered_no_more():
    tokens = list(range(20))
    cache = cache_of(tokens)
    scheduler = Scheduler(cache, block_size=SIZE, max_num_seqs=2, max_batch_tokens=40, max_model_len=40)
    cache.allocate(cache.num_free)
    request = request_of([*tokens, -1])
    scheduler.add(request)
    assert scheduler.schedule().is_empty
    gone = weakref.ref(request)
    del request
    assert gone() is not None
    scheduler.abort("head")
    assert gone() is None


def test_what_was_found_is_given_up_when_its_entries_go():
    cache = PrefixCache(31, SIZE)
    blocks = cache.allocate(15)
    cache.insert(list(range(10)), blocks.reshape(LAYERS, 5))
    cache.free(blocks)
    before = cache.find(list(range(10)), 10)
    assert len(before) == 5 and cache.find(list(range(10)), 10, before) is before
    cache.allocate(15 + 4)  # the end of the prefix goes first
    assert shown(cache.find(list(range(10)), 10, before)) == shown(before)[:3]
    cache.clear()
    assert shown(cache.find(list(range(10)), 10, before)) == shown(NO_PREFIX)
