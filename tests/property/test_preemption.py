"""Preempted and resumed is uninterrupted: a memory of blocks, whose content decides what comes next.

A stand-in for the model writes each token that it is fed into the block tables that the scheduler planned, and samples
a hash of everything it reads back from there. So a block that is given away too early, a token that is fed twice, in
the wrong place or not at all, and a table that lags behind change the output.
"""

from collections import Counter, deque
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.request import FinishReason, Request
from hf_sparsekv.engine.scheduler import PrefillChunk, Scheduler, StepPlan
from hf_sparsekv.engine.tables import RequestTables
from hf_sparsekv.plan import LayerPlan, LayerSpec, ModelShape

FULL = None
ROOMY_BLOCKS = 4000
MAX_LENGTH = 80


@dataclass(frozen=True)
class Params:
    max_tokens: int


def layer_plan(budgets: list[int | float | None], grows: bool = False) -> LayerPlan:
    shape = ModelShape(num_layers=len(budgets), num_heads=2, num_kv_heads=1, head_dim=8)
    layers = [LayerSpec(layer_idx=i, is_full=b is FULL, budget=b, num_protected=3) for i, b in enumerate(budgets)]
    return LayerPlan(shape=shape, layers=tuple(layers), grows=grows)


PLANS = {
    "dense": layer_plan([FULL, FULL, FULL]),
    "replace": layer_plan([FULL, 6, 9]),
    "grow": layer_plan([FULL, 6, 0.4], grows=True),
    "grow all": layer_plan([5, 5, 0.5], grows=True),
}


class Memory:
    """What the blocks hold: (position, token) by (block, offset)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}

    def put(self, table: list[int], slot: int, entry: tuple[int, int]) -> None:
        self.cells[table[slot // self.size], slot % self.size] = entry

    def get(self, table: list[int], num_slots: int) -> list[tuple[int, int]]:
        return [self.cells[table[slot // self.size], slot % self.size] for slot in range(num_slots)]


class Device:
    """Feeds tokens and samples; of a request it remembers only its copy of the tables, from plans alone."""

    def __init__(self, size: int) -> None:
        self.memory = Memory(size)
        self.tables: dict[Request, list[list[int]]] = {}
        self.staging: dict[Request, list[list[int]]] = {}

    def forget(self, request: Request) -> None:
        self.tables.pop(request, None)

    def run(self, plan: StepPlan) -> list[tuple[Request, int]]:
        """(request, what is sampled) of all that sample something; as in a layer, all write before anybody reads."""
        for request, layer, index, block in plan.grown:
            assert len(self.tables[request][layer]) == index
            self.tables[request][layer].append(block)
        for request in plan.decode:
            self.write_output(request)
        for chunk in plan.prefill:
            self.write_chunk(chunk)
        ended = [chunk.request for chunk in plan.prefill if chunk.is_last]
        for request in ended:
            self.select(request)
        sampled = [(request, self.sample(request, request.cached_length)) for request in plan.decode + ended]
        return [(request, token) for request, token in sampled if not request.is_replaying]

    def write_chunk(self, chunk: PrefillChunk) -> None:
        request, tables = chunk.request, chunk.request.tables
        if chunk.start == 0:
            self.tables[request] = [list(table) for table in tables.blocks]
            self.staging[request] = [list(table) for table in tables.staging]
        for layer, table in enumerate(self.tables[request]):
            staging = self.staging[request][layer]
            if staging or self.num_kept(request, layer) == request.prompt_length:
                for position in range(chunk.start, chunk.start + chunk.length):
                    self.memory.put(staging or table, position, (position, request.prompt_ids[position]))

    def select(self, request: Request) -> None:
        """At the prompt's end: keep the last tokens of it where a layer keeps fewer than all."""
        whole = list(enumerate(request.prompt_ids))
        for layer, table in enumerate(self.tables[request]):
            staging, num_kept = self.staging[request][layer], self.num_kept(request, layer)
            if num_kept < len(whole):
                read = self.memory.get(staging, len(whole)) if staging else whole
                for slot, entry in enumerate(read[-num_kept:]):
                    self.memory.put(table, slot, entry)

    def num_kept(self, request: Request, layer: int) -> int:
        spec, prompt = request.plan.layers[layer], request.prompt_length
        return prompt if spec.is_full else min(prompt, spec.kept_tokens(prompt))

    def write_output(self, request: Request) -> None:
        """Feed the newest output, whether the host knows it or it was sampled a step ago."""
        position = request.cached_length - 1
        fed = (position, self.outputs(request)[position - request.prompt_length])
        for layer, table in enumerate(self.tables[request]):
            slots = request.tables.num_slots(layer, request.cached_length)
            is_fixed = not (request.plan.layers[layer].is_full or request.plan.grows)
            self.memory.put(table, position % slots if is_fixed else slots - 1, fed)

    def outputs(self, request: Request) -> list[int]:
        return request.output_ids + request.late

    def sample(self, request: Request, length: int) -> int:
        read = []
        for layer, table in enumerate(self.tables[request]):
            slots = min(length, request.tables.num_slots(layer, length))
            read.append(tuple(self.memory.get(table, slots)))
        return hash(tuple(read)) % 1000


