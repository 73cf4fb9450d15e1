"""Laws of the scheduler and its pool, watched from outside by a world that runs what they plan.

The world delivers tokens one step late, as the engine does; it keeps its own copy of every block table, made of nothing
but plans, and its own arithmetic of what a layer must hold.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.request import FinishReason, Request, RequestStatus
from hf_sparsekv.engine.scheduler import PrefillChunk, Scheduler, StepPlan
from hf_sparsekv.errors import RequestError
from hf_sparsekv.plan import LayerPlan, LayerSpec, ModelShape

FULL, WAITING, PREFILL, RUNNING = None, RequestStatus.WAITING, RequestStatus.PREFILL, RequestStatus.RUNNING


@dataclass(frozen=True)
class Params:
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    chunk: int | None
    max_model_len: int
    lag: int
    """Steps by which tokens reach the host late: 0 or 1."""


def layer_plan(budgets: list[int | float | None], grows: bool = False, chunk: int | None = None) -> LayerPlan:
    shape = ModelShape(num_layers=len(budgets), num_heads=2, num_kv_heads=1, head_dim=8)
    layers = [LayerSpec(layer_idx=i, is_full=b is FULL, budget=b, num_protected=3) for i, b in enumerate(budgets)]
    return LayerPlan(shape=shape, layers=tuple(layers), grows=grows, chunk_tokens=chunk)


PLANS = [
    layer_plan([FULL, FULL, FULL]),
    layer_plan([FULL, 6, 6]),
    layer_plan([FULL, FULL, 4, 9]),
    layer_plan([5, 12, 7]),
    layer_plan([0.25, FULL, 0.5]),
    layer_plan([FULL, 6, 0.4], grows=True),
    layer_plan([3, 3, 3], grows=True),
    layer_plan([FULL, 6, 9], chunk=5),
    layer_plan([4, 12], chunk=7),
    layer_plan([FULL, 6, 11], grows=True, chunk=8),
    # No model mixes numbers of layers. But these need more at once than one victim has to give.
    layer_plan([4]),
    layer_plan([FULL] * 5),
]


def blocks_needed(request: Request, layer: int, length: int, block_size: int) -> int:
    """By the words of the design: what one layer needs to have seen `length` tokens, the prompt among them."""
    spec, prompt = request.plan.layers[layer], len(request.prompt_ids)
    if spec.is_full:
        return ceil(length / block_size)
    kept = spec.kept_tokens(prompt)
    slots = min(prompt, kept) + length - prompt if request.plan.grows else min(kept, prompt + request.params.max_tokens)
    return ceil(slots / block_size)


def staging_needed(request: Request, layer: int, block_size: int) -> int:
    spec, prompt, chunk = request.plan.layers[layer], len(request.prompt_ids), request.plan.chunk_tokens
    if spec.is_full or spec.kept_tokens(prompt) >= prompt:
        return 0
    most = kept = 0
    if chunk is None:
        return ceil(prompt / block_size)
    for start in range(0, prompt, chunk):
        held = kept + min(chunk, prompt - start)
        most, kept = max(most, held), min(held, spec.kept_tokens(prompt))
    begins_with = min(prompt + 1, prompt + request.params.max_tokens - 1)
    return max(0, ceil(most / block_size) - blocks_needed(request, layer, begins_with, block_size))


def piece_limit(request: Request, chunk_limit: int) -> int:
    return min(chunk_limit, request.plan.chunk_tokens or chunk_limit)


def peak(request: Request, staged: bool, block_size: int) -> int:
    """Blocks at the worst moment of a request, alone."""
    layers, prompt = range(len(request.plan.layers)), len(request.prompt_ids)
    last = prompt + request.params.max_tokens - 1
    begin = sum(blocks_needed(request, i, min(prompt + 1, last), block_size) for i in layers)
    if staged:
        begin += sum(staging_needed(request, i, block_size) for i in layers)
    return max(begin, sum(blocks_needed(request, i, last, block_size) for i in layers))


class World:
    """An engine without a model, and a referee."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.size = limits, limits.block_size
        self.pool = BlockPool(limits.num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_batch_tokens=limits.max_batch_tokens,
            prefill_chunk_tokens=limits.chunk,
            max_model_len=limits.max_model_len,
        )
        self.chunk_limit = min(limits.chunk or limits.max_batch_tokens, limits.max_batch_tokens)
        self.live: list[Request] = []  # in order of arrival
        self.added: list[Request] = []
        self.ended: Counter[Request] = Counter()
        self.stop_at: dict[Request, int] = {}
        self.deadline: dict[Request, int] = {}
        self.device_tables: dict[Request, list[list[int]]] = {}
        self.in_flight: deque[list[tuple[Request, int]]] = deque()
        self.num_steps = 0
        self.events: Counter[str] = Counter()

    # --- what users do --------------------------------------------------------------------------------------------

    def add(self, plan: LayerPlan, prompt: int, max_tokens: int, stop_at: int) -> None:
        name = str(len(self.added) + self.events["refused"])
        request = Request(request_id=name, prompt_ids=[7] * prompt, params=Params(max_tokens), plan=plan)
        fits = prompt >= 1 and prompt + max_tokens <= self.limits.max_model_len
        is_staged = prompt > piece_limit(request, self.chunk_limit)
        if not fits or peak(request, is_staged, self.size) > self.limits.num_blocks - 1:
            with pytest.raises(RequestError):
                self.scheduler.add(request)
            self.events["refused"] += 1
            return
        self.scheduler.add(request)
        self.added.append(request)
        self.live.append(request)
        self.stop_at[request] = stop_at
        # The oldest takes part in every step, with a token at least; then its tokens must come home.
        self.deadline[request] = self.num_steps + sum(
            len(r.prompt_ids) + r.params.max_tokens + self.limits.lag + 2 for r in self.live
        )

    def abort(self, request: Request) -> None:
        self.events[f"aborted while {request.status}"] += 1
        assert self.scheduler.abort(request.request_id) is request
        assert self.scheduler.abort(request.request_id) is None
        self._gone(request)

    def _gone(self, request: Request) -> None:
        assert request.is_finished and request.tables is None
        self.live.remove(request)
        self.device_tables.pop(request, None)
        self.ended[request] += 1

    # --- one step of the engine -----------------------------------------------------------------------------------

    def step(self) -> StepPlan:
        before = {r: (r.status, r.num_computed, r.num_scheduled_outputs) for r in self.live}
        plan = self.scheduler.schedule()
        self.check_decode(plan, before)
        self.check_prefill(plan, before)
        self.check_head(plan)
        self.in_flight.append(self.launch(plan))
        self.num_steps += 1
        self.events["preempted"] += len(plan.preempted)
        while len(self.in_flight) > self.limits.lag:
            self.deliver(self.in_flight.popleft())
        return plan

    def launch(self, plan: StepPlan) -> list[tuple[Request, int]]:
        """Update the device's tables, look at every block that is read or written, and sample."""
        for request in plan.preempted:
            self.device_tables.pop(request)
        for chunk in plan.prefill:
            if chunk.start == 0:
                self.device_tables[chunk.request] = [list(table) for table in chunk.request.tables.blocks]
        for request, layer, index, block in plan.grown:
            assert request in plan.decode and index == len(self.device_tables[request][layer])
            self.device_tables[request][layer].append(block)
        for request in plan.decode:
            length = len(request.prompt_ids) + request.num_scheduled_outputs - 1
            assert length == request.cached_length
            tables = self.device_tables[request]
            assert tables == request.tables.blocks
            for layer, table in enumerate(tables):
                assert len(table) >= blocks_needed(request, layer, length, self.size)
        last = [chunk.request for chunk in plan.prefill if chunk.is_last]
        self.events["replayed"] += sum(r.is_replaying for r in plan.decode + last)
        return [(r, r.num_scheduled_outputs - 1) for r in plan.decode + last if not r.is_replaying]

    def deliver(self, sampled: list[tuple[Request, int]]) -> None:
        for request, index in sampled:
            if request.is_finished:
                self.events["late token dropped"] += 1
                continue
            assert index == len(request.output_ids)  # each output is sampled once, in order
            request.output_ids.append(index)
            count = len(request.output_ids)
            assert count <= request.params.max_tokens
            if count in (self.stop_at[request], request.params.max_tokens):
                reason = FinishReason.STOP if count == self.stop_at[request] else FinishReason.LENGTH
                self.events[f"ended while {request.status}"] += 1
                self.scheduler.finish(request, reason)
                self._gone(request)

    def drain(self) -> None:
        while self.scheduler.has_unfinished:
            self.step()
            self.check()
        assert not self.live and self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.pool.num_free == self.pool.num_usable == self.limits.num_blocks - 1
        assert set(self.ended) == set(self.added) and set(self.ended.values()) <= {1}

    # --- the laws of a plan ---------------------------------------------------------------------------------------

    def check_decode(self, plan: StepPlan, before: dict[Request, tuple[RequestStatus, int, int]]) -> None:
        ready = [r for r, (status, _, n) in before.items() if status is RUNNING and n < r.params.max_tokens]
        assert plan.decode == [r for r in ready if r not in plan.preempted]
        assert all(r.num_scheduled_outputs == before[r][2] + 1 for r in plan.decode)
        assert all(before[r][0] in (RUNNING, PREFILL) for r in plan.preempted)
        for request in plan.preempted:
            assert (request.status, request.num_computed, request.num_scheduled_outputs) == (WAITING, 0, 0)
        oldest = self.live[0] if self.live else None
        if oldest and before[oldest][2] < oldest.params.max_tokens:
            assert oldest in plan.decode or oldest in [chunk.request for chunk in plan.prefill]

    def check_prefill(self, plan: StepPlan, before: dict[Request, tuple[RequestStatus, int, int]]) -> None:
        assert plan.num_tokens == len(plan.decode) + sum(c.length for c in plan.prefill)
        assert plan.num_tokens <= self.limits.max_batch_tokens
        assert sum(r.status is PREFILL for r in self.live) <= 1
        admitted = [c.request for c in plan.prefill if c.start == 0]
        assert not (plan.preempted and admitted)
        assert [r for r in before if before[r][0] is PREFILL and r not in plan.preempted] == [
            c.request for c in plan.prefill if c.start > 0
        ]
        left = self.limits.max_batch_tokens - len(plan.decode)
        for chunk in plan.prefill:
            self.check_chunk(chunk, before[chunk.request][1])
            if chunk.start == 0 and not chunk.is_last:
                self.events["cut"] += 1
                assert all(c.is_last for c in plan.prefill if c is not chunk)
                if len(chunk.request.prompt_ids) <= piece_limit(chunk.request, self.chunk_limit):
                    self.events["cut for decoding"] += 1
                    assert chunk is plan.prefill[0] and chunk.length == left
            left -= chunk.length

    def check_chunk(self, chunk: PrefillChunk, num_computed: int) -> None:
        request, prompt = chunk.request, len(chunk.request.prompt_ids)
        assert chunk.start == num_computed and 1 <= chunk.length <= self.chunk_limit
        assert chunk.is_last == (chunk.start + chunk.length == prompt)
        if step := request.plan.chunk_tokens:  # no piece reaches over a selection
            assert chunk.start // step == (chunk.start + chunk.length - 1) // step
            self.events["cut a chunk"] += (chunk.start + chunk.length) % step > 0 and not chunk.is_last
        assert (request.status, request.num_scheduled_outputs) == ((RUNNING, 1) if chunk.is_last else (PREFILL, 0))
        is_staged = chunk.start > 0 or not chunk.is_last
        for layer in range(len(request.plan.layers)):
            assert len(request.tables.blocks[layer]) >= blocks_needed(request, layer, prompt, self.size)
            expected = staging_needed(request, layer, self.size) if is_staged else 0
            assert len(request.tables.staging[layer]) == expected

    def check_head(self, plan: StepPlan) -> None:
        """Those admitted are the oldest, in order; the queue's head stays out only for a reason."""
        count = len(self.scheduler.running)
        assert self.scheduler.running == self.live[:count]
        assert all(r.status is WAITING for r in self.live[count:])
        left = self.limits.max_batch_tokens - plan.num_tokens
        if count == len(self.live) or plan.preempted or count == self.limits.max_num_seqs or left == 0:
            return
        head = self.live[count]
        prompt = len(head.prompt_ids)
        if prompt > piece_limit(head, self.chunk_limit):
            may_begin, staged = all(c.is_last for c in plan.prefill), True
        else:
            may_begin, staged = prompt <= left or not plan.prefill, prompt > left
        assert not may_begin or peak(head, staged, self.size) > self.pool.num_free

    def check(self) -> None:
        """What holds between steps."""
        held = [r.tables for r in self.scheduler.running]
        owned = [b for t in held for table in t.blocks + t.staging for b in table]
        assert len(set(owned)) == len(owned) == self.pool.num_usable - self.pool.num_free
        assert all(1 <= block <= self.pool.num_usable for block in owned)
        assert all(r.tables is None for r in self.live[len(held) :])
        assert len(held) <= self.limits.max_num_seqs
        assert len(held) + self.scheduler.num_waiting == len(self.live)
        assert all(self.num_steps <= self.deadline[r] for r in self.live)


