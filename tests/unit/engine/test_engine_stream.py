"""`Engine.stream` and its thread, on a real engine: from many threads and event loops as from one caller."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.request import FinishReason
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.errors import CacheError, ConfigError, EngineError, RequestError
from hf_sparsekv.testing.models import tiny_llama
from hf_sparsekv.testing.streams import WAIT_S, eventually, in_threads, tokens_of

LONG = SamplingParams(max_tokens=2000, ignore_eos=True)
PROMPTS = [[3 + (i * 7 + j) % 250 for j in range(1 + 5 * i)] for i in range(12)]


@pytest.fixture(scope="module")
def real():
    model = tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2)
    config = SparseKVConfig(num_full_layers=1, budget=40)
    with Engine(model, config, EngineConfig(kv_memory_bytes=16 << 20, max_num_seqs=6, max_batch_tokens=128)) as engine:
        yield engine


def test_many_loops_and_threads_get_what_generate_gives(real):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [output.token_ids for output in real.generate(PROMPTS, params)]

    async def one(prompt):
        return tokens_of([output async for output in real.stream(prompt, params)])

    async def all_of_them():
        return await asyncio.gather(*map(one, PROMPTS))

    def blocking():
        return [tokens_of(real.thread.iterate(prompt, params)) for prompt in PROMPTS]

    results = in_threads(lambda: asyncio.run(all_of_them()), blocking, lambda: asyncio.run(all_of_them()))

    assert results == [expected] * 3
    assert [output.token_ids for output in real.generate(PROMPTS, params)] == expected  # the engine is free again


def test_a_cancelled_consumer_gives_its_blocks_back(real):
    before = real.metrics.snapshot()

    async def scenario():
        async def consume():
            async for _ in real.stream(PROMPTS[5], LONG):
                started.set()

        started = asyncio.Event()
        tasks = [asyncio.create_task(consume()) for _ in range(3)]
        await started.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(scenario())
    eventually(lambda: not real.has_unfinished)
    after = real.metrics.snapshot()
    assert after["blocks_free"] == after["blocks_total"] == before["blocks_total"]
    assert after["requests_finished"]["abort"] == before["requests_finished"]["abort"] + 3


def test_the_engine_belongs_to_the_thread_while_a_stream_is_open(real):
    stream = real.thread.iterate(PROMPTS[3], LONG)
    next(stream)
    for call in (real.step, lambda: real.generate(PROMPTS), lambda: real.add_request([5])):
        with pytest.raises(RequestError, match="background thread steps the engine for 1 open streams"):
            call()
    stream.close()
    assert real.generate([PROMPTS[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finish_reason == "length"


def test_streams_wait_for_nobody_elses_requests(real):
    real.add_request(PROMPTS[2], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(RequestError, match="finish them with step"):
        next(real.thread.iterate(PROMPTS[1]))
    while real.has_unfinished:
        real.step()
    assert len(tokens_of(real.thread.iterate(PROMPTS[1], SamplingParams(max_tokens=3, ignore_eos=True)))) == 3


def test_abort_by_id_ends_the_stream_with_what_it_had(real):
    stream = real.thread.iterate(PROMPTS[4], LONG, request_id="mine")
    seen = next(stream).token_ids
    ended = real.abort("mine")
    rest = list(stream)
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert rest[-1].token_ids == ended.token_ids
    assert ended.token_ids[: len(seen)] == seen
    assert real.abort("mine") is None


def test_a_refused_request_raises_where_it_is_consumed(real):
    other = real.thread.iterate(PROMPTS[4], SamplingParams(max_tokens=20, ignore_eos=True))
    next(other)

    async def refused():
        with pytest.raises(RequestError, match="token ids must be ints"):
            await anext(real.stream([999]))

    asyncio.run(refused())
    with pytest.raises(RequestError, match="empty prompt"):
        list(real.thread.iterate([]))
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        real.thread.add_request([5], SamplingParams(stop_strings=("x",)), on_output=pytest.fail)
    assert list(other)[-1].finish_reason is FinishReason.LENGTH


def test_closing_the_engine_ends_streams_and_refuses_new_ones(tiny_llama):
    engine = Engine(
        tiny_llama(num_layers=2),
        SparseKVConfig(num_full_layers=1),
        EngineConfig(kv_memory_bytes=8 << 20, max_num_seqs=4),
    )
    stream = engine.thread.iterate([5, 6, 7], LONG)
    next(stream)
    engine.close()
    with pytest.raises(EngineError, match="closed while this request was running"):
        list(stream)
    with pytest.raises(EngineError, match="make a new one"):
        list(engine.thread.iterate([5]))
    with pytest.raises(CacheError, match="closed"):
        engine.step()
    engine.close()


def test_a_consumer_may_abort_another_request_but_not_step(real):
    engine, told = real, []

    def on_output(output):
        if not told:
            with pytest.raises(RequestError, match="another thread"):
                engine.step()
            told.append(engine.abort("other"))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: list(engine.thread.iterate(PROMPTS[1], LONG, request_id="other")))
        eventually(lambda: engine.has_unfinished)
        name = engine.thread.add_request(PROMPTS[2], LONG, on_output=on_output)
        outputs = other.result(WAIT_S)
        engine.abort(name)
    assert outputs[-1].token_ids == told[0].token_ids
    assert outputs[-1].finish_reason is FinishReason.ABORT
    tokens_of(outputs)


STEP_S, CLOSE_S = 0.4, 0.2
"""How long a step is made to take, and how far two clocks' times may be apart: a busy machine wakes threads late."""


def test_the_time_to_the_first_token_is_the_clients_own_in_the_queue_and_in_the_middle_of_a_step(real, monkeypatch):
    run = real._runner.run

    def slowly(batch):
        time.sleep(STEP_S)
        return run(batch)

    async def one(index, delay_s):
        await asyncio.sleep(delay_s)
        begin, first, last = time.perf_counter(), None, None
        async for output in real.stream(PROMPTS[1 + index], SamplingParams(max_tokens=3, ignore_eos=True)):
            first, last = first or time.perf_counter(), output
        return first - begin, last.report

    async def all_of_them():
        # Eight for six rows: two wait. All but the first come while a step is running.
        return await asyncio.gather(*(one(index, 0.0 if index == 0 else STEP_S / 4) for index in range(8)))

    def sum_of_ttft():
        return real.metrics.registry.get_sample_value("hf_sparsekv_time_to_first_token_seconds_sum")

    before = sum_of_ttft()
    monkeypatch.setattr(real._runner, "run", slowly)
    results = asyncio.run(all_of_them())

    for seen_s, report in results:
        assert seen_s - CLOSE_S < report.ttft_s <= seen_s
    queued = sorted(report.queue_s for _, report in results)
    assert queued[0] < CLOSE_S and queued[1] > STEP_S / 2 and queued[-1] > 3 * STEP_S
    assert sum_of_ttft() - before == pytest.approx(sum(report.ttft_s for _, report in results))