def run_all(jobs, num_blocks, size, seqs, chunk, lag):
    """(outputs by request, events) once all have ended."""
    pool = BlockPool(num_blocks)
    limits = {"max_num_seqs": seqs, "max_batch_tokens": seqs + 24, "max_model_len": MAX_LENGTH}
    scheduler = Scheduler(pool, block_size=size, prefill_chunk_tokens=chunk, **limits)
    device, events, in_flight = Device(size), Counter(), deque()
    requests = []
    for number, (kind, prompt, max_tokens, stop_at) in enumerate(jobs):
        request = Request(request_id=str(number), prompt_ids=prompt, params=Params(max_tokens), plan=PLANS[kind])
        request.late, request.stop_at = [], stop_at
        scheduler.add(request)
        requests.append(request)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        for request in plan.preempted:
            device.forget(request)
            events[request] += 1
            assert request is not requests[0], "the oldest never gives way"
        sampled = device.run(plan)
        for request, token in sampled:
            request.late.append(token)
        in_flight.append(sampled)
        while len(in_flight) > lag:
            deliver(in_flight.popleft(), scheduler, device)
    assert pool.num_free == pool.num_usable
    return [request.output_ids for request in requests], events


def deliver(sampled, scheduler, device):
    for request, token in sampled:
        if request.is_finished:
            continue
        assert request.late.pop(0) == token
        request.output_ids.append(token)
        if len(request.output_ids) in (request.stop_at, request.params.max_tokens):
            scheduler.finish(request, FinishReason.STOP)
            device.forget(request)


def jobs_of(random: Random, kinds: list[str], count: int):
    return [
        (
            random.choice(kinds),
            [random.randrange(100) for _ in range(random.randint(1, 16))],
            random.randint(20, 50),
            random.choice([random.randint(10, 50), 1000, 1000]),
        )
        for _ in range(count)
    ]


def largest(jobs, size):
    """Blocks of the request that needs most, alone; staged, whether it will be or not."""
    need = 0
    for kind, prompt, max_tokens, _ in jobs:
        tables = RequestTables(PLANS[kind], len(prompt), len(prompt) + max_tokens, size)
        begin, end = tables.demand(len(prompt) + 1, staged=True), tables.demand(len(prompt) + max_tokens, staged=False)
        need = max(need, begin, end)
    return need


def check_squeezed(seed: int, kinds: list[str]) -> Counter[str]:
    """One case: the outputs of a pool that holds little more than one request are those of a large pool."""
    random = Random(seed)
    jobs, size = jobs_of(random, kinds, random.randint(4, 9)), random.randint(1, 5)
    seqs, lag = random.randint(3, 8), random.randint(0, 1)
    chunk = random.choice([None, None, random.randint(1, 12)])
    expected, quiet = run_all(jobs, ROOMY_BLOCKS, size, seqs, chunk, lag)
    assert not quiet
    num_blocks = 2 + int(largest(jobs, size) * random.uniform(1.0, 1.5))
    outputs, preempted = run_all(jobs, num_blocks, size, seqs, chunk, lag)
    assert outputs == expected
    assert expected == [run_all([job], ROOMY_BLOCKS, size, seqs, chunk, 0)[0][0] for job in jobs]
    return Counter(
        cases=1, squeezed=bool(preempted), preemptions=preempted.total(), again=sum(n > 1 for n in preempted.values())
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), kinds=st.lists(st.sampled_from(sorted(PLANS)), min_size=1, max_size=4))
def test_a_squeezed_pool_gives_what_a_large_one_gives(seed, kinds):
    check_squeezed(seed, kinds)


@pytest.mark.parametrize("kinds", [["dense"], ["grow"], ["replace"], sorted(PLANS)], ids=str)
def test_hundreds_of_cases_preempt_and_some_requests_more_than_once(kinds):
    events = sum((check_squeezed(seed, kinds) for seed in range(100)), Counter())
    assert events["squeezed"] >= 75, events
    assert events["preemptions"] >= 150, events
    assert events["again"] >= 2, events
