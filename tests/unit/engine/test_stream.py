"""The thread that steps an engine, with an engine whose every step can be foretold."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import hf_sparsekv
from hf_sparsekv.engine.request import FinishReason
from hf_sparsekv.engine.stream import EngineThread
from hf_sparsekv.errors import EngineError, RequestError
from hf_sparsekv.testing.streams import WAIT_S, eventually, in_threads, output_of, tokens_of


class CountingEngine:
    """Answers the prompt [n] with the tokens 0 .. n - 1, one a step."""

    def __init__(self):
        self.live, self.aborted, self.num_steps, self.failure = {}, [], 0, None
        self.gate = threading.Event()
        self.gate.set()

    @property
    def has_unfinished(self):
        return bool(self.live)

    def add_request(self, prompt, params=None, *, config=None, request_id):
        if request_id in self.live:
            raise RequestError(f"request {request_id!r} is known already")
        if prompt == "broken":
            raise ZeroDivisionError("a tokenizer's")
        self.live[request_id] = [prompt[0], 0]
        return request_id

    def abort(self, request_id):
        if self.live.pop(request_id, None) is None:
            return None
        self.aborted.append(request_id)
        return output_of(request_id, (), (), FinishReason.ABORT)

    def step(self):
        assert self.gate.wait(WAIT_S)
        time.sleep(0.001)  # lets other threads in, as a forward pass does
        self.num_steps += 1
        if self.failure is not None:
            raise self.failure
        outputs = []
        for name, state in list(self.live.items()):
            state[1] += 1
            is_last = state[1] == state[0]
            tokens = tuple(range(state[1]))
            outputs.append(output_of(name, tokens, tokens[-1:], FinishReason.LENGTH if is_last else None))
            if is_last:
                del self.live[name]
        return outputs


@pytest.fixture
def counting():
    engine = CountingEngine()
    thread = EngineThread(engine)
    yield engine, thread
    engine.gate.set()
    thread.close()


def test_the_thread_ends_when_nothing_is_left_to_do(counting):
    _, thread = counting
    before = set(threading.enumerate())
    assert tokens_of(thread.iterate([5])) == (0, 1, 2, 3, 4)
    thread.give_way("anything")
    eventually(lambda: set(threading.enumerate()) == before)
    assert tokens_of(thread.iterate([3])) == (0, 1, 2)


def test_a_slow_consumer_gets_everything_in_few_outputs(counting):
    engine, thread = counting
    stream = thread.iterate([400])
    first = next(stream)
    eventually(lambda: not engine.has_unfinished)
    rest = list(stream)
    assert tokens_of([first, *rest]) == tuple(range(400))
    assert len(rest) == 1


def test_breaking_out_of_a_loop_aborts(counting):
    engine, thread = counting

    async def scenario():
        async for _ in thread.stream([10**6], request_id="loop"):
            break

    asyncio.run(scenario())
    for _ in thread.iterate([10**6], request_id="thread"):
        break
    eventually(lambda: sorted(engine.aborted) == ["loop", "thread"])
    thread.give_way("anything")
    assert not engine.has_unfinished


def test_a_request_cancelled_before_it_was_taken_in_never_stays(counting):
    engine, thread = counting
    running = thread.iterate([10**6], request_id="running")
    next(running)
    engine.gate.clear()

    async def scenario():
        task = asyncio.create_task(anext(thread.stream([10**6], request_id="late")))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    engine.gate.set()
    eventually(lambda: engine.aborted == ["late"])
    running.close()


def test_an_event_loop_is_never_held_up_by_a_step(counting):
    engine, thread = counting
    running = thread.iterate([10**6])
    next(running)
    engine.gate.clear()

    async def scenario():
        stream = thread.stream([2])
        first = asyncio.ensure_future(anext(stream))
        start = time.monotonic()
        await asyncio.sleep(0.01)
        assert time.monotonic() - start < WAIT_S / 2
        assert not first.done()
        engine.gate.set()
        return [await first, *[output async for output in stream]]

    assert tokens_of(asyncio.run(scenario())) == (0, 1)
    running.close()


def test_a_taken_id_is_refused_and_its_owner_goes_on(counting):
    engine, thread = counting
    owner = thread.iterate([50], request_id="name")
    first = next(owner)
    with pytest.raises(RequestError, match="known already"):
        next(thread.iterate([5], request_id="name"))
    assert len(tokens_of([first, *owner])) == 50
    assert engine.aborted == []


def test_a_name_that_a_caller_has_taken_is_not_given_to_another_stream(counting):
    _, thread = counting
    mine = [thread.iterate([10**6], request_id=f"stream-{i}") for i in (0, 1, 3)]
    for stream in mine:
        next(stream)
    others = [list(thread.iterate([3])) for _ in range(3)]
    assert [outputs[-1].request_id for outputs in others] == ["stream-2", "stream-4", "stream-5"]
    for stream in mine:
        assert not next(stream).is_finished
        stream.close()


@pytest.mark.parametrize("failure", [RuntimeError("the device is lost"), KeyboardInterrupt()])
def test_a_failure_of_the_engine_ends_every_stream(counting, failure):
    engine, thread = counting
    streams = [thread.iterate([10**6]) for _ in range(3)]
    for stream in streams:
        next(stream)
    told = []
    thread.add_request([10**6], on_output=told.append)
    engine.failure = failure

    async def consume():
        async for _ in thread.stream([10**6]):
            pass

    with pytest.raises(EngineError, match="the engine has failed") as caught:
        asyncio.run(consume())
    assert caught.value.__cause__ is failure
    for stream in streams:
        with pytest.raises(EngineError, match=type(failure).__name__):
            list(stream)
    eventually(lambda: isinstance(told[-1], EngineError))
    for call in (lambda: next(thread.iterate([1])), lambda: thread.give_way("step()")):
        with pytest.raises(EngineError, match="make a new one"):
            call()
    assert thread.abort("stream-0") is None


def test_a_failure_in_abort_reaches_who_asked_for_it(counting):
    engine, thread = counting
    stream = thread.iterate([10**6], request_id="x")
    next(stream)

    def abort(_):
        raise RuntimeError("no")

    engine.abort = abort
    with pytest.raises(EngineError, match="RuntimeError: no"):
        thread.abort("x")
    with pytest.raises(EngineError, match="RuntimeError: no"):
        list(stream)


def test_a_problem_of_one_prompt_is_that_of_its_consumer(counting):
    _, thread = counting
    stream = thread.iterate([200])
    next(stream)
    with pytest.raises(ZeroDivisionError):
        list(thread.iterate("broken"))
    assert list(stream)[-1].is_finished


def test_a_consumer_that_raises_is_aborted_and_nobody_else(counting):
    engine, thread = counting
    stream = thread.iterate([300])
    next(stream)

    def on_output(output):
        raise ValueError("a consumer's mistake")

    thread.add_request([10**6], on_output=on_output, request_id="bad")
    eventually(lambda: engine.aborted == ["bad"])
    assert list(stream)[-1].finish_reason is FinishReason.LENGTH


def test_a_loop_that_is_closed_with_a_stream_open_disturbs_nobody(counting):
    engine, thread = counting
    loop = asyncio.new_event_loop()
    orphan = thread.stream([10**6], request_id="orphan")
    loop.run_until_complete(anext(orphan))
    loop.close()
    eventually(lambda: engine.aborted == ["orphan"])
    assert len(tokens_of(thread.iterate([20]))) == 20
    orphan.aclose().close()  # a coroutine that no loop will run any more


def test_add_request_calls_back_in_order(counting):
    _, thread = counting
    outputs = []
    assert thread.add_request([4], on_output=outputs.append, request_id="a") == "a"
    eventually(lambda: outputs and outputs[-1].is_finished)
    assert tokens_of(outputs) == (0, 1, 2, 3)


def test_close_while_a_step_runs_waits_for_it_and_aborts_the_rest(counting):
    engine, thread = counting
    stream = thread.iterate([10**6], request_id="a")
    next(stream)
    closers = [threading.Thread(target=thread.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(WAIT_S)
        assert not closer.is_alive()
    assert engine.aborted == ["a"]
    with pytest.raises(EngineError, match="closed"):
        list(stream)


def test_many_streams_come_and_go_at_once(counting):
    engine, thread = counting

    def blocking(seed):
        def run():
            for i in range(15):
                count = 1 + (seed * 7 + i) % 5
                assert tokens_of(thread.iterate([count])) == tuple(range(count))

        return run

    async def impatient():
        for i in range(15):
            stream = thread.stream([10**6])
            for _ in range(i % 3 + 1):
                await anext(stream)
            await stream.aclose()

    in_threads(*map(blocking, range(6)), *[lambda: asyncio.run(impatient())] * 3)
    thread.give_way("anything")
    assert not engine.has_unfinished
    assert len(engine.aborted) == 45


# The package's own __init__ imports torch, so empty packages stand in for it and for the engine's.
LEAVE_WITH_A_STREAM_OPEN = """
import sys, types, time
root = sys.argv[1]
for name, path in (("hf_sparsekv", root), ("hf_sparsekv.engine", root + "/engine")):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
from hf_sparsekv.engine.stream import EngineThread

class Endless:
    has_unfinished = False
    def add_request(self, *args, **options):
        self.has_unfinished = True
    def abort(self, request_id):
        print("aborted", request_id, flush=True)
    def step(self):
        time.sleep(0.01)
        return []

EngineThread(Endless()).add_request([1], on_output=lambda output: None, request_id="left")
print("torch" in sys.modules)
"""


def test_a_program_can_end_with_a_stream_open_and_streams_need_no_torch():
    root = Path(hf_sparsekv.__file__).parent
    command = [sys.executable, "-c", LEAVE_WITH_A_STREAM_OPEN, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\naborted left\n", "")
