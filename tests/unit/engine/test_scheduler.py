"""Scheduler: exact plans of small worlds. Blocks hold 4 tokens; two full layers unless said otherwise."""

from dataclasses import dataclass

import pytest

from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.request import FinishReason, Request, RequestStatus
from hf_sparsekv.engine.scheduler import Scheduler
from hf_sparsekv.errors import RequestError
from hf_sparsekv.plan import LayerPlan, LayerSpec, ModelShape

FULL = None


@dataclass(frozen=True)
class Params:
    max_tokens: int


def request(name, prompt, max_tokens=4, budgets=(FULL, FULL)):
    shape = ModelShape(num_layers=len(budgets), num_heads=2, num_kv_heads=1, head_dim=8)
    layers = [LayerSpec(layer_idx=i, is_full=b is FULL, budget=b, num_protected=2) for i, b in enumerate(budgets)]
    plan = LayerPlan(shape=shape, layers=tuple(layers))
    return Request(request_id=name, prompt_ids=[5] * prompt, params=Params(max_tokens), plan=plan)


def scheduler(num_blocks=100, seqs=4, tokens=16, chunk=None, max_len=64):
    return Scheduler(
        BlockPool(num_blocks + 1),
        block_size=4,
        max_num_seqs=seqs,
        max_batch_tokens=tokens,
        prefill_chunk_tokens=chunk,
        max_model_len=max_len,
    )


def brief(plan):
    """Names of decoding requests, and (name, start, length) of chunks."""
    return [r.request_id for r in plan.decode], [(c.request.request_id, c.start, c.length) for c in plan.prefill]


def briefs(engine, steps):
    return [brief(engine.schedule()) for _ in range(steps)]


def test_a_request_is_prefilled_and_then_decodes_until_all_its_outputs_are_scheduled():
    engine, a = scheduler(), request("a", 7, max_tokens=3)
    engine.add(a)
    assert (a.status, engine.num_waiting, engine.num_running) == (RequestStatus.WAITING, 1, 0)
    plan = engine.schedule()
    assert brief(plan) == ([], [("a", 0, 7)]) and plan.prefill[0].is_last and plan.num_tokens == 7
    assert (a.status, a.num_computed, a.num_scheduled_outputs, a.cached_length) == (RequestStatus.RUNNING, 7, 1, 7)
    assert a.tables.blocks == [[1, 2], [3, 4]]
    plan = engine.schedule()
    assert (brief(plan), a.cached_length, plan.grown) == ((["a"], []), 8, [])
    plan = engine.schedule()
    assert (brief(plan), a.cached_length) == ((["a"], []), 9)
    assert plan.grown == [(a, 0, 2, 5), (a, 1, 2, 6)]
    assert engine.schedule().is_empty and a.is_fully_scheduled and engine.has_unfinished
    engine.finish(a, FinishReason.LENGTH)
    assert (a.status, a.finish_reason, a.tables, engine.has_unfinished) == ("finished", "length", None, False)
    assert engine.pool.num_free == 100


def test_decoding_goes_first_and_prompts_share_what_is_left():
    engine = scheduler(tokens=10)
    for name, prompt in (("a", 6), ("b", 3), ("c", 5), ("d", 2)):
        engine.add(request(name, prompt))
    # c would fit a step of its own, so it is not cut; d may not pass it.
    assert briefs(engine, 2) == [([], [("a", 0, 6), ("b", 0, 3)]), (["a", "b"], [("c", 0, 5), ("d", 0, 2)])]


def test_a_long_prompt_goes_in_chunks_and_prompts_that_fit_pass_through_its_gaps():
    engine = scheduler(tokens=10, chunk=6)
    for name, prompt in (("a", 14), ("b", 3), ("c", 7), ("d", 2)):
        engine.add(request(name, prompt))
    # c is too long for a chunk: only one prompt is between chunks at a time.
    assert briefs(engine, 4) == [
        ([], [("a", 0, 6), ("b", 0, 3)]),
        (["b"], [("a", 6, 6)]),
        (["b"], [("a", 12, 2), ("c", 0, 6)]),
        (["a", "b"], [("c", 6, 1), ("d", 0, 2)]),
    ]


