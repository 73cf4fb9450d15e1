"""Scheduler: who runs in the next step, with which blocks. It needs no sampled token to have arrived.

Requests are served in the order they came. Those admitted are always the oldest of all that are live, in order: the
queue's head goes in first, and a preemption sends the newest back to the queue's head. So the oldest request takes part
in every step until all its outputs are scheduled, and each request ends after a bounded number of steps.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.prefix_cache import Prefix
from hf_sparsekv.engine.prefix_reuse import PrefixReuse
from hf_sparsekv.engine.request import FinishReason, Request, RequestStatus
from hf_sparsekv.engine.tables import RequestTables
from hf_sparsekv.errors import RequestError


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens `[start, start + length)` of a request, to be computed in one step.

    In a bounded prefill, no piece reaches over the end of a chunk of the plan: selection does not depend on the batch.
    """

    request: Request
    start: int
    length: int
    is_last: bool


class GrownBlock(NamedTuple):
    """A new entry of a block table."""

    request: Request
    layer: int
    table_index: int
    """Place in the layer's table."""
    block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes. Requests are as they will be after it: read it before the next `schedule`."""

    decode: list[Request] = field(default_factory=list)
    """Requests with one token each, oldest first; the token's place is `cached_length - 1`."""
    prefill: list[PrefillChunk] = field(default_factory=list)
    """Chunks, in order of admission; those of `admitted` have all their tables."""
    admitted: list[Request] = field(default_factory=list)
    """Requests whose first chunk is among `prefill`; it starts behind what the prefix cache had of the prompt."""
    grown: list[GrownBlock] = field(default_factory=list)
    """What changed in the tables of `decode`."""
    preempted: list[Request] = field(default_factory=list)
    """Requests that gave everything back, newest first; none is admitted in the same step."""

    @property
    def num_prompt_tokens(self) -> int:
        """Rows of the forward pass that are prompts."""
        return sum(chunk.length for chunk in self.prefill)

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return len(self.decode) + self.num_prompt_tokens

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decode and not self.prefill


class _WayIn(NamedTuple):
    """How a request begins."""

    prefix: Prefix
    tables: RequestTables
    length: int
    """Of its first chunk."""
    is_staged: bool


