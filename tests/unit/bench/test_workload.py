"""A closed loop keeps its clients busy, times them by one clock, and asks for the same prompts every time."""

import pytest

from hf_sparsekv.bench.workload import Workload, run_closed_loop
from hf_sparsekv.engine.output import RequestOutput, RequestReport
from hf_sparsekv.engine.request import FinishReason
from hf_sparsekv.errors import ConfigError

WORKLOAD = Workload(input_len=5, output_len=3, vocab_size=50)


class TickingServer:
    """Each step takes a second and gives a token to each of the `places` oldest requests."""

    def __init__(self, places):
        self.places, self.now, self.live, self.seen, self.num_live = places, 0.0, {}, [], []

    def add_request(self, prompt, params):
        name = f"r{len(self.seen)}"
        self.seen.append((prompt, params, self.now))
        self.live[name] = []
        return name

    def step(self):
        self.now += 1.0
        self.num_live.append(len(self.live))
        outputs = []
        for name in list(self.live)[: self.places]:
            tokens = self.live[name]
            tokens.append(7)
            is_last = len(tokens) == 3
            if is_last:
                del self.live[name]
            outputs.append(
                RequestOutput(
                    request_id=name,
                    prompt_ids=(),
                    token_ids=tuple(tokens),
                    new_token_ids=(7,),
                    text=None,
                    new_text=None,
                    finish_reason=FinishReason.LENGTH if is_last else None,
                    error=None,
                    logprobs=None,
                    report=RequestReport(
                        queue_s=0.0,
                        ttft_s=0.0,
                        itl_s=(),
                        total_s=0.0,
                        cache_bytes=11,
                        dense_cache_bytes=22,
                        num_preemptions=1,
                    )
                    if is_last
                    else None,
                )
            )
        return outputs


def run(server, concurrency, num_requests, **options):
    return run_closed_loop(
        server, WORKLOAD, concurrency=concurrency, num_requests=num_requests, clock=lambda: server.now, **options
    )


def test_the_clients_are_all_live_until_nothing_is_left_to_ask():
    server = TickingServer(places=3)
    run(server, concurrency=3, num_requests=7)
    assert server.num_live == [3] * 6 + [1] * 3


def test_times_are_the_clients_own_and_waiting_counts():
    server = TickingServer(places=1)
    ended = []
    result = run(server, concurrency=2, num_requests=3, on_finish=ended.append)
    # One place, two clients: the second request waits for the first, the third for the second.
    assert [r.handed_in_s for r in result.requests] == [0.0, 0.0, 3.0]
    assert [r.token_s for r in result.requests] == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    assert (result.begin_s, result.end_s, result.num_steps) == (0.0, 9.0, 9)
    assert {(r.cache_bytes, r.dense_cache_bytes, r.num_preemptions) for r in result.requests} == {(11, 22, 1)}
    assert ended == [3, 3, 3]


def test_requests_ask_for_exactly_the_output_length():
    server = TickingServer(places=2)
    run(server, concurrency=2, num_requests=2)
    assert {(params.max_tokens, params.ignore_eos, params.do_sample) for _, params, _ in server.seen} == {
        (3, True, False)
    }


def test_prompts_are_the_same_in_every_run_and_differ_by_number_and_seed():
    again = Workload(input_len=5, output_len=9, vocab_size=50)
    assert [WORKLOAD.prompt(i) for i in range(20)] == [again.prompt(i) for i in range(20)]
    other = Workload(input_len=5, output_len=3, vocab_size=50, seed=1)
    prompts = {tuple(w.prompt(i)) for w in (WORKLOAD, other, WORKLOAD.warmup) for i in range(20)}
    assert len(prompts) == 60
    assert {len(prompt) for prompt in prompts} == {5}
    assert {token for prompt in prompts for token in prompt} <= set(range(50))


def test_questions_in_a_row_share_a_document():
    load = Workload(input_len=9, output_len=1, vocab_size=10**6, document_len=6, num_questions=3)
    documents, questions = zip(*((tuple(p[:6]), tuple(p[6:])) for p in map(load.prompt, range(9))), strict=True)
    assert [documents.index(document) for document in documents] == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert len(set(questions)) == 9
    assert {len(question) for question in questions} == {3}
    assert load.warmup.prompt(0)[:6] not in map(list, documents)
    one = Workload(input_len=9, output_len=1, vocab_size=10**6, document_len=6)
    assert len({tuple(one.prompt(i)[:6]) for i in range(9)}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"document_len": 5}, "a shared prefix of 5 tokens in prompts of 5"),
        ({"document_len": -1}, "a shared prefix of -1"),
        ({"num_questions": 2}, "2 questions about documents of 0 tokens"),
        ({"document_len": 3, "num_questions": 0}, "0 questions"),
    ],
)
def test_documents_are_shorter_than_prompts_and_have_questions(options, message):
    with pytest.raises(ConfigError, match=message):
        Workload(input_len=5, output_len=3, vocab_size=50, **options)


def test_a_warm_up_has_the_size_of_what_is_measured():
    assert (WORKLOAD.warmup.input_len, WORKLOAD.warmup.output_len) == (5, 3)
    assert WORKLOAD.warmup.warmup == WORKLOAD.warmup != WORKLOAD


@pytest.mark.parametrize("option", ["input_len", "output_len", "vocab_size"])
def test_sizes_must_be_positive(option):
    sizes = {"input_len": 5, "output_len": 3, "vocab_size": 50, option: 0}
    with pytest.raises(ConfigError, match=f"{option} must be at least 1: got 0"):
        Workload(**sizes)
