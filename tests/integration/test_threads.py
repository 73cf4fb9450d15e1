"""Several threads may generate with one model: its attention stays ours until the last of them is done."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.register import is_registered

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)
GREEDY = {"do_sample": False, "pad_token_id": 2, "eos_token_id": None}
TIMEOUT = 60.0


class Meeting:
    """A streamer that waits for another thread, after the prompt and before the end."""

    def __init__(self, *, after_prompt, before_end):
        self.after_prompt, self.before_end, self.has_begun = after_prompt, before_end, False

    def put(self, value):
        if not self.has_begun:
            self.has_begun = True
            self.after_prompt()

    def end(self):
        self.before_end()


def nothing():
    pass


@pytest.mark.parametrize("was_registered", [False, True])
def test_the_first_thread_to_finish_takes_nothing_from_the_other(tiny_llama, was_registered):
    model, ids = tiny_llama(num_layers=3), [torch.randint(3, 256, (1, length)) for length in (60, 70)]
    expected = [
        skv.generate(model, i, SMALL, max_new_tokens=new, **GREEDY).sequences
        for i, new in zip(ids, (2, 12), strict=True)
    ]
    if was_registered:
        skv.register()
    both_run, first_is_done = threading.Barrier(2), threading.Event()
    during = []

    def long():
        meeting = Meeting(
            after_prompt=lambda: (both_run.wait(TIMEOUT), first_is_done.wait(TIMEOUT)), before_end=nothing
        )
        result = skv.generate(model, ids[1], SMALL, max_new_tokens=12, streamer=meeting, **GREEDY).sequences
        return result

    def short():
        meeting = Meeting(after_prompt=lambda: both_run.wait(TIMEOUT), before_end=nothing)
        try:
            result = skv.generate(model, ids[0], SMALL, max_new_tokens=2, streamer=meeting, **GREEDY).sequences
            during.append((model.config._attn_implementation, is_registered()))
        finally:
            first_is_done.set()
        return result

    try:
        with ThreadPoolExecutor(2) as pool:
            results = [future.result(TIMEOUT) for future in (pool.submit(short), pool.submit(long))]
        assert all(torch.equal(result, alone) for result, alone in zip(results, expected, strict=True))
        assert during == [("sparsekv", True)]
        assert model.config._attn_implementation == "sdpa"
        assert is_registered() == was_registered
    finally:
        skv.unregister()


def test_a_thread_that_fails_leaves_the_others_and_the_model_alone(tiny_llama):
    model, ids = tiny_llama(num_layers=3), torch.randint(3, 256, (1, 60))
    expected = skv.generate(model, ids, SMALL, max_new_tokens=12, **GREEDY).sequences

    class Broken(skv.Scorer):
        name = "broken"
        queries = "none"

        def score(self, inputs):
            raise MemoryError

    def other_fails():
        with pytest.raises(MemoryError):
            skv.generate(model, ids, SMALL.with_(scorer=Broken()), max_new_tokens=2, **GREEDY)

    meeting = Meeting(after_prompt=other_fails, before_end=nothing)
    output = skv.generate(model, ids, SMALL, max_new_tokens=12, streamer=meeting, **GREEDY)
    assert torch.equal(output.sequences, expected)
    assert model.config._attn_implementation == "sdpa"
    assert not is_registered()


def test_models_are_switched_apart(tiny_llama):
    first, second = tiny_llama(num_layers=2), tiny_llama(num_layers=3)
    ids = torch.randint(3, 256, (1, 60))

    def other():
        skv.generate(second, ids, SMALL, max_new_tokens=2, **GREEDY)
        assert second.config._attn_implementation == "sdpa"
        assert first.config._attn_implementation == "sparsekv"

    skv.generate(
        first, ids, SMALL, max_new_tokens=4, streamer=Meeting(after_prompt=other, before_end=nothing), **GREEDY
    )
    assert first.config._attn_implementation == "sdpa"
    assert not is_registered()


def test_many_threads_answer_as_each_does_alone(tiny_llama):
    model = tiny_llama(num_layers=3)
    prompts = [torch.randint(3, 256, (1, 40 + 3 * i)) for i in range(6)]

    def answer(ids):
        return skv.generate(model, ids, SMALL, max_new_tokens=6, **GREEDY).sequences

    alone = [answer(ids) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, prompts))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert model.config._attn_implementation == "sdpa"
    assert not is_registered()