# --- worlds drawn by hypothesis ---------------------------------------------------------------------------------------


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps and aborts."""

    @initialize(
        num_blocks=st.integers(8, 60),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        spare_tokens=st.integers(0, 20),
        chunk=st.none() | st.integers(1, 12),
        lag=st.integers(0, 1),
    )
    def begin(self, num_blocks, block_size, max_num_seqs, spare_tokens, chunk, lag):
        tokens = max_num_seqs + spare_tokens
        self.world = World(
            Limits(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=tokens,
                chunk=chunk,
                max_model_len=40,
                lag=lag,
            )
        )

    @rule(
        plan=st.sampled_from(PLANS),
        prompt=st.integers(0, 30),
        max_tokens=st.integers(1, 12),
        stop_at=st.integers(1, 20),
    )
    def arrive(self, plan, prompt, max_tokens, stop_at):
        self.world.add(plan, prompt, max_tokens, stop_at)

    @rule(times=st.integers(1, 4))
    def advance(self, times):
        for _ in range(times):
            self.world.step()
            self.world.check()

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 100))
    def abort(self, which):
        self.world.abort(self.world.live[which % len(self.world.live)])

    @invariant()
    def books_are_right(self):
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40, derandomize=True)


# --- 10,000 requests --------------------------------------------------------------------------------------------------


def random_limits(random: Random) -> Limits:
    seqs = random.randint(2, 12)
    chunk = random.choice([None, random.randint(1, 6), random.randint(7, 40)])
    return Limits(
        num_blocks=random.randint(40, 140),
        block_size=random.randint(1, 6),
        max_num_seqs=seqs,
        max_batch_tokens=seqs + random.randint(0, 60),
        chunk=chunk,
        max_model_len=random.randint(40, 64),
        lag=random.randint(0, 1),
    )


def simulate(seed: int, num_requests: int) -> Counter[str]:
    """A world in which requests arrive in bursts; what happened in it, by name."""
    random = Random(seed)
    world = World(random_limits(random))
    draw: Callable[[int, int], int] = random.randint
    while len(world.added) < num_requests:
        burst = draw(1, 8) if random.random() < 0.3 and len(world.live) < 40 else 0
        for _ in range(min(burst, num_requests - len(world.added))):
            prompt = draw(0, 66) if random.random() < 0.05 else draw(1, 40)
            world.add(random.choice(PLANS), prompt, draw(1, 16), draw(1, 30))
        if world.live and random.random() < 0.04:
            world.abort(random.choice(world.live))
        world.step()
        world.check()
    world.drain()
    return world.events


def test_ten_thousand_random_requests_end_once_each_and_leave_nothing_behind():
    events = sum((simulate(seed, num_requests=500) for seed in range(20)), Counter[str]())
    names = ("preempted", "replayed", "refused", "cut", "cut a chunk", "cut for decoding", "late token dropped")
    for happened in names:
        assert events[happened] >= 20, f"{happened}: the worlds are too quiet: {events}"
    for status in (WAITING, PREFILL, RUNNING):
        assert events[f"aborted while {status}"] >= 20, events
    assert events[f"ended while {WAITING}"] >= 1, events  # its last token came after it had been preempted
