"""What a request can ask of the engine and what comes back: ends, log-probabilities, aborts, reports, a clean close."""

from math import ceil

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.testing.models import tiny_llama

NUM_LAYERS, BUDGET, BLOCK = 3, 21, 4
SPARSE = skv.SparseKVConfig(
    num_full_layers=1, budget=BUDGET, num_sink_tokens=2, num_recent_tokens=8, observation_window=6
)
DENSE = SPARSE.with_(num_full_layers=NUM_LAYERS)
OPTIONS = skv.EngineConfig(
    kv_memory_bytes=2 << 20, max_num_seqs=4, max_batch_tokens=64, block_size=BLOCK, max_model_len=128
)
PROMPT = [(7 * i) % 250 + 3 for i in range(30)]


class Letters:
    """A tokenizer whose tokens are single letters."""

    def __call__(self, text):
        return {"input_ids": [3 + ord(letter) for letter in text]}

    def decode(self, token_ids, **_):
        return "".join(chr(ord("a") + i % 26) for i in token_ids)


def greedy(**options):
    return skv.SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | options))


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=NUM_LAYERS)


@pytest.fixture
def engine(model):
    with skv.Engine(model, SPARSE, OPTIONS, tokenizer=Letters()) as engine:
        yield engine
        assert engine._blocks.num_free == engine._blocks.num_usable


@pytest.fixture(scope="module")
def answer(model):
    """The greedy output of PROMPT."""
    with skv.Engine(model, SPARSE, OPTIONS) as engine:
        return engine.generate([PROMPT], greedy())[0].token_ids


def bytes_of_a_row(group):
    """By the tensors, the ids of the vocabulary apart, which belong to no row."""
    sampler = [t for name, t in vars(group.sampler).items() if isinstance(t, torch.Tensor) and name != "_vocab"]
    return (group.rows.nbytes + sum(t.nbytes for t in sampler)) // group.rows.num_rows


def finish(engine):
    """Outputs of all live requests by id."""
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step() if output.is_finished}
    return outputs


# --- ends ---------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_request_and_is_its_last_token(engine, answer):
    stop = answer[9]
    at = answer.index(stop)
    output = engine.generate([PROMPT], greedy(stop_token_ids=(stop,)))[0]
    assert (output.token_ids, output.finish_reason) == (answer[: at + 1], "stop")


