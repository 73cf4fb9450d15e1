"""What goes wrong with one request ends that request alone, with a reason; the others never notice."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import hf_sparsekv as skv
from hf_sparsekv.scorers import registry
from hf_sparsekv.testing.models import tiny_llama

SPARSE = skv.SparseKVConfig(num_full_layers=1, budget=21, num_sink_tokens=2, num_recent_tokens=8, observation_window=6)
OPTIONS = skv.EngineConfig(
    kv_memory_bytes=1 << 20, max_num_seqs=4, max_batch_tokens=64, block_size=4, max_model_len=160
)
GREEDY = skv.SamplingParams(max_tokens=12, ignore_eos=True)
GOOD = [[(7 * i + j) % 250 + 3 for i in range(length)] for j, length in enumerate((1, 12, 30, 50))]
BAD_LENGTH = 33
"""Of the prompt that a scorer fails on: it sees no ids."""
BAD_PROMPT = [5] * BAD_LENGTH
POISON_ID = 7


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=3)


@pytest.fixture(scope="module")
def expected(model):
    """The outputs of GOOD when nothing goes wrong."""
    with skv.Engine(model, SPARSE, OPTIONS) as engine:
        return [output.token_ids for output in engine.generate(GOOD, GREEDY)]


@pytest.fixture
def engine(model):
    with skv.Engine(model, SPARSE, OPTIONS) as engine:
        yield engine
        assert_nothing_left(engine)


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


def assert_nothing_left(engine):
    assert engine._blocks.num_free == engine._blocks.num_usable
    assert not engine.has_unfinished
    assert not list(engine._tracker)
    assert not engine._builder._tails
    assert not any(group.requests or group.rows.is_active.any() for group in engine._groups.values())


def assert_only_bad_fails(engine, bad, message, expected, params=GREEDY, config=None):
    """GOOD before and behind a bad prompt, in one call."""
    each = [GREEDY, GREEDY, params, GREEDY, GREEDY]
    outputs = engine.generate([*GOOD[:2], bad, *GOOD[2:]], each, config=config)
    failed = outputs.pop(2)
    assert failed.finish_reason == "error"
    assert message in failed.error
    assert [output.error for output in outputs] == [None] * len(GOOD)
    assert [output.token_ids for output in outputs] == expected
    return failed


# --- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "empty prompt: give at least 1 token"),
        (torch.zeros(0, dtype=torch.int64), "empty prompt"),
        ([5, 256], "token ids must be ints in [0, 256): got 256"),
        ([-1], "token ids must be ints in [0, 256): got -1"),
        ([2**70], "token ids must be ints in [0, 256)"),
        ([5, True], "token ids must be ints in [0, 256): got True"),
        ([False], "token ids must be ints in [0, 256): got False"),
        ([5.0], "token ids must be ints in [0, 256): got 5.0"),
        (["5"], "token ids must be ints in [0, 256): got '5'"),
        ([None], "token ids must be ints in [0, 256): got None"),
        ([[5, 6]], "token ids must be ints in [0, 256): got [5, 6]"),
        (torch.tensor([[5, 6]]), "token ids must be ints in [0, 256): got [5, 6]"),
        (torch.tensor([0.5]), "token ids must be ints in [0, 256): got 0.5"),
        (torch.tensor(5), "a prompt is text or a list of token ids: got Tensor"),
        (5, "a prompt is text or a list of token ids: got int 5"),
        (None, "a prompt is text or a list of token ids: got NoneType None"),
        (b"abc", "a prompt is text or a list of token ids: got bytes"),
        ({1: 2}, "a prompt is text or a list of token ids: got dict"),
        ("text", "is text, but the engine has no tokenizer: give token ids"),
        ([5] * 149, "149 prompt tokens and max_tokens=12, 161 together, but the engine serves at most 160"),
        ([5] * 10_000, "shorten the prompt, lower max_tokens"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_prompt_fails_alone(engine, expected, bad, message):
    failed = assert_only_bad_fails(engine, bad, message, expected)
    assert failed.token_ids == ()
    with pytest.raises(skv.RequestError):
        engine.add_request(bad, GREEDY)


@pytest.mark.parametrize("kind", [tuple, torch.tensor, np.array], ids=["tuple", "tensor", "array"])
def test_token_ids_may_come_as_any_sequence(engine, expected, kind):
    outputs = engine.generate([kind(prompt) for prompt in GOOD], GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert all(type(token) is int for output in outputs for token in output.prompt_ids)


def test_a_prompt_longer_than_the_pool_fails_alone(model, expected):
    config = SPARSE.with_(num_full_layers=3)
    small = OPTIONS.with_(kv_memory_bytes=80 << 10, max_num_seqs=2, max_batch_tokens=160)
    with skv.Engine(model, SPARSE, small) as engine:
        name = engine.add_request(GOOD[2], GREEDY, stream=False)
        with pytest.raises(skv.RequestError, match=r"needs 120 blocks .* but the pool has \d+: shorten the prompt"):
            engine.add_request([5] * 149, skv.SamplingParams(max_tokens=11), config=config)
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        assert [(output.request_id, output.token_ids) for output in outputs] == [(name, expected[2])]


def test_a_taken_id_is_refused_and_its_owner_goes_on(engine, expected):
    engine.add_request(GOOD[2], GREEDY, request_id="mine", stream=False)
    for _ in range(4):
        with pytest.raises(skv.RequestError, match="request 'mine' is known already"):
            engine.add_request(GOOD[1], GREEDY, request_id="mine")
        engine.step()
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [output.token_ids for output in outputs] == [expected[2]]


# --- mistakes of the whole call -----------------------------------------------------------------------------------


def test_no_prompts_give_no_outputs(engine):
    assert engine.generate([]) == []
    assert engine.generate([], []) == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.generate("text"), skv.RequestError, "takes a list of prompts: got one text, 'text'"),
        (lambda e: e.generate(GOOD, [GREEDY]), skv.RequestError, "4 prompts but 1 sampling parameters"),
        (
            lambda e: e.generate(GOOD, {"max_tokens": 3}),
            skv.ConfigError,
            "must be SamplingParams or a GenerationConfig",
        ),
        (lambda e: e.generate(GOOD, [GREEDY, GREEDY, GREEDY, 5]), skv.ConfigError, "a GenerationConfig: got 5"),
        (lambda e: e.generate(GOOD, GREEDY, config={}), skv.ConfigError, "config must be a SparseKVConfig: got {}"),
        (lambda e: e.generate(GOOD, GenerationConfig(num_beams=4)), skv.ConfigError, "num_beams=4 is not supported"),
        (lambda e: e.add_request([5], request_id=5), skv.RequestError, "request_id must be a str: got 5"),
        (
            lambda e: e.add_request([5], skv.SamplingParams(stop_strings=("x",))),
            skv.ConfigError,
            "needs a tokenizer: give one, or use stop_token_ids",
        ),
        (
            lambda e: e.add_request([5], GREEDY, config=SPARSE.with_(full_layers=[7], num_full_layers=None)),
            skv.ConfigError,
            "full_layers names layer 7",
        ),
    ],
)
def test_a_mistake_of_the_call_raises_and_leaves_nothing_behind(engine, expected, call, error, message):
    with pytest.raises(error, match=message):
        call(engine)
    assert_nothing_left(engine)
    assert [output.token_ids for output in engine.generate(GOOD, GREEDY)] == expected


def test_generate_beside_other_requests_is_refused(engine):
    engine.add_request(GOOD[1], GREEDY, request_id="other")
    with pytest.raises(skv.RequestError, match=r"use add_request\(\) and step\(\)"):
        engine.generate(GOOD, GREEDY)
    engine.abort("other")


# --- tokenizers ---------------------------------------------------------------------------------------------------


class Tokenizer:
    """Fails where its text or its tokens tell it to."""

    bad_token = None

    def __call__(self, text):
        if text == "raise":
            raise OSError("no such file")
        return {"input_ids": [5, 999] if text == "beyond" else [5, 6]}

    def decode(self, token_ids, **_):
        if self.bad_token in token_ids:
            raise ValueError(f"cannot decode {self.bad_token}")
        return "".join(chr(ord("a") + i % 26) for i in token_ids)


@pytest.fixture
def with_tokenizer(model):
    with skv.Engine(model, SPARSE, OPTIONS, tokenizer=Tokenizer()) as engine:
        yield engine
        assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", r"the tokenizer fails on it (OSError: no such file): give token ids"),
        ("beyond", "token ids must be ints in [0, 256): got 999"),
    ],
)
def test_a_text_that_the_tokenizer_fails_on_fails_alone(with_tokenizer, expected, text, message):
    assert_only_bad_fails(with_tokenizer, text, message, expected)


@pytest.mark.parametrize("stops", [(), ("zzzz",)], ids=["", "stop string"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_token_that_cannot_be_decoded_fails_its_request_alone(with_tokenizer, expected, stream, stops):
    tokens = expected[2]
    bad = next(token for token in tokens if not any(token in other for other in (*expected[:2], expected[3])))
    with_tokenizer.tokenizer.bad_token = bad
    params = skv.SamplingParams(max_tokens=12, ignore_eos=True, stop_strings=stops)
    for i, prompt in enumerate(GOOD):
        with_tokenizer.add_request(prompt, params, request_id=str(i), stream=stream)
    ended = {}
    while with_tokenizer.has_unfinished:
        ended |= {int(o.request_id): o for o in with_tokenizer.step() if o.is_finished}
    failed = ended.pop(2)
    assert (failed.finish_reason, failed.error) == ("error", f"ValueError: cannot decode {bad}")
    assert failed.token_ids == tokens[: len(failed.token_ids)]
    assert bad in failed.token_ids
    assert {i: output.token_ids for i, output in ended.items()} == {i: expected[i] for i in (0, 1, 3)}


def test_an_abort_ends_a_request_even_if_its_tokens_cannot_be_decoded(with_tokenizer, expected):
    with_tokenizer.tokenizer.bad_token = expected[1][0]
    with_tokenizer.add_request(GOOD[1], GREEDY, request_id="a", stream=False)
    for _ in range(3):
        with_tokenizer.step()
    output = with_tokenizer.abort("a")
    assert (output.finish_reason, output.token_ids) == ("abort", expected[1][:2])
    assert "cannot decode" in output.error


# --- scorers and models -------------------------------------------------------------------------------------------


def scorer_that(fails):
    @skv.register_scorer
    class Faulty(skv.Scorer):
        """Scores by key norm, except for prompts of one length."""

        name = "faulty"

        def score(self, inputs):
            scores = inputs.keys.float().norm(dim=-1)
            return fails(scores) if inputs.keys.shape[2] == BAD_LENGTH else scores

    return "faulty"


def _raises(scores):
    raise ZeroDivisionError("my own bug")


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("decode", ["replace_lowest", "grow"])
@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda scores: scores * float("nan"), "a scorer returned NaN, infinity or more than 1e+30 for this prompt"),
        (lambda scores: scores.index_fill(2, torch.tensor([7]), float("inf")), "a scorer returned NaN, infinity"),
        (lambda scores: scores.index_fill(2, torch.tensor([7]), -3e38), "more than 1e+30"),
        (lambda scores: scores[:, :, 1:], "ScoreError: scorer 'faulty', layer 1: expected float32 scores [1, 2, 33]"),
        (lambda scores: scores.double(), "expected float32 scores"),
        (lambda scores: None, "got NoneType"),
        (_raises, "ZeroDivisionError: my own bug"),
    ],
    ids=["nan", "inf", "huge", "shape", "dtype", "None", "raises"],
)
def test_a_prompt_that_the_scorer_fails_on_fails_alone(model, fails, message, chunk, decode):
    config = SPARSE.with_(scorer=scorer_that(fails), decode=decode)
    with skv.Engine(model, config, OPTIONS.with_(prefill_chunk_tokens=chunk)) as engine:
        expected = [output.token_ids for output in engine.generate(GOOD, GREEDY)]
        failed = assert_only_bad_fails(engine, BAD_PROMPT, message, expected)
        assert failed.token_ids == ()
        assert_only_bad_fails(engine, BAD_PROMPT, message, expected)  # and whatever it left in the blocks is harmless
        assert_nothing_left(engine)


@pytest.mark.parametrize("changes", [{}, {"num_full_layers": 3}, {"decode": "grow"}], ids=str)
@pytest.mark.parametrize("chunk", [None, 10])
def test_a_request_whose_numbers_are_nan_fails_alone_and_poisons_no_block(model, changes, chunk, monkeypatch):
    """The embedding of one token is NaN, and with it every key, value and logit of prompts that hold it."""
    config, bad = SPARSE.with_(**changes), [POISON_ID, *GOOD[3]]
    weight = model.get_input_embeddings().weight
    monkeypatch.setattr(weight, "data", weight.data.index_fill(0, torch.tensor([POISON_ID]), float("nan")))
    with skv.Engine(model, config, OPTIONS.with_(prefill_chunk_tokens=chunk)) as engine:
        expected = [output.token_ids for output in engine.generate(GOOD, GREEDY)]
        assert not any(POISON_ID in tokens for tokens in expected)
        for _ in range(3):  # later requests get the blocks that held NaN
            failed = assert_only_bad_fails(engine, bad, "the model's logits hold NaN, or no finite value", expected)
            assert failed.token_ids == ()
        assert_nothing_left(engine)


def test_logits_that_turn_nan_end_the_request_with_what_it_had(engine, model, expected, monkeypatch):
    tokens = expected[3]
    bad = next(token for token in tokens[3:] if not any(token in other for other in expected[:3]))
    weight = model.get_input_embeddings().weight
    monkeypatch.setattr(weight, "data", weight.data.index_fill(0, torch.tensor([bad]), float("nan")))
    assert not any(bad in prompt for prompt in GOOD[:4])
    outputs = engine.generate(GOOD, GREEDY)
    assert outputs[3].error == "the model's logits hold NaN, or no finite value: no token can be sampled"
    assert outputs[3].token_ids == tokens[: tokens.index(bad) + 1]
    assert [output.token_ids for output in outputs[:3]] == expected[:3]


# --- the engine itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at_step", [0, 1, 5])
def test_a_forward_pass_that_raises_ends_what_ran_and_the_engine_goes_on(engine, expected, error, at_step, monkeypatch):
    forward, calls = engine._runner.forward, iter(range(1000))

    def failing(*args):
        if next(calls) == at_step:
            raise error
        return forward(*args)

    monkeypatch.setattr(engine._runner, "forward", failing)
    with pytest.raises(type(error)):
        engine.generate(GOOD, GREEDY)
    assert_nothing_left(engine)
    assert [output.token_ids for output in engine.generate(GOOD, GREEDY)] == expected


def test_a_step_that_raises_leaves_nobody_waiting_for_tokens_that_never_come(engine, expected, monkeypatch):
    names = [engine.add_request(prompt, GREEDY) for prompt in GOOD]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert_nothing_left(engine)
    assert engine.step() == []
    assert [engine.abort(name) for name in names] == [None] * len(GOOD)
    assert [output.token_ids for output in engine.generate(GOOD, GREEDY)] == expected