def test_a_prompt_that_decoding_alone_keeps_out_is_cut():
    engine = scheduler(tokens=8, seqs=4)
    for name, prompt in (("a", 3), ("b", 3), ("c", 8)):
        engine.add(request(name, prompt))
    plans = [engine.schedule() for _ in range(3)]
    assert [brief(plan) for plan in plans] == [
        ([], [("a", 0, 3), ("b", 0, 3)]),
        (["a", "b"], [("c", 0, 6)]),
        (["a", "b"], [("c", 6, 2)]),
    ]
    assert [chunk.is_last for plan in plans[1:] for chunk in plan.prefill] == [False, True]


def test_staging_is_held_until_the_step_after_the_last_chunk():
    engine, a = scheduler(tokens=8), request("a", 12, budgets=(FULL, 4, 12))
    engine.add(a)
    engine.schedule()
    # 13 tokens in the full layer, 4 and 12 slots in the windows; the middle layer alone drops something.
    assert [len(t) for t in a.tables.blocks] == [4, 1, 3]
    assert [len(t) for t in a.tables.staging] == [0, 3, 0]
    engine.schedule()
    assert a.status is RequestStatus.RUNNING and [len(t) for t in a.tables.staging] == [0, 3, 0]
    engine.schedule()
    assert [len(t) for t in a.tables.staging] == [0, 0, 0] and engine.pool.num_free == 100 - 8


def test_a_prompt_that_goes_whole_needs_no_staging():
    engine, a = scheduler(), request("a", 12, budgets=(FULL, 4))
    engine.add(a)
    engine.schedule()
    assert [len(t) for t in a.tables.staging] == [0, 0]


def test_the_queue_waits_for_its_head():
    engine = scheduler(num_blocks=8, tokens=32)
    a, b, c = request("a", 8, max_tokens=5), request("b", 8, max_tokens=5), request("c", 1, max_tokens=1)
    for r in (a, b, c):
        engine.add(r)
    # Each of a and b ends at 12 tokens, 6 blocks; c needs 2, which are free, but b came first.
    assert brief(engine.schedule()) == ([], [("a", 0, 8)]) and engine.pool.num_free == 2
    assert brief(engine.schedule()) == (["a"], [])
    engine.finish(a, FinishReason.STOP)
    assert brief(engine.schedule()) == ([], [("b", 0, 8), ("c", 0, 1)])


def test_admission_looks_at_the_final_length():
    engine = scheduler(num_blocks=8)
    a, b = request("a", 3, max_tokens=1), request("b", 3, max_tokens=14)
    engine.add(a)
    engine.add(b)
    assert brief(engine.schedule()) == ([], [("a", 0, 3)])  # b begins with 2 blocks, but ends with 8
    assert engine.pool.num_free == 6 and engine.num_waiting == 1


def test_places_are_limited():
    engine = scheduler(seqs=2)
    for name in "abc":
        engine.add(request(name, 2))
    assert brief(engine.schedule()) == ([], [("a", 0, 2), ("b", 0, 2)])
    assert brief(engine.schedule()) == (["a", "b"], [])
    assert engine.abort("a").finish_reason is FinishReason.ABORT
    assert brief(engine.schedule()) == (["b"], [("c", 0, 2)])


def crowded():
    """Three requests of 7 tokens that outgrow their two blocks a layer in the third step, when 2 of 14 are free."""
    engine = scheduler(num_blocks=14, tokens=32)
    requests = [request(name, 7, max_tokens=6) for name in "abc"]
    for r in requests:
        engine.add(r)
    return engine, requests


def test_the_newest_is_preempted_and_comes_back_with_what_it_knows():
    engine, (a, b, c) = crowded()
    assert brief(engine.schedule())[1] == [("a", 0, 7), ("b", 0, 7), ("c", 0, 7)] and engine.pool.num_free == 2
    for r in (a, b, c):
        r.output_ids.append(9)
    assert brief(engine.schedule()) == (["a", "b", "c"], [])
    for r in (a, b, c):
        r.output_ids.append(9)
    plan = engine.schedule()  # a takes the last two blocks, b takes c's
    assert brief(plan) == (["a", "b"], []) and plan.preempted == [c]
    assert [entry[0] for entry in plan.grown] == [a, a, b, b]
    assert (c.status, c.num_computed, c.num_scheduled_outputs) == (RequestStatus.WAITING, 0, 0)
    assert (c.num_preemptions, c.tables, c.output_ids) == (1, None, [9, 9])
    assert not engine.schedule().prefill and engine.num_waiting == 1  # it would end with 6 blocks; 2 are free
    engine.finish(a, FinishReason.STOP)
    assert brief(engine.schedule()) == (["b"], [("c", 0, 7)]) and c.is_replaying
    assert brief(engine.schedule()) == (["b", "c"], []) and c.is_replaying
    assert "c" in brief(engine.schedule())[0] and not c.is_replaying and c.num_scheduled_outputs == 3