def test_the_models_own_end_token_ends_a_request_that_does_not_ignore_it(model, answer, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", answer[5])
    with skv.Engine(model, SPARSE, OPTIONS) as engine:
        ended, ignored = engine.generate([PROMPT] * 2, [greedy(ignore_eos=False), greedy()])
    assert ended.token_ids == answer[: answer.index(answer[5]) + 1]
    assert (ended.finish_reason, ignored.finish_reason) == ("stop", "length")
    assert ignored.token_ids == answer


def test_a_stop_string_ends_the_request_and_its_text_before_it(engine, answer):
    text = Letters().decode(answer)
    stop = text[7:10]
    output = engine.generate([PROMPT], greedy(stop_strings=(stop,)))[0]
    assert output.text == text[: text.index(stop)]
    assert output.token_ids == answer[: text.index(stop) + 3]
    assert output.finish_reason == "stop"


def test_the_last_of_max_tokens_ends_a_request_even_if_it_is_the_first(engine, answer):
    for count in (1, 2, 23):
        output = engine.generate([PROMPT], greedy(max_tokens=count))[0]
        assert (output.token_ids, output.finish_reason) == (answer[:count], "length")


def test_no_stop_counts_before_min_tokens_and_its_token_is_not_even_chosen(engine, answer):
    stop = answer[0]
    output = engine.generate([PROMPT], greedy(stop_token_ids=(stop,), min_tokens=6))[0]
    assert len(output.token_ids) >= 7 or output.finish_reason == "length"
    assert stop not in output.token_ids[:6]


def test_text_prompts_are_tokenized_and_text_comes_back(engine):
    by_text, by_ids = engine.generate(["hello", [3 + ord(letter) for letter in "hello"]], greedy())
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.prompt_ids == by_ids.prompt_ids
    assert by_text.text == Letters().decode(by_text.token_ids)


def test_streamed_text_joins_to_the_whole(engine, answer):
    engine.add_request(PROMPT, greedy(), request_id="a")
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert "".join(output.new_text for output in outputs) == outputs[-1].text == Letters().decode(answer)
    assert len(outputs) == len(answer)


def test_a_step_returns_nothing_of_requests_that_do_not_stream(engine):
    engine.add_request(PROMPT, greedy(), request_id="quiet", stream=False)
    engine.add_request(PROMPT, greedy(), request_id="loud")
    seen = {"quiet": 0, "loud": 0}
    while engine.has_unfinished:
        for output in engine.step():
            seen[output.request_id] += 1
    assert seen == {"quiet": 1, "loud": 24}


# --- log-probabilities --------------------------------------------------------------------------------------------


def test_log_probabilities_are_the_dense_models(model):
    params = [greedy(logprobs=count, **more) for count, more in [(0, {}), (3, {"repetition_penalty": 1.3}), (5, {})]]
    params[2] = greedy(logprobs=5, do_sample=True, temperature=1.5, seed=4)
    with skv.Engine(model, DENSE, OPTIONS) as engine:
        outputs = engine.generate([PROMPT] * 3 + [PROMPT], [*params, greedy()])
    assert outputs[3].logprobs is None
    for output, one in zip(outputs[:3], params, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + list(output.token_ids)])).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        for row, entry in zip(expected, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
            top, ids = row.topk(one.logprobs)
            assert [i for i, _ in entry.top] == ids.tolist()
            assert [p for _, p in entry.top] == pytest.approx(top.tolist(), abs=1e-4)


# --- aborts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 12, 23, 24, 25, 26, 27])
@pytest.mark.parametrize("length", [3, 100])
def test_an_abort_in_any_state_disturbs_nobody(engine, answer, num_steps, length):
    """Queued, between chunks, decoding, fully scheduled with its last token on the way: one of these every time."""
    prompt = [(5 * i) % 250 + 3 for i in range(length)]
    engine.add_request(PROMPT, greedy(), request_id="first", stream=False)
    engine.add_request(prompt, greedy(), request_id="gone", stream=False)
    engine.add_request(PROMPT, greedy(), request_id="last", stream=False)
    ended = {}
    for _ in range(num_steps):
        ended |= {output.request_id: output for output in engine.step()}
    aborted = engine.abort("gone")
    assert (aborted is None) == ("gone" in ended)
    if aborted is not None:
        assert aborted.finish_reason == "abort"
        assert len(aborted.token_ids) < 24
        assert engine.abort("gone") is None
    ended |= finish(engine)
    assert ended["first"].token_ids == ended["last"].token_ids == answer
    assert engine.abort("gone") is None


def test_an_aborted_request_keeps_what_it_had_and_reports_its_blocks(engine, answer):
    engine.add_request(PROMPT, greedy(), request_id="a", stream=False)
    engine.add_request(PROMPT, greedy(), request_id="waits" * 2, stream=False)
    for _ in range(9):
        engine.step()
    held = engine._blocks.num_usable - engine._blocks.num_free
    output = engine.abort("a")
    assert output.token_ids == answer[:8]
    freed = held - (engine._blocks.num_usable - engine._blocks.num_free)
    assert output.report.cache_bytes == freed * engine.memory.block_bytes + engine.memory.row_bytes
    finish(engine)


def test_an_abort_of_a_request_that_never_ran_reports_no_bytes(engine):
    engine.add_request(PROMPT, greedy(), request_id="a")
    report = engine.abort("a").report
    assert (report.cache_bytes, report.queue_s, report.ttft_s, report.itl_s) == (0, None, None, ())


def test_an_id_can_be_used_again_once_its_request_has_ended(engine, answer):
    for _ in range(3):
        engine.add_request(PROMPT, greedy(), request_id="again", stream=False)
        assert finish(engine)["again"].token_ids == answer
    engine.add_request(PROMPT, greedy(), request_id="again", stream=False)
    for _ in range(3):
        engine.step()
    engine.abort("again")
    engine.add_request(PROMPT, greedy(), request_id="again", stream=False)
    assert finish(engine)["again"].token_ids == answer


def test_ids_that_the_engine_gives_avoid_those_that_are_taken(engine):
    engine.add_request(PROMPT, greedy(), request_id="1")
    names = [engine.add_request(PROMPT, greedy()) for _ in range(3)]
    assert names == ["0", "2", "3"]
    for name in ("1", *names):
        engine.abort(name)


# --- what is left out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "new"), [(30, 98), (1, 127), (126, 2), (127, 1)])
def test_without_parameters_a_request_may_generate_what_the_engine_has_room_for(engine, length, new):
    assert OPTIONS.max_model_len == length + new
    output = engine.generate([(PROMPT * 5)[:length]])[0]
    assert output.error is None
    assert len(output.token_ids) == new or output.finish_reason == "stop"
    name = engine.add_request((PROMPT * 5)[:length])
    assert engine._tracker._live[name].request.params.max_tokens == new
    engine.abort(name)


def test_without_parameters_it_generates_256_tokens_at_the_most(model):
    with skv.Engine(model, SPARSE, OPTIONS.with_(max_model_len=400)) as engine:
        name = engine.add_request(PROMPT)
        assert engine._tracker._live[name].request.params.max_tokens == 256


def test_without_parameters_a_prompt_that_leaves_no_room_is_refused_by_its_length(engine):
    output = engine.generate([(PROMPT * 5)[:128]])[0]
    assert "128 prompt tokens and max_tokens=1, 129 together, but the engine serves at most 128" in output.error


@pytest.mark.parametrize("thing", [None, "some/model", torch.nn.Linear(2, 2), skv.SparseKVConfig()])
def test_what_is_no_model_is_refused_with_what_to_do(thing):
    with pytest.raises(skv.ModelError, match=r"causal language model of transformers, got .* load it first, AutoModel"):
        skv.Engine(thing, SPARSE, OPTIONS)


# --- reports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "new", "config"),
    [
        (1, 1, SPARSE),
        (5, 8, SPARSE),
        (30, 1, SPARSE),
        (30, 24, SPARSE),
        (100, 5, SPARSE),
        (30, 24, DENSE),
        (30, 24, SPARSE.with_(budget=0.5)),
        (30, 24, SPARSE.with_(num_full_layers=0)),
    ],
)
def test_the_reported_bytes_are_the_blocks_and_the_row_that_the_request_held(model, length, new, config):
    with skv.Engine(model, config, OPTIONS) as engine:
        finish_, held = engine._scheduler.finish, []

        def note_and_finish(*args):
            held.append(engine._blocks.num_usable - engine._blocks.num_free)
            finish_(*args)

        engine._scheduler.finish = note_and_finish
        report = engine.generate([(PROMPT * 4)[:length]], greedy(max_tokens=new))[0].report
        memory, row_bytes = engine.memory, bytes_of_a_row(engine._groups.own)
    seen = length + new - 1  # the last token is never fed back
    kept = ceil(config.budget * length) if isinstance(config.budget, float) else config.budget
    window = ceil(min(max(kept, 10), length + new) / BLOCK)
    full = config.num_full_layers
    assert held == [full * ceil(seen / BLOCK) + (NUM_LAYERS - full) * window]
    assert report.cache_bytes == held[0] * memory.block_bytes + row_bytes
    assert memory.block_bytes == 2 * 2 * 16 * BLOCK * 4  # key and value, heads, dimensions, tokens, fp32
    assert report.dense_cache_bytes == (length + new) * NUM_LAYERS * 2 * 2 * 16 * 4


