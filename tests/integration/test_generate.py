"""Everything `generate` can be asked for works with a sparse cache, or is refused by name."""

import copy

import pytest
import torch
from transformers import TextStreamer

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD

pytestmark = pytest.mark.usefixtures("registered")

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)
LENGTH, NEW_TOKENS = 70, 20
PADS = (30, 5, 0)


@pytest.fixture
def batch():
    ids, mask = torch.randint(3, 256, (3, LENGTH)), torch.ones(3, LENGTH, dtype=torch.long)
    for row, pads in enumerate(PADS):
        mask[row, :pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, cache=None, **options):
    cache = skv.SparseKVCache(model.config, SMALL) if cache is None else cache
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(**inputs, **{CACHE_KEYWORD: cache}, **settings | options)


def test_each_request_of_a_padded_batch_equals_that_request_alone(model, batch):
    together = generate(model, batch)
    for row, pads in enumerate(PADS):
        alone = {name: tensor[row : row + 1, pads:] for name, tensor in batch.items()}
        assert torch.equal(together[row, LENGTH:], generate(model, alone)[0, LENGTH - pads :])


def test_no_padding_is_ever_kept(model, batch):
    cache = skv.SparseKVCache(model.config, SMALL)
    generate(model, batch, cache)
    report = cache.report(positions=True)
    # The last generated token is never fed back, so it is not in the cache.
    assert report["tokens_seen"] == [LENGTH - pads + NEW_TOKENS - 1 for pads in PADS]
    for layer in report["layers"]:
        for row, heads in enumerate(layer["positions"]):
            for head in heads:
                assert len(head) == len(set(head)) == layer["stored"][row]
                assert min(head) == 0
                assert max(head) == report["tokens_seen"][row] - 1


@pytest.mark.parametrize("chunk", [1, 7, 23, 64, 69, 70, 100])
def test_a_chunked_prefill_equals_one_pass(model, batch, chunk):
    whole = generate(model, batch)
    cache = skv.SparseKVCache(model.config, SMALL, prompt_length=LENGTH)
    assert torch.equal(whole, generate(model, batch, cache, prefill_chunk_size=chunk))


@pytest.mark.parametrize("chunk", [7, 32, 64])
def test_chunks_need_no_announcement_unless_the_last_is_a_single_token(model, batch, chunk):
    assert LENGTH % chunk != 1
    assert torch.equal(generate(model, batch), generate(model, batch, prefill_chunk_size=chunk))


@pytest.mark.parametrize("chunk", [None, 23, 7])
def test_a_prompt_shorter_than_announced_ends_where_decoding_begins(model, batch, chunk):
    expected = skv.SparseKVCache(model.config, SMALL)
    answer = generate(model, batch, expected, prefill_chunk_size=chunk)
    cache = skv.SparseKVCache(model.config, SMALL, prompt_length=1000)
    # 70 tokens in chunks of 23 leave a single one, which looks like decoding unless it is announced.
    seen = 69 if chunk == 23 else LENGTH
    with pytest.warns(UserWarning, match=f"prompt_length=1000 was announced, but the prompt ended after {seen} tokens"):
        assert torch.equal(answer, generate(model, batch, cache, prefill_chunk_size=chunk))
    assert cache.report(positions=True) == expected.report(positions=True)


def test_a_short_prompt_fed_token_by_token_stays_open_and_the_report_says_so(model, batch):
    cache = skv.SparseKVCache(model.config, SMALL, prompt_length=1000)
    generate(model, batch, cache, prefill_chunk_size=1)
    assert cache.report()["is_prompt_open"]


def test_a_reset_forgets_the_announced_length(model, batch):
    cache = skv.SparseKVCache(model.config, SMALL, prompt_length=LENGTH)
    generate(model, batch, cache)
    cache.reset()
    assert cache.prompt_end is None
    cache.expect_prompt(LENGTH)
    assert torch.equal(generate(model, batch, cache), generate(model, batch))