class Scheduler:
    """Continuous batching over one block pool.

    At most one step may be in flight: before `schedule` is called for step n + 2, the tokens of step n are in
    `output_ids`, and requests that ended with them are finished. A preempted request then knows all it had sampled.

    Args:
        pool: the blocks that all requests share; a `PrefixCache` to compute shared beginnings of prompts once.
        block_size: tokens of a block.
        max_num_seqs: requests that run at a time; at most `max_batch_tokens`, so that each gets its token.
        max_batch_tokens: rows of a forward pass.
        prefill_chunk_tokens: the most prompt tokens of one request in a step. Default: `max_batch_tokens`.
        prefill_target_tokens: a step that has as many prompt tokens admits no further prompt. Default: no such bound.
        reserve_output_tokens: tokens of coming output for which admission leaves blocks to every request that runs.
        max_model_len: the most tokens of prompt and output together.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        prefill_chunk_tokens: int | None = None,
        prefill_target_tokens: int | None = None,
        reserve_output_tokens: int = 0,
        max_model_len: int,
    ) -> None:
        self.chunk_limit = max_batch_tokens if prefill_chunk_tokens is None else prefill_chunk_tokens
        self.chunk_limit = min(self.chunk_limit, max_batch_tokens)
        assert min(block_size, max_num_seqs, self.chunk_limit, max_model_len) >= 1, "limits are positive"
        assert max_num_seqs <= max_batch_tokens, "each running request has its token in every step"
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.prefill_target_tokens = max_batch_tokens if prefill_target_tokens is None else prefill_target_tokens
        self.reserve_output_tokens = reserve_output_tokens
        self.max_model_len = max_model_len
        self.running: list[Request] = []
        """Admitted requests, in PREFILL or RUNNING, oldest first."""
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._live: dict[str, Request] = {}
        self._prompts_done: list[Request] = []
        self._prefixes = PrefixReuse(pool)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    # --- coming and going -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises:
            RequestError: the prompt is empty, nothing is to be generated, the id is taken by a live request, or it is
                too long for the model or for the pool even if it were alone.
        """
        name, prompt, new = request.request_id, request.prompt_length, request.params.max_tokens
        if name in self._live or request.status is not RequestStatus.WAITING:
            raise RequestError(f"request {name!r} is known already: give each request an id and an object of its own")
        if prompt < 1:
            raise RequestError(f"request {name!r} has an empty prompt: give at least 1 token")
        if new < 1:
            raise RequestError(f"request {name!r} has max_tokens={new}: ask for at least 1")
        if request.max_length > self.max_model_len:
            raise RequestError(
                f"request {name!r} has {prompt} prompt tokens and max_tokens={new}, {request.max_length} together, but "
                f"the engine serves at most {self.max_model_len} (max_model_len, or the longest prompt that its memory "
                "holds): shorten the prompt, lower max_tokens, raise max_model_len if set, or give more KV memory"
            )
        self._check_fits(request)
        self._live[name] = self._waiting[name] = request

    def _check_fits(self, request: Request) -> None:
        name, prompt, new = request.request_id, request.prompt_length, request.params.max_tokens
        tables, usable, limit = self._tables_of(request), self.pool.num_usable, self._piece_limit(request)
        whole = _peak_demand(request, tables, staged=False)
        if whole > usable:
            raise RequestError(
                f"request {name!r} needs {whole} blocks ({prompt} prompt tokens, max_tokens={new}), but the pool has "
                f"{usable}: shorten the prompt, lower max_tokens or the budget, or give more KV memory"
            )
        needed = _peak_demand(request, tables, staged=prompt > limit)
        if needed > usable:
            chunk = request.plan.chunk_tokens
            remedy = (
                f"lower the configuration's prefill_chunk_tokens={chunk} or the budget"
                if chunk
                else f"raise max_batch_tokens, and prefill_chunk_tokens if set, to {prompt}, shorten the prompt"
            )
            raise RequestError(
                f"request {name!r} needs {needed} blocks to stage its {prompt} prompt tokens, computed in chunks of at "
                f"most {limit} ({whole} blocks in one piece), but the pool has {usable}: {remedy} or give more "
                "KV memory"
            )

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a live request in whatever state it is and give its blocks back.

        Raises:
            RequestError: it has ended before, or was never added; nothing changes.
        """
        if self._live.get(request.request_id) is not request:
            state = "has ended already" if request.is_finished else "was never added"
            raise RequestError(f"cannot finish request {request.request_id!r}: it {state}; a request ends once")
        if request.status is RequestStatus.WAITING:
            del self._waiting[request.request_id]
            self._prefixes.forget(request)
        else:
            self.running.remove(request)
        del self._live[request.request_id]
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._prefixes.store_conversation(request)
        self._release(request)
        request.status, request.finish_reason, request.error = RequestStatus.FINISHED, reason, error

    def abort(self, request_id: str) -> Request | None:
        """End a request for its caller; the request, or None if no live one has this id."""
        request = self._live.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, if there is one.

        Raises:
            RequestError: requests are live: what they compute may enter the cache later.
        """
        if self.has_unfinished:
            raise RequestError("cannot forget prefixes while requests are running: let them end, or abort them")
        self._prefixes.clear()

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next forward pass, and account for it as if it had run.

        Running requests get their tokens first; what is left of `max_batch_tokens` goes to the prompt that is between
        two chunks, then to the queue's head, again and again. Where the head cannot go in, nobody behind it does.
        """
        plan = StepPlan()
        # The chunks that read these blocks were launched before anything that will write to them.
        for request in self._prompts_done:
            if request.tables is not None:
                self._prefixes.store_prompt(request)
                request.tables.release_staging(self.pool)
        self._prompts_done.clear()
        self._decode(plan)
        self._continue_prompts(plan)
        if not plan.preempted:
            self._admit(plan)
            self._prefixes.stage_to_store([c.request for c in plan.prefill if c.start == 0 and c.is_last])
        return plan

    def _decode(self, plan: StepPlan) -> None:
        for request in tuple(self.running):
            # A victim of an older request is WAITING by now.
            if request.status is not RequestStatus.RUNNING or request.is_fully_scheduled:
                continue
            length = request.cached_length + 1
            assert request.tables is not None
            if request.tables.growth(length) > 0:  # once in many steps
                if not self._make_room(request, length, plan):
                    continue
                plan.grown.extend(GrownBlock(request, *entry) for entry in request.tables.grow(self.pool, length))
            request.num_scheduled_outputs += 1
            plan.decode.append(request)

    def _make_room(self, request: Request, length: int, plan: StepPlan) -> bool:
        """Preempt the newest until the request can grow to `length`; False if it had to go itself."""
        assert request.tables is not None
        while request.tables.growth(length) > self.pool.num_free:
            victim = self.running.pop()
            self._release(victim)
            victim.status = RequestStatus.WAITING
            victim.num_computed = victim.num_scheduled_outputs = 0
            victim.num_preemptions += 1
            self._waiting[victim.request_id] = victim
            self._waiting.move_to_end(victim.request_id, last=False)
            plan.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _continue_prompts(self, plan: StepPlan) -> None:
        for request in self.running:
            if request.status is RequestStatus.PREFILL:
                left = self.max_batch_tokens - plan.num_tokens
                done, chunk = request.num_computed, request.plan.chunk_tokens
                to_selection = left if chunk is None else chunk - done % chunk
                length = min(request.prompt_length - done, self.chunk_limit, left, to_selection)
                self._add_chunk(plan, request, length)

    def _admit(self, plan: StepPlan) -> None:
        left = self.max_batch_tokens - plan.num_tokens
        if not self._waiting:
            return
        reserved = sum(map(self._coming_blocks, self.running))
        while self._waiting and left > 0 and len(self.running) < self.max_num_seqs:
            if plan.num_prompt_tokens >= self.prefill_target_tokens:
                return  # the device is busy enough: more would only make every request of the step wait
            request = next(iter(self._waiting.values()))
            way = self._way_in(request, left, plan, self.pool.num_free - reserved)
            if way is None:
                return
            self._prefixes.begin(request, way.tables, way.prefix)
            way.tables.allocate(self.pool, _admission_length(request), way.is_staged)
            del self._waiting[request.request_id]
            request.tables, request.status = way.tables, RequestStatus.PREFILL
            self.running.append(request)
            plan.admitted.append(request)
            self._add_chunk(plan, request, way.length)
            left -= way.length
            reserved += self._coming_blocks(request)

    def _way_in(self, request: Request, left: int, plan: StepPlan, num_free: int) -> _WayIn | None:
        """How the queue's head can begin, from the longest known prefix if there is room for it; None to let it wait.

        Without a prefix a prompt may take fewer blocks: then what the cache holds never keeps a request out.
        """
        for prefix in self._prefixes.offers(request):
            known = len(prefix) * self.block_size
            length = self._first_chunk_length(request, known, left, plan)
            if length == 0:
                return None
            tables = self._tables_of(request, stages_all=bool(prefix))
            is_staged = length < request.prompt_length
            shared = self._prefixes.num_shared(tables, prefix)
            if _peak_demand(request, tables, staged=is_staged, shared=shared) <= num_free:
                return _WayIn(prefix, tables, length, is_staged)
        return None

    def _coming_blocks(self, request: Request) -> int:
        """Blocks that an admitted request will take for the output that is reserved for it."""
        if self.reserve_output_tokens == 0 or request.tables is None:
            return 0
        now = max(request.cached_length, _admission_length(request))
        then = min(now + self.reserve_output_tokens, request.final_length)
        return request.tables.demand(then, staged=False) - request.tables.demand(now, staged=False)

    def _first_chunk_length(self, request: Request, known: int, left: int, plan: StepPlan) -> int:
        """Tokens to begin a prompt with behind `known` ones, when `left` fit the step; 0 to let it wait."""
        limit, wanted = self._piece_limit(request), request.prompt_length - known
        if wanted <= limit:
            if wanted <= left:
                return wanted
            # Behind other prompts, it goes whole in the next step. If decoding alone leaves too little, waiting may
            # not help for long: begin.
            return 0 if plan.prefill else left
        is_one_between_chunks = any(not chunk.is_last for chunk in plan.prefill)
        return 0 if is_one_between_chunks else min(limit, left)

    def _piece_limit(self, request: Request) -> int:
        """The most tokens of a prompt in one step."""
        chunk = request.plan.chunk_tokens
        return self.chunk_limit if chunk is None else min(self.chunk_limit, chunk)

    def _add_chunk(self, plan: StepPlan, request: Request, length: int) -> None:
        start = request.num_computed
        request.num_computed += length
        is_last = request.num_computed == request.prompt_length
        plan.prefill.append(PrefillChunk(request, start, length, is_last))
        if is_last:
            request.num_scheduled_outputs, request.status = 1, RequestStatus.RUNNING
            self._prompts_done.append(request)

    def _tables_of(self, request: Request, *, stages_all: bool = False) -> RequestTables:
        lengths = request.prompt_length, request.max_length
        return RequestTables(request.plan, *lengths, self.block_size, stages_all=stages_all)

    def _release(self, request: Request) -> None:
        if request.tables is not None:
            request.tables.release(self.pool)
            request.tables = None


def _admission_length(request: Request) -> int:
    """Tokens that a request's first tables hold: its prompt and the first output, if that is ever fed."""
    return min(request.prompt_length + 1, request.final_length)


def _peak_demand(request: Request, tables: RequestTables, *, staged: bool, shared: tuple[int, int] = (0, 0)) -> int:
    """Blocks that a request takes at its worst moment: in its prompt with staging, or at its end without.

    Of a prefix, `shared` blocks are held by others at the one moment and at the other.
    """
    begin = tables.demand(_admission_length(request), staged) - shared[0]
    return max(begin, tables.demand(request.final_length, staged=False) - shared[1])
