"""Laws of prefix caching, by a world that keeps what every block of the pool holds.

Prompts are made of two tokens, so that prefixes meet all the time. A place in a block holds its layer and all tokens
up to its own, or something worthless: what a window layer selects, and what it decodes, and all that a request stores
whose prefill is bounded.
"""

from collections import Counter, deque
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.prefix_cache import PrefixCache
from hf_sparsekv.engine.request import FinishReason, Request, RequestStatus
from hf_sparsekv.engine.scheduler import Scheduler
from hf_sparsekv.errors import RequestError
from hf_sparsekv.plan import LayerPlan, LayerSpec, ModelShape

FULL, NOTHING = None, object()


@dataclass(frozen=True)
class Params:
    max_tokens: int


def layer_plan(budgets, grows=False, chunk=None):
    shape = ModelShape(num_layers=len(budgets), num_heads=2, num_kv_heads=1, head_dim=8)
    layers = [LayerSpec(layer_idx=i, is_full=b is FULL, budget=b, num_protected=3) for i, b in enumerate(budgets)]
    return LayerPlan(shape=shape, layers=tuple(layers), grows=grows, chunk_tokens=chunk)


PLANS = [
    layer_plan([FULL, FULL, FULL]),
    layer_plan([FULL, 6, 6]),
    layer_plan([5, 40, 7]),
    layer_plan([0.25, FULL, 0.5]),
    layer_plan([FULL, 6, 40], grows=True),
    layer_plan([FULL, 6, 40], chunk=8),
]