def test_a_request_with_its_own_configuration_reports_its_own_row(engine):
    output = engine.generate([PROMPT], greedy(), config=DENSE)[0]
    blocks = NUM_LAYERS * ceil((len(PROMPT) + 23) / BLOCK)
    row_bytes = bytes_of_a_row(engine._groups[engine._groups.plan_of(DENSE)[0]])
    assert output.report.cache_bytes == blocks * engine.memory.block_bytes + row_bytes


def test_times_are_in_order(engine):
    output = engine.generate([PROMPT], greedy())[0]
    report = output.report
    assert 0 <= report.queue_s <= report.ttft_s <= report.total_s
    assert len(output.itl_s) == 23
    assert min(output.itl_s) >= 0
    assert sum(output.itl_s) == pytest.approx(report.total_s - report.ttft_s, abs=0.1)
    assert output.ttft_s == report.ttft_s


# --- the model afterwards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_closed_engine_leaves_the_model_bit_by_bit_as_it_was(attention):
    model, ids = tiny_llama(num_layers=2, attn_implementation=attention), torch.tensor([PROMPT])
    with torch.no_grad():
        before = model(ids).logits
        engine = skv.Engine(model, SPARSE, OPTIONS)
        engine.generate([PROMPT], greedy())
        engine.close()
        engine.close()
        assert model.config._attn_implementation == attention
        assert torch.equal(model(ids).logits, before)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert skv.generate(model, ids, SPARSE, **settings).new_tokens.shape == (1, 8)


def test_closing_ends_what_is_live(model):
    engine = skv.Engine(model, SPARSE, OPTIONS)
    for _ in range(6):
        engine.add_request(PROMPT, greedy())
    engine.step()
    engine.step()
    engine.close()
    assert not engine.has_unfinished
    assert engine._blocks.num_free == engine._blocks.num_usable
    assert engine.abort("0") is None
    for call in (engine.step, lambda: engine.add_request(PROMPT), lambda: engine.generate([PROMPT])):
        with pytest.raises(skv.CacheError, match="the engine is closed: make a new one"):
            call()


def test_an_engine_that_cannot_be_made_leaves_the_model_as_it_was():
    model = tiny_llama(num_layers=2)
    with pytest.raises(skv.ConfigError, match="kv_memory_bytes=1,000 does not hold one request"):
        skv.Engine(model, SPARSE, OPTIONS.with_(kv_memory_bytes=1000))
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        model(torch.tensor([PROMPT]))


def test_one_model_has_one_engine_at_a_time(model):
    with skv.Engine(model, SPARSE, OPTIONS), pytest.raises(skv.ModelError, match="in use by another Engine"):
        skv.Engine(model, SPARSE, OPTIONS)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_taken_from_its_engine_is_noticed(engine, model, answer):
    model.set_attn_implementation("sdpa")
    with pytest.raises(skv.ModelError, match="was set to something other than 'sparsekv_paged'"):
        engine.generate([PROMPT], greedy())
    model.set_attn_implementation("sparsekv_paged")
    assert engine.generate([PROMPT], greedy())[0].token_ids == answer


def test_the_model_cannot_be_used_elsewhere_while_an_engine_has_it(engine, model):
    with pytest.raises(skv.ModelError, match=r"call engine.close\(\) before"):
        model(torch.tensor([PROMPT]))