def test_sampling_is_reproducible_and_beams_return_what_was_asked(model, batch):
    torch.manual_seed(5)
    first = generate(model, batch, do_sample=True)
    torch.manual_seed(5)
    assert torch.equal(first, generate(model, batch, do_sample=True))
    beams = generate(model, batch, num_beams=3, num_return_sequences=2)
    assert beams.shape == (6, LENGTH + NEW_TOKENS)
    several = generate(model, batch, do_sample=True, num_return_sequences=2)
    assert several.shape == (6, LENGTH + NEW_TOKENS)


def test_one_new_token_and_a_one_token_prompt(model, batch):
    assert generate(model, batch, max_new_tokens=1).shape == (3, LENGTH + 1)
    single = {name: tensor[:, -1:] for name, tensor in batch.items()}
    cache = skv.SparseKVCache(model.config, SMALL)
    assert generate(model, single, cache, max_new_tokens=60).shape == (3, 61)
    assert [layer["stored"] for layer in cache.report()["layers"]] == [[60] * 3, [24] * 3, [24] * 3]


def test_a_streamer_gets_every_token(model, batch):
    seen = []

    class Collector(TextStreamer):
        def __init__(self):
            pass

        def put(self, value):
            seen.extend(value.flatten().tolist())

        def end(self):
            seen.append("end")

    one = {name: tensor[2:] for name, tensor in batch.items()}
    result = generate(model, one, streamer=Collector())
    assert seen == [*result[0].tolist(), "end"]


def test_three_turns_on_one_cache_feed_nothing_twice(model):
    cache = skv.SparseKVCache(model.config, SMALL)
    history = torch.randint(3, 256, (1, 60))
    fed = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for turn in (0, 11, 17):
        history = torch.cat([history, torch.randint(3, 256, (1, turn))], dim=1)
        inputs = {"input_ids": history, "attention_mask": torch.ones_like(history)}
        history = generate(model, inputs, cache, max_new_tokens=5)
    hook.remove()
    # Of each answer, the last token goes in with the next turn.
    assert fed == [60, 1, 1, 1, 1, 12, 1, 1, 1, 1, 18, 1, 1, 1, 1]
    assert cache.get_seq_length() == history.shape[1] - 1


def test_two_questions_on_copies_of_one_compressed_context_are_independent(model):
    context = torch.randint(3, 256, (1, 60))
    cache = skv.SparseKVCache(model.config, SMALL)
    with torch.no_grad():
        model(input_ids=context, use_cache=True, **{CACHE_KEYWORD: cache})
    cache.compress()
    assert {tuple(layer["stored"]) for layer in cache.report()["layers"][1:]} == {(24,)}
    questions = [torch.randint(3, 256, (1, 6)) for _ in range(2)]

    def ask(question, own):
        ids = torch.cat([context, question], dim=1)
        return generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, own)

    alone = [ask(question, copy.deepcopy(cache)) for question in questions]
    before = cache.report(positions=True)
    together = [ask(question, copy.deepcopy(cache)) for question in reversed(questions)]
    assert torch.equal(alone[0], together[1])
    assert torch.equal(alone[1], together[0])
    assert cache.report(positions=True) == before


def test_calls_leave_no_trace(model, batch):
    first = skv.SparseKVCache(model.config, SMALL)
    answer = generate(model, batch, first)
    other = {name: tensor.flip(0) for name, tensor in batch.items()}
    for _ in range(3):
        generate(model, other)
        again = skv.SparseKVCache(model.config, SMALL)
        assert torch.equal(answer, generate(model, batch, again))
        assert again.report() == first.report()
    first.reset()
    assert torch.equal(answer, generate(model, batch, first))


def test_prompt_lookup_decoding_is_refused(model, batch):
    one = {name: tensor[2:] for name, tensor in batch.items()}
    one["input_ids"][0, 40:] = one["input_ids"][0, 10:40]  # something to look up
    with pytest.raises((skv.CacheError, ValueError), match="crop"):
        generate(model, one, prompt_lookup_num_tokens=3)
    with pytest.raises(skv.ConfigError, match="prompt_lookup_num_tokens"):
        skv.generate(model, one, SMALL, prompt_lookup_num_tokens=3)


