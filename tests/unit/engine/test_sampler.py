"""Sampling on the device against transformers' own processors; every row on its own."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_sparsekv.engine.sampler import SamplerFeatures, SamplerState
from hf_sparsekv.engine.sampling_params import SamplingParams
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_fp32
from hf_sparsekv.testing.waiting import waiting_is_an_error

EOS = [2, 7]
PROMPT = [3, 5, 5, 2, 40]
ALL = SamplerFeatures(
    any_sampling=True, any_top_k_p=True, any_min_p=True, any_penalty=True, any_min_tokens=True, num_logprobs=4
)
MIXED = [
    SamplingParams(),
    SamplingParams(do_sample=True),
    SamplingParams(do_sample=True, temperature=0.3, top_k=5),
    SamplingParams(do_sample=True, temperature=2.0, top_p=0.7, seed=11),
    SamplingParams(do_sample=True, min_p=0.2, min_tokens=3),
    SamplingParams(repetition_penalty=1.7, min_tokens=2),
    SamplingParams(do_sample=True, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=0.8, temperature=0.7),
    SamplingParams(do_sample=True, top_k=1),
    SamplingParams(do_sample=True, top_p=0.0),
    SamplingParams(do_sample=True, top_p=1.0, min_p=1.0),
    SamplingParams(do_sample=True, top_k=10_000, min_tokens=4, stop_token_ids=(9,), ignore_eos=True),
]


def state_of(params: list[SamplingParams], vocab: int, *, num_outputs: int = 0, device: str = "cpu") -> SamplerState:
    """Row i belongs to the request "i" with params[i]."""
    state = SamplerState(len(params), vocab, device, EOS)
    state.reserve_penalty()
    for row, own in enumerate(params):
        state.set_row(row, own, own.request_seed(str(row)), PROMPT, num_outputs=num_outputs)
    state.flush()
    return state


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    logits = 4 * torch.randn(rows, vocab)
    if kind == "ties":
        return logits.round()
    if kind == "all equal":
        return torch.zeros(rows, vocab)
    if kind == "extreme":
        logits[:, ::7] *= 1e4
        logits[:, 1::5] = -torch.inf
        logits[:, 3::11] = torch.finfo(torch.float32).min
    return logits


def transformers_scores(logits: Tensor, params: SamplingParams, input_ids: list[int], prompt_length: int) -> Tensor:
    """What `generate` would draw from (1 row), its processors built in the order in which it builds them."""
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens > 0:
        eos = list(params.end_token_ids(EOS))
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, eos))
    if params.do_sample:
        if params.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k is not None:
            chain.append(TopKLogitsWarper(params.top_k))
        if params.top_p is not None and params.top_p < 1.0:
            chain.append(TopPLogitsWarper(params.top_p))
        if params.min_p is not None:
            chain.append(MinPLogitsWarper(params.min_p))
    return chain(torch.tensor([input_ids]), logits[None].clone())[0]


# --- what may be chosen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "extreme"])
@pytest.mark.parametrize("num_outputs", [0, 2, 3])
def test_scores_are_those_of_transformers_processors(kind, num_outputs):
    vocab = 211
    logits = logits_of(kind, len(MIXED), vocab)
    state = state_of(MIXED, vocab, num_outputs=num_outputs)

    actual = state.scores(logits, slice(0, len(MIXED)), ALL)

    for row, params in enumerate(MIXED):
        expected = transformers_scores(logits[row], params, PROMPT, len(PROMPT) - num_outputs)
        if kind == "random":
            assert_bitwise_equal(actual[row], expected)
            continue
        # Which of several equal tokens top-p leaves out is chance in transformers; how many it leaves out is not.
        assert_bitwise_equal(actual[row].sort().values, expected.sort().values)
        filterless = replace(params, top_p=None, min_p=None)
        before = transformers_scores(logits[row], filterless, PROMPT, len(PROMPT) - num_outputs).tolist()
        kept: dict[float, list[bool]] = {}
        for value, after in zip(before, actual[row].tolist(), strict=True):
            kept.setdefault(value, []).append(after > -math.inf)
            assert after in (value, -math.inf)
        assert all(flags == sorted(flags, reverse=True) for flags in kept.values()), "a higher id was kept"


def test_top_p_leaves_out_what_sums_to_exactly_the_rest():
    params = SamplingParams(do_sample=True, top_p=0.5)

    scores = state_of([params], 4).scores(torch.zeros(1, 4), slice(0, 1), SamplerFeatures.of([params]))

    assert scores.tolist() == [[0.0, 0.0, -math.inf, -math.inf]]
    assert_bitwise_equal(scores[0].sort().values, transformers_scores(torch.zeros(4), params, PROMPT, 5).sort().values)


def test_the_repetition_penalty_moves_with_its_row():
    params = SamplingParams(repetition_penalty=3.0)
    state = SamplerState(3, 64, "cpu", EOS)
    state.set_row(0, params, 0, range(64))
    state.set_row(2, params, 0, PROMPT)
    state.move_row(2, 0)
    state.flush()
    logits = torch.randn(1, 64)

    actual = state.scores(logits, slice(0, 1), SamplerFeatures.of([params]))

    assert_bitwise_equal(actual[0], transformers_scores(logits[0], params, PROMPT, len(PROMPT)))


def test_the_repetition_penalty_remembers_prompt_and_outputs_and_forgets_the_row_before():
    vocab, params = 64, SamplingParams(repetition_penalty=3.0)
    state = SamplerState(2, vocab, "cpu", EOS)
    features = SamplerFeatures.of([params])
    state.set_row(1, params, 0, range(vocab))  # an earlier request that has seen everything
    state.set_row(1, params, 0, [*PROMPT, vocab + 5])  # the embedding may have more rows than the head
    state.flush()
    tokens = list(PROMPT)

    for _ in range(12):
        logits = torch.randn(1, vocab)
        expected = transformers_scores(logits[0], params, tokens, len(PROMPT))
        sampled = state.sample(logits, slice(1, 2), features)
        assert sampled.ids.tolist() == [int(expected.argmax())]
        tokens.append(int(sampled.ids))


def test_end_tokens_come_only_after_min_tokens():
    params = SamplingParams(min_tokens=3, stop_token_ids=(5,))
    state = state_of([params], 32)
    logits = torch.zeros(1, 32)
    logits[0, [2, 5, 7]] = torch.tensor([8.0, 9.0, 7.0])
    logits[0, 30] = 1.0

    ids = [int(state.sample(logits, slice(0, 1), SamplerFeatures.of([params])).ids) for _ in range(5)]

    assert ids == [30, 30, 30, 5, 5]


def test_stop_ids_that_the_model_has_not_got_are_harmless():
    params = SamplingParams(min_tokens=3, stop_token_ids=(1000,), ignore_eos=True)

    assert_bitwise_equal(
        state_of([params], 32).scores(torch.ones(1, 32), slice(0, 1), SamplerFeatures.of([params])), torch.ones(1, 32)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [SamplerFeatures(), ALL])
def test_greedy_takes_the_lowest_id_among_equals(dtype, features):
    logits = torch.randint(-3, 3, (64, 501)).to(dtype)
    state = state_of([SamplingParams()] * 64, 501)

    ids = state.sample(logits, slice(0, 64), features).ids

    assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_a_greedy_batch_is_one_reduction():
    state, logits = state_of([SamplingParams()] * 2, 32), torch.randn(2, 32)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        state.sample(logits, slice(0, 2), SamplerFeatures())

    wide = [event.key for event in profile.key_averages(group_by_input_shape=True) if [2, 32] in event.input_shapes]
    assert wide == ["aten::max"]


def test_a_token_that_was_filtered_out_is_never_drawn():
    params = SamplingParams(do_sample=True, top_k=3)
    state = state_of([params] * 500, 100)
    logits = torch.randn(100)

    ids = state.sample(logits.expand(500, 100), slice(0, 500), SamplerFeatures.of([params])).ids

    assert set(ids.tolist()) == set(logits.topk(3).indices.tolist())


# --- a row depends on nothing but itself ------------------------------------------------------------------------------


def run_alone(row: int, logits: Tensor) -> list[int]:
    """Tokens of request `row` of MIXED, with features for itself only, in row 0 of a state of one."""
    params = MIXED[row]
    state = SamplerState(1, logits.shape[-1], "cpu", EOS)
    state.set_row(0, params, params.request_seed(str(row)), PROMPT)
    state.flush()
    return [int(state.sample(step[row : row + 1], slice(0, 1), SamplerFeatures.of([params])).ids) for step in logits]


@pytest.mark.parametrize("kind", ["random", "ties", "extreme"])
def test_a_request_gives_in_any_batch_and_row_what_it_gives_alone(kind):
    steps, vocab, num = 6, 97, len(MIXED)
    logits = torch.stack([logits_of(kind, num, vocab) for _ in range(steps)])
    alone = [run_alone(row, logits) for row in range(num)]

    state = state_of(MIXED, vocab)
    together = torch.stack([state.sample(step, slice(0, num), ALL).ids for step in logits])
    state = state_of(MIXED, vocab)
    picked = torch.tensor([7, 1, 5, 3])
    shuffled = torch.stack([state.sample(step[picked], picked, ALL).ids for step in logits])

    assert together.T.tolist() == alone
    assert shuffled.T.tolist() == [alone[row] for row in picked.tolist()]


def test_a_request_that_moves_or_comes_back_goes_on_with_the_same_numbers():
    vocab, request = 97, 6
    params = MIXED[request]
    logits = torch.stack([logits_of("random", len(MIXED), vocab) for _ in range(6)])
    alone, features, seed = run_alone(request, logits), SamplerFeatures.of([params]), params.request_seed(str(request))
    state = SamplerState(4, vocab, "cpu", EOS)
    state.set_row(3, params, seed, PROMPT)
    state.move_row(3, 2)  # before its first flush
    state.flush()
    ids = [int(state.sample(step[None, request], slice(2, 3), features).ids) for step in logits[:2]]

    state.set_row(0, SamplingParams(), 0, [])  # staged for a row that is then taken
    state.move_row(2, 0)
    state.flush()
    ids += [int(state.sample(step[None, request], slice(0, 1), features).ids) for step in logits[2:4]]
    state.clear_row(0)
    state.set_row(1, params, seed, PROMPT + ids, num_outputs=len(ids))
    state.flush()
    ids += [int(state.sample(step[None, request], slice(1, 2), features).ids) for step in logits[4:]]

    assert ids == alone


def test_a_row_that_was_left_is_greedy_and_without_options():
    state = state_of([MIXED[6], MIXED[6], SamplingParams()], 97)
    state.move_row(1, 2)
    state.clear_row(0)
    state.flush()
    logits = torch.randn(2, 97)

    assert state.sample(logits, slice(0, 2), ALL).ids.tolist() == logits.argmax(-1).tolist()


def test_sampling_before_a_flush_is_refused():
    state = SamplerState(2, 8, "cpu")
    state.set_row(1, SamplingParams(), 0, [])

    with pytest.raises(AssertionError, match=r"flush\(\) first: rows \[1\]"):
        state.sample(torch.zeros(1, 8), slice(0, 1), SamplerFeatures())


# --- bad logits, log-probabilities, features --------------------------------------------------------------------------


@pytest.mark.parametrize("features", [SamplerFeatures(num_logprobs=0), ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_row_is_named_and_leaves_the_others_alone(features, dtype):
    params = [SamplingParams()] * 6 if features is not ALL else MIXED[:6]
    logits = torch.randn(6, 97).to(dtype)
    clean = state_of(params, 97).sample(logits, slice(0, 6), features)
    broken = logits.clone()
    broken[0, 5] = torch.nan
    broken[2, 2] = torch.inf
    broken[4] = -torch.inf

    actual = state_of(params, 97).sample(broken, slice(0, 6), features)

    assert clean.is_bad.tolist() == [False] * 6
    assert actual.is_bad.tolist() == [True, False, True, False, True, False]
    assert actual.ids[1::2].tolist() == clean.ids[1::2].tolist()
    assert_bitwise_equal(actual.logprobs[1::2], clean.logprobs[1::2])
    assert all(0 <= i < 97 for i in actual.ids.tolist())


def test_a_row_whose_options_leave_nothing_is_bad():
    params = SamplingParams(min_tokens=1)
    logits = torch.full((1, 9), -torch.inf)
    logits[0, EOS] = 1.0

    assert state_of([params], 9).sample(logits, slice(0, 1), SamplerFeatures.of([params])).is_bad.tolist() == [True]


def test_a_row_is_bad_even_when_its_options_hide_the_nan():
    params = SamplingParams(min_tokens=1)
    logits = torch.zeros(1, 9)
    logits[0, EOS[0]] = torch.nan

    assert state_of([params], 9).sample(logits, slice(0, 1), SamplerFeatures.of([params])).is_bad.tolist() == [True]


@pytest.mark.parametrize("num_logprobs", [0, 1, 4, 1000])
def test_log_probabilities_are_of_the_models_own_logits(num_logprobs):
    params = [SamplingParams(do_sample=True, temperature=3.0, repetition_penalty=2.0)] * 5
    logits = torch.randn(5, 60)
    features = SamplerFeatures(any_sampling=True, any_penalty=True, num_logprobs=num_logprobs)

    sampled = state_of(params, 60).sample(logits, slice(0, 5), features)

    expected = logits.double().log_softmax(-1)
    assert_close_fp32(sampled.logprobs, expected.gather(-1, sampled.ids[:, None])[:, 0].float())
    best = expected.sort(-1, descending=True)
    assert sampled.top_ids.tolist() == best.indices[:, :num_logprobs].tolist()
    if num_logprobs:
        assert_close_fp32(sampled.top_logprobs, best.values[:, :num_logprobs].float())


def test_without_log_probabilities_there_are_none():
    sampled = state_of([SamplingParams()], 9).sample(torch.zeros(1, 9), slice(0, 1), SamplerFeatures())

    assert (sampled.logprobs, sampled.top_ids, sampled.top_logprobs) == (None, None, None)


def test_features_are_what_somebody_needs():
    assert SamplerFeatures.of([]) == SamplerFeatures.of([SamplingParams()]) == SamplerFeatures()
    assert SamplerFeatures.of(iter(MIXED)) == SamplerFeatures(
        any_sampling=True, any_top_k_p=True, any_min_p=True, any_penalty=True, any_min_tokens=True
    )
    neutral = SamplingParams(do_sample=True, top_p=1.0, min_p=0.0)
    assert SamplerFeatures.of([neutral]) == SamplerFeatures(any_sampling=True)
    wanted = [SamplerFeatures.of([SamplingParams(), SamplingParams(logprobs=n)]).num_logprobs for n in (0, 1, 2, 3, 5)]
    assert wanted == [0, 1, 2, 4, 8]
    assert len({SamplerFeatures(), SamplerFeatures.of(MIXED), SamplerFeatures()}) == 2


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("features", [SamplerFeatures(), ALL])
def test_a_captured_graph_replays_what_runs_eagerly_and_follows_the_rows(features):
    params = MIXED if features is ALL else [SamplingParams()] * len(MIXED)
    num, vocab = len(params), 997
    steps = [logits_of("ties", num, vocab).cuda() for _ in range(4)]
    eager = state_of(params, vocab, device="cuda")
    expected = [eager.sample(step, slice(0, num), features).ids.tolist() for step in steps]
    state, static = state_of(params, vocab, device="cuda"), torch.zeros(num, vocab, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        state.sample(static, slice(0, num), features)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = state.sample(static, slice(0, num), features)

    for row, own in enumerate(params):
        state.set_row(row, own, own.request_seed(str(row)), PROMPT)
    state.flush()
    actual = []
    for step in steps:
        static.copy_(step)
        graph.replay()
        actual.append(sampled.ids.tolist())

    assert actual == expected


@pytest.mark.gpu
@pytest.mark.parametrize("features", [SamplerFeatures(), ALL])
def test_sampling_and_uploading_never_wait_for_the_gpu(features):
    state, logits = state_of(MIXED, 997, device="cuda"), torch.randn(len(MIXED), 997, device="cuda")
    with waiting_is_an_error():
        state.set_row(3, MIXED[6], 5, PROMPT)
        state.move_row(3, 4)
        state.flush()
        state.sample(logits, slice(0, len(MIXED)), features)