class World:
    """An engine whose model only remembers."""

    def __init__(self, pool_of, num_blocks, size, lag=1, chunk=None, max_num_seqs=4, max_batch_tokens=24):
        self.pool, self.size, self.lag = pool_of(num_blocks), size, lag
        self.scheduler = Scheduler(
            self.pool,
            block_size=size,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            prefill_chunk_tokens=chunk,
            max_model_len=60,
        )
        self.memory = [[NOTHING] * size for _ in range(num_blocks)]
        self.live, self.in_flight, self.events = [], deque(), Counter()
        self.num_added = 0

    def add(self, plan, prompt, max_tokens, num_query_rows):
        self.num_added += 1
        request = Request(
            request_id=str(self.num_added),
            prompt_ids=list(prompt),
            params=Params(max_tokens),
            plan=plan,
            num_query_rows=num_query_rows,
        )
        try:
            self.scheduler.add(request)
        except RequestError:
            return None
        self.live.append(request)
        return request

    def abort(self, request):
        assert self.scheduler.abort(request.request_id) is request
        self.live.remove(request)

    def step(self):
        plan = self.scheduler.schedule()
        for layer in range(3):
            self.run_layer(layer, plan)
        self.events["preempted"] += len(plan.preempted)
        for request in plan.admitted:
            self.events["hits"] += request.num_computed > 0 and request.num_cached > 0
        last = [chunk.request for chunk in plan.prefill if chunk.is_last]
        sampled = [r for r in plan.decode + last if not r.is_replaying]
        self.in_flight.append([(r, r.num_scheduled_outputs - 1) for r in sampled])
        while len(self.in_flight) > self.lag:
            self.deliver(self.in_flight.popleft())
        self.check()
        return plan

    def deliver(self, sampled):
        for request, index in sampled:
            if request.is_finished:
                continue
            request.output_ids.append(index % 2)
            if len(request.output_ids) == request.params.max_tokens:
                self.scheduler.finish(request, FinishReason.LENGTH)
                self.live.remove(request)

    # --- the model ------------------------------------------------------------------------------------------------

    def run_layer(self, layer, plan):
        for request in plan.decode:
            table, length = request.tables.blocks[layer], request.cached_length
            if not request.plan.layers[layer].is_full or request.plan.chunk_tokens:
                slot = length % (len(table) * self.size)
                self.memory[table[slot // self.size]][slot % self.size] = NOTHING
                continue
            tokens = request.prompt_ids + [index % 2 for index in range(request.params.max_tokens)]
            self.write(layer, table, tokens[:length], length - 1)
            self.read(layer, table, tokens[:length])
        for chunk in plan.prefill:
            self.prefill(layer, chunk)

    def prefill(self, layer, chunk):
        if chunk.request.plan.chunk_tokens:
            assert chunk.request.num_cached == 0
            for block in chunk.request.tables.prompt_blocks(layer):
                self.memory[block] = [NOTHING] * self.size
            return
        tables, is_full = chunk.request.tables, chunk.request.plan.layers[layer].is_full
        tokens = chunk.request.prompt_ids[: chunk.start + chunk.length]
        is_whole = chunk.start == 0 and chunk.is_last
        if is_full or not is_whole or tables.staging[layer]:
            table = tables.blocks[layer] if is_full else tables.staging[layer] or tables.blocks[layer]
            self.write(layer, table, tokens, chunk.start)
            self.read(layer, table, tokens)
        if chunk.is_last and not is_full:
            for block in tables.blocks[layer]:
                self.memory[block] = [NOTHING] * self.size

    def write(self, layer, table, tokens, start):
        for place in range(start, len(tokens)):
            self.memory[table[place // self.size]][place % self.size] = (layer, tuple(tokens[: place + 1]))

    def read(self, layer, table, tokens):
        for place in range(len(tokens)):
            assert self.memory[table[place // self.size]][place % self.size] == (layer, tuple(tokens[: place + 1]))

    # --- the laws -------------------------------------------------------------------------------------------------

    def check(self):
        pool = self.pool
        held = Counter(
            block for r in self.scheduler.running for table in r.tables.blocks + r.tables.staging for block in table
        )
        if not isinstance(pool, PrefixCache):
            return
        # From the least to the most recently used.
        entries = [(key, pool._entries[key]) for key in pool._by_use.values()]
        entries = [(key, (number, pool._rows[row].tolist())) for key, (number, row) in entries]
        assert list(pool._by_use) == [number for _, (number, _) in entries] and len(entries) == len(pool._entries)
        rows = [row for _, row in pool._entries.values()] + pool._free_rows
        assert sorted(rows) == list(range(len(pool._rows)))
        cached = Counter(block for _, (_, blocks) in entries for block in blocks)
        assert max(cached.values(), default=1) == 1
        assert {block: (n // 2, n % 2) for block, n in enumerate(pool._state) if n} == {
            block: (held[block], cached[block]) for block in held | cached
        }
        assert pool.num_free == pool.num_usable - len(held)
        assert set(pool._free) == set(range(1, pool.num_blocks)) - set(held) - set(cached)
        known = {0: ()}
        for (parent, piece), (number, blocks) in reversed(entries):  # whoever continues a prefix is older than it
            before = known[parent]
            known[number] = tokens = before + piece
            for layer, block in enumerate(blocks):
                expected = [(layer, tokens[: len(before) + i + 1]) for i in range(self.size)]
                assert self.memory[block] == expected

    def drain(self):
        for _ in range(2000):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.live
        assert self.pool.num_free == self.pool.num_usable
        self.scheduler.forget_prefixes()
        assert len(self.pool._free) == self.pool.num_usable


def of_caches(size):
    return lambda num_blocks: PrefixCache(num_blocks, size)


def play(world, rng, num_requests, one):
    """Requests at random times, some of them aborted."""
    for _ in range(num_requests):
        one(world, rng)
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            world.step()
        if world.live and rng.random() < 0.1:
            world.abort(rng.choice(world.live))
    world.drain()


def common_prefix(world, rng):
    """Prompts of a few documents, and now and then the conversation that a finished one would go on with."""
    document = [(rng.randrange(3) >> (i % 2)) % 2 for i in range(30)] if rng.random() < 0.2 else [1, 0] * 15
    prompt = document[: rng.randrange(1, 30)] + [rng.randrange(2) for _ in range(rng.randrange(8))]
    world.add(rng.choice(PLANS), prompt, rng.randrange(1, 12), rng.choice([1, 1, 3, 6, None]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(40, 140),
    size=st.integers(1, 4),
    chunk=st.sampled_from([None, 5, 11]),
    lag=st.integers(0, 1),
)
def test_shared_blocks_hold_what_every_reader_expects(seed, num_blocks, size, chunk, lag):
    world = World(of_caches(size), num_blocks, size, lag, chunk)
    play(world, Random(seed), 25, common_prefix)


def test_the_world_above_takes_every_way():
    events, evicted = Counter(), 0
    for seed in range(12):
        world = World(of_caches(2), 70, 2, 1, [None, 7][seed % 2])
        play(world, Random(seed), 60, common_prefix)
        events += world.events
        evicted += world.pool.num_evicted
    assert events["hits"] >= 150
    assert events["preempted"] >= 20
    assert evicted >= 500


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(40, 140),
    size=st.integers(1, 4),
    chunk=st.sampled_from([None, 5, 11]),
)
def test_what_is_cached_changes_no_decision_about_requests_that_share_nothing(seed, num_blocks, size, chunk):
    """The same steps with a cache that is written all the time and never read as with none."""
    plans = []
    for pool_of in (of_caches(size), BlockPool):
        world, rng, steps = World(pool_of, num_blocks, size, 1, chunk), Random(seed), []
        for _ in range(25):
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 34))]
            world.add(rng.choice(PLANS), prompt, rng.randrange(1, 12), None)
            steps += [world.step() for _ in range(rng.choice([0, 0, 1, 2, 5]))]
        world.drain()
        plans.append([shown(step) for step in steps])
    assert plans[0] == plans[1]


def shown(plan):
    return (
        [r.request_id for r in plan.decode],
        [(c.request.request_id, c.start, c.length) for c in plan.prefill],
        [r.request_id for r in plan.preempted],
    )


def test_a_hit_for_which_there_is_no_room_begins_without_the_prefix():
    # A whole prompt of 20 needs 10 blocks in the full layer and 3 in each other; with staging 20 more.
    world = World(of_caches(2), 40, 2)
    plan, prompt = PLANS[1], [0] * 20
    first = world.add(plan, prompt, 2, 3)
    for _ in range(4):
        world.step()
    assert first.is_finished and world.pool.num_cached == 30
    blocker = world.add(plan, [1] * 20, 4, None)
    world.step()
    second = world.add(plan, prompt, 2, 3)
    (chunk,) = world.step().prefill
    assert (chunk.request, chunk.start, second.num_cached) == (second, 0, 0)
    assert blocker.status is RequestStatus.RUNNING
    world.drain()


def test_prefixes_are_not_forgotten_while_requests_run():
    world = World(of_caches(2), 40, 2)
    world.add(PLANS[0], [0] * 9, 2, 1)
    with pytest.raises(RequestError, match="while requests are running"):
        world.scheduler.forget_prefixes()
    world.drain()