def test_the_newest_preempts_itself_and_stays_ahead_of_the_queue():
    engine = scheduler(num_blocks=12, tokens=32)
    a, b, late = request("a", 6, max_tokens=7), request("b", 7, max_tokens=6), request("late", 1)  # b grows first
    engine.add(a)
    engine.add(b)
    engine.schedule()
    other = engine.pool.allocate(4)  # nothing is left
    engine.add(late)
    assert [brief(engine.schedule())[0], engine.schedule().preempted] == [["a", "b"], [b]]
    engine.pool.free(other)
    assert brief(engine.schedule()) == (["a"], [("b", 0, 7), ("late", 0, 1)])


def test_a_prompt_between_chunks_is_preempted_like_any_other():
    engine = scheduler(num_blocks=16, tokens=8)
    a, b = request("a", 7, max_tokens=12), request("b", 20, max_tokens=1)
    engine.add(a)
    engine.add(b)
    assert brief(engine.schedule()) == ([], [("a", 0, 7), ("b", 0, 1)])
    assert engine.pool.num_free == 2
    rest = engine.pool.allocate(2)
    assert brief(engine.schedule()) == (["a"], [("b", 1, 7)])
    plan = engine.schedule()
    assert brief(plan) == (["a"], []) and plan.preempted == [b] and b.num_computed == 0
    engine.pool.free(rest)
    assert brief(engine.schedule()) == (["a"], [("b", 0, 7)])


def test_nobody_comes_back_in_the_step_that_sent_it_away():
    engine = scheduler(num_blocks=13, tokens=9)
    a, d, b = request("a", 7, max_tokens=5), request("d", 2, max_tokens=2), request("b", 8, budgets=(4, 4))
    for r in (a, d, b):
        engine.add(r)
    # b is cut, because a and d decode, and so holds 4 blocks of staging beside its 2.
    assert briefs(engine, 2) == [([], [("a", 0, 7), ("d", 0, 2)]), (["a", "d"], [("b", 0, 7)])]
    assert engine.pool.num_free == 1
    plan = engine.schedule()  # a needs 2; d is done, so b would now fit whole, and in the 5 blocks that are free
    assert brief(plan) == (["a"], []) and plan.preempted == [b] and engine.pool.num_free == 5
    assert brief(engine.schedule()) == (["a"], [("b", 0, 8)])


def test_as_many_are_preempted_as_it_takes_newest_first():
    engine = scheduler(num_blocks=6, tokens=32)
    a, b, c = request("a", 3, budgets=(FULL,) * 3), request("b", 3, budgets=(4,)), request("c", 3, budgets=(4,))
    engine.add(a)
    engine.schedule()
    spare = engine.pool.allocate(1)
    engine.add(b)
    engine.add(c)
    engine.schedule()
    engine.pool.free(spare)
    plan = engine.schedule()  # three full layers grow at once; 1 block is free, and b and c have 1 each
    assert (brief(plan), plan.preempted, len(plan.grown)) == ((["a"], []), [c, b], 3)
    engine.finish(a, FinishReason.STOP)
    assert brief(engine.schedule()) == ([], [("b", 0, 3), ("c", 0, 3)])