def test_assisted_decoding_is_refused(tiny_llama, model, batch):
    """A rejected draft would have to be taken back out of what was evicted for it."""
    one = {name: tensor[2:] for name, tensor in batch.items()}
    assistant = tiny_llama(num_layers=1, seed=1)  # a model that guesses wrong
    with pytest.raises((skv.CacheError, ValueError), match="crop"):
        generate(model, one, assistant_model=assistant)
    with pytest.raises(skv.ConfigError, match="assistant_model"):
        skv.generate(model, one, SMALL, assistant_model=assistant)


def test_quantised_storage_is_refused(model, batch):
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, batch, cache_implementation="quantized")
    with pytest.raises(skv.ConfigError, match="cache_implementation"):
        skv.generate(model, batch, SMALL, cache_implementation="quantized")


def test_our_generate_leaves_the_model_as_it_was(tiny_llama, model, batch):
    plain = tiny_llama(num_layers=3)
    skv.unregister()
    output = skv.generate(plain, batch, SMALL, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    assert plain.config._attn_implementation == "sdpa"
    with pytest.raises((ValueError, KeyError)):
        plain.set_attn_implementation("sparsekv")
    skv.register()
    assert torch.equal(output.new_tokens, generate(model, batch, eos_token_id=plain.config.eos_token_id)[:, LENGTH:])
    assert output.text is None
    assert not any(name for name in vars(plain) if "sparse" in name.lower())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())


def test_our_generate_pads_on_the_left_what_is_padded_on_the_right(model, batch):
    """`model.generate` would write an answer behind the padding, with either cache."""
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    right = {name: tensor.flip(1) for name, tensor in batch.items()}
    output = skv.generate(model, right, SMALL, **settings)
    for row, pads in enumerate(PADS):
        alone = right["input_ids"][row : row + 1, : LENGTH - pads]
        assert torch.equal(output.sequences[row, pads:LENGTH], alone[0])
        assert torch.equal(output.new_tokens[row], skv.generate(model, alone, SMALL, **settings).new_tokens[0])


def test_a_right_padded_turn_is_moved_behind_what_the_cache_has_seen(model):
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    context, turn = torch.randint(3, 256, (2, 60)), torch.randint(3, 256, (2, 9))
    first = skv.generate(model, context, SMALL, **settings)
    ids = torch.cat([first.sequences, turn], dim=1)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    second = skv.generate(model, {"input_ids": ids, "attention_mask": mask}, cache=first.cache, **settings)
    for row, length in enumerate((9, 4)):
        alone = skv.generate(model, context[row : row + 1], SMALL, **settings)
        more = torch.cat([alone.sequences, turn[row : row + 1, :length]], dim=1)
        assert torch.equal(
            skv.generate(model, more, cache=alone.cache, **settings).new_tokens[0], second.new_tokens[row]
        )


def test_our_generate_goes_on_with_a_cache(tiny_llama):
    plain, ids = tiny_llama(num_layers=3), torch.randint(3, 256, (1, 60))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first = skv.generate(plain, ids, SMALL, **options)
    more = torch.cat([first.sequences, torch.randint(3, 256, (1, 9))], dim=1)
    second = skv.generate(plain, more, cache=first.cache, **options)
    assert second.report["tokens_seen"] == [60 + 5 + 9 + 4]
    with pytest.raises(skv.InputError, match="whole conversation"):
        skv.generate(plain, ids, cache=first.cache, **options)


def test_window_layers_select_one_by_one_when_the_prompt_is_announced(model, monkeypatch):
    """No two window layers ever hold the whole prompt at once."""
    from hf_sparsekv.hf import attention

    cache = skv.SparseKVCache(model.config, SMALL, prompt_length=60)
    most, original = [], attention.attend

    def watched(layer, *args, **kwargs):
        output = original(layer, *args, **kwargs)
        most.append(sum(window.columns.num_columns > 0 for window in cache._window_layers()))
        return output

    monkeypatch.setattr(attention, "attend", watched)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 256, (1, 60)), use_cache=True, **{CACHE_KEYWORD: cache})
    assert most == [0, 0, 0]
