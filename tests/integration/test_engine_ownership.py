"""An engine is one object in one process: copies are refused, and a fork is told so at once, whatever it calls."""

import asyncio
import copy
import os
import pickle
import signal
import time
import warnings

import pytest

import hf_sparsekv as skv
from hf_sparsekv.testing.models import tiny_llama

LONG = skv.SamplingParams(max_tokens=2000, ignore_eos=True)
SHORT = skv.SamplingParams(max_tokens=3, ignore_eos=True)
WAIT_S = 30.0


@pytest.fixture
def engine():
    options = skv.EngineConfig(kv_memory_bytes=8 << 20, max_num_seqs=4, max_batch_tokens=64)
    with skv.Engine(tiny_llama(num_layers=2), skv.SparseKVConfig(num_full_layers=1, budget=40), options) as engine:
        yield engine


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_a_copy_is_refused_and_the_engine_goes_on(engine, duplicate):
    with pytest.raises(skv.CacheError, match="an Engine cannot be copied or pickled"):
        duplicate(engine)
    assert len(engine.generate([[5, 6]], SHORT)[0].token_ids) == 3


@pytest.mark.parametrize("eos", [2.5, "x", [2, 2.5], -1], ids=str)
def test_a_model_whose_end_tokens_are_none_is_refused_and_left_as_it_was(eos):
    model = tiny_llama(num_layers=2)
    before, model.generation_config.eos_token_id = model.config._attn_implementation, eos
    with pytest.raises(skv.ModelError, match=r"eos_token_id=.* is no token id"):
        skv.Engine(model, skv.SparseKVConfig(num_full_layers=1, budget=40))
    assert model.config._attn_implementation == before


def in_fork(function):
    """What it raises in a child process, in words; the child is not waited for longer than `WAIT_S`."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads: that is the case here
        pid = os.fork()
    if pid == 0:
        try:
            text = f"returned {function()!r}"
        except BaseException as error:  # noqa: BLE001
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + WAIT_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    with os.fdopen(reader) as pipe:
        return pipe.read()


async def first_of(stream):
    return await anext(stream)


def test_a_fork_with_an_open_stream_is_told_and_the_stream_goes_on(engine):
    mine = engine.thread.iterate([5, 6, 7], LONG, request_id="mine")
    first = next(mine)
    calls = [
        engine.step,
        lambda: engine.generate([[5]]),
        lambda: engine.add_request([5]),
        lambda: next(mine),
        lambda: next(engine.thread.iterate([5])),
        lambda: engine.thread.add_request([5], on_output=print),
        lambda: asyncio.run(first_of(engine.stream([5]))),
        lambda: engine.abort("mine"),
    ]
    for call in calls:
        told = in_fork(call)
        assert told.startswith(f"EngineError: the engine belongs to process {os.getpid()}, and this is a fork"), told
    assert in_fork(engine.close) == "returned None"
    assert next(mine).token_ids[: len(first.token_ids)] == first.token_ids
    mine.close()
    assert len(engine.generate([[5, 6]], SHORT)[0].token_ids) == 3


def test_a_fork_of_an_idle_engine_is_told_too(engine):
    assert "this is a fork" in in_fork(engine.step)