def test_a_preempted_prompt_keeps_its_staging_the_second_time_too():
    engine = scheduler(num_blocks=19, tokens=9)
    a, b = request("a", 7, max_tokens=9, budgets=(FULL, FULL)), request("b", 15, max_tokens=9, budgets=(FULL, 4))
    engine.add(a)
    engine.add(b)
    briefs(engine, 3)
    taken, preempted = [], []
    for _ in range(6):  # others take what it gave back, until it is sent away
        if not preempted:
            taken.extend(engine.pool.allocate(engine.pool.num_free))
            preempted = engine.schedule().preempted
    assert preempted == [b]
    engine.pool.free(taken)
    plans = [engine.schedule() for _ in range(2)]
    assert [brief(p)[1] for p in plans] == [[("b", 0, 8)], [("b", 8, 7)]]
    assert [len(table) for table in b.tables.staging] == [0, 4]
    engine.schedule()
    assert [len(table) for table in b.tables.staging] == [0, 0]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_request_can_be_finished_in_any_state(steps):
    engine, a = scheduler(tokens=8), request("a", 12, budgets=(FULL, 4))
    engine.add(a)
    for _ in range(steps):
        engine.schedule()
    engine.finish(a, FinishReason.ERROR, "a stop string failed")
    assert (a.finish_reason, a.error) == (FinishReason.ERROR, "a stop string failed")
    assert engine.pool.num_free == 100 and not engine.has_unfinished and engine.num_waiting == engine.num_running == 0
    assert engine.schedule().is_empty
    with pytest.raises(RequestError, match="'a': it has ended already"):
        engine.finish(a, FinishReason.STOP)
    assert a.finish_reason is FinishReason.ERROR and engine.abort("a") is None


def test_a_stranger_cannot_be_finished():
    engine, a = scheduler(), request("a", 2)
    engine.add(a)
    with pytest.raises(RequestError, match="'a': it was never added"):
        engine.finish(request("a", 2), FinishReason.STOP)
    assert engine.abort("b") is None and engine.num_waiting == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", 0), "'x' has an empty prompt"),
        (request("x", 3, max_tokens=0), "max_tokens=0: ask for at least 1"),
        (
            request("x", 60, max_tokens=5),
            "60 prompt tokens and max_tokens=5, 65 together, but the engine serves at most 64 .*: shorten",
        ),
        (request("x", 20, max_tokens=22), "needs 22 blocks .* but the pool has 20: shorten"),
        (  # 12 + 2 + 12 of staging
            request("x", 24, max_tokens=1, budgets=(FULL, FULL, 4, 4)),
            "needs 26 blocks to stage its 24 prompt tokens, computed in chunks of at most 16 .14 blocks in one piece., "
            "but the pool has 20: raise max_batch_tokens, and prefill_chunk_tokens if set, to 24, shorten",
        ),
        (request("a", 3), "'a' is known already"),
    ],
)
def test_what_can_never_run_is_refused(bad, message):
    engine = scheduler(num_blocks=20)
    engine.add(request("a", 3))
    with pytest.raises(RequestError, match=message):
        engine.add(bad)
    assert engine.num_waiting == 1 and engine.pool.num_free == 20


def test_what_just_fits_alone_is_accepted_and_ends():
    engine, a = scheduler(num_blocks=20), request("a", 20, max_tokens=21)  # 40 tokens are fed
    engine.add(a)
    decoded = sum(len(engine.schedule().decode) for _ in range(30))
    assert decoded == 20 and engine.pool.num_free == 0 and a.is_fully_scheduled and a.num_preemptions == 0


def test_a_finished_request_is_not_taken_again_but_its_id_is():
    engine, a = scheduler(), request("a", 3)
    engine.add(a)
    engine.abort("a")
    with pytest.raises(RequestError, match="known already"):
        engine.add(a)
    engine.add(request("a", 3))


def test_a_step_with_prompts_enough_admits_no_further_one():
    engine = Scheduler(
        BlockPool(1000), block_size=4, max_num_seqs=8, max_batch_tokens=100, prefill_target_tokens=20, max_model_len=64
    )
    for name, length in (("a", 12), ("b", 12), ("c", 4), ("d", 30), ("e", 2)):
        engine.add(request(name, length))
    steps = [[chunk.request.request_id for chunk in engine.schedule().prefill] for _ in range(3)]
    assert steps == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize(("reserve", "admitted", "preempted"), [(0, 3, True), (8, 2, False), (64, 2, False)])
def test_admission_leaves_blocks_for_the_output_of_those_that_run(reserve, admitted, preempted):
    """Two full layers, blocks of 4: a request of 16 tokens begins with 10 blocks and ends with 24."""
    pool = BlockPool(49)
    engine = Scheduler(
        pool, block_size=4, max_num_seqs=8, max_batch_tokens=100, reserve_output_tokens=reserve, max_model_len=64
    )
    for name in "abcd":
        engine.add(request(name, 16, max_tokens=32))
    assert len(engine.schedule().prefill) == admitted
    plans = [engine.schedule() for _ in range(31)]
    assert any(plan.preempted for plan in plans) == preempted
