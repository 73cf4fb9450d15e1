"""SamplingParams: checks, seeds, and the translation of a GenerationConfig."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from hf_sparsekv.engine.sampling_params import GENERATE_TOP_K, SamplingParams
from hf_sparsekv.errors import ConfigError

EOS = [2, 7]


def test_the_defaults_are_greedy_and_change_nothing():
    params = SamplingParams()

    assert (params.max_tokens, params.min_tokens, params.do_sample, params.temperature) == (256, 0, False, 1.0)
    assert (params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (None, None, None, 1.0)
    assert hash(params) == hash(SamplingParams())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, and finite: got 0"),
        ({"max_tokens": True}, "max_tokens must be an int: got True"),
        ({"max_tokens": 2.0}, "max_tokens must be an int: got 2.0"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, and finite: got -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is larger than max_tokens=8: lower"),
        ({"do_sample": 1}, "do_sample must be True or False: got 1"),
        ({"temperature": 0, "do_sample": True}, "got 0; for the most likely token every time, set do_sample=False"),
        ({"temperature": float("nan"), "do_sample": True}, "temperature must be at least 0.0001, and finite: got nan"),
        ({"temperature": float("inf"), "do_sample": True}, "got inf"),
        ({"temperature": "hot", "do_sample": True}, "temperature must be a number: got 'hot'"),
        (
            {"temperature": 0.5},
            "temperature=0.5 has no effect with do_sample=False: set do_sample=True or leave it out",
        ),
        ({"top_k": 5}, "top_k=5 has no effect with do_sample=False"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect with do_sample=False"),
        ({"min_p": 0.1}, "min_p=0.1 has no effect with do_sample=False"),
        ({"top_k": 0, "do_sample": True}, "top_k must be at least 1, and finite: got 0; None keeps every token"),
        ({"top_p": 1.5, "do_sample": True}, "top_p must be in [0.0, 1.0]: got 1.5"),
        ({"min_p": -0.1, "do_sample": True}, "min_p must be in [0.0, 1.0]: got -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in [0.01, 100.0]: got 0.0"),
        ({"seed": -1}, "seed must be in [0, 9223372036854775807]: got -1"),
        ({"logprobs": 129}, "logprobs must be in [0, 128]: got 129"),
        ({"stop_strings": ("a", "")}, "stop_strings holds an empty string"),
        ({"stop_strings": [3]}, "stop_strings must be strings: got [3]"),
        ({"stop_token_ids": "2"}, "stop_token_ids must be a list of token ids: got '2'"),
        ({"stop_token_ids": [-2]}, "a stop token id must be at least 0, and finite: got -2"),
        ({"stop_token_ids": range(65)}, "stop_token_ids has 65 entries, at most 64 are possible: leave some out"),
    ],
)
def test_an_impossible_option_names_the_value_the_limit_and_the_fix(options, message):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**options)

    assert message in str(error.value)


def test_sequences_become_tuples_without_repetitions():
    params = SamplingParams(stop_strings="\n", stop_token_ids=[5, 3, 5])

    assert (params.stop_strings, params.stop_token_ids) == (("\n",), (5, 3))


def test_the_tokens_that_end_a_request():
    assert SamplingParams(stop_token_ids=(3, 7)).end_token_ids(EOS) == (2, 7, 3)
    assert SamplingParams(stop_token_ids=(3, 7), ignore_eos=True).end_token_ids(EOS) == (3, 7)


def test_a_seed_of_ones_own_counts_and_an_id_gives_one_that_no_run_changes():
    assert SamplingParams(seed=5).request_seed("a") == 5
    seeds = {name: SamplingParams().request_seed(name) for name in ("a", "b", "request-17", "ü\udce4")}

    assert seeds["request-17"] == 5703195873633230480
    assert len(set(seeds.values())) == 4
    assert all(0 <= seed < 2**63 for seed in seeds.values())


# --- from a GenerationConfig ------------------------------------------------------------------------------------------


def test_options_of_a_generation_config_are_taken_over():
    config = GenerationConfig(
        max_new_tokens=9,
        min_new_tokens=2,
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.2,
        stop_strings=["x"],
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )

    params = SamplingParams.from_generation_config(config, [2])

    assert params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.2,
        stop_strings=("x",),
    )


def test_an_empty_config_gives_the_defaults_and_overrides_count():
    assert SamplingParams.from_generation_config(GenerationConfig(), EOS) == SamplingParams()
    config = GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.5)
    overridden = SamplingParams.from_generation_config(config, EOS, do_sample=False, max_tokens=3, seed=4)
    assert overridden == SamplingParams(max_tokens=3, seed=4)


def test_transformers_own_defaults_ask_for_nothing():
    config = GenerationConfig(**GenerationConfig._get_default_generation_params())
    config.max_length = None  # the 20 tokens that generate takes when nobody says how many

    assert SamplingParams.from_generation_config(config, EOS) == SamplingParams()


def test_sampling_takes_the_top_k_that_generate_would():
    assert GenerationConfig._get_default_generation_params()["top_k"] == GENERATE_TOP_K
    sampling = GenerationConfig(do_sample=True)

    assert SamplingParams.from_generation_config(sampling, EOS).top_k == GENERATE_TOP_K
    assert SamplingParams.from_generation_config(sampling, EOS, top_k=None).top_k is None
    assert SamplingParams.from_generation_config(GenerationConfig(do_sample=True, top_k=0), EOS).top_k is None


def test_options_of_sampling_are_left_out_when_the_config_says_greedy_and_raise_when_it_does_not_say():
    assert (
        SamplingParams.from_generation_config(GenerationConfig(do_sample=False, temperature=0.6), EOS).temperature == 1
    )
    with pytest.raises(ConfigError, match=r"temperature=0\.6 is set, but not do_sample: set it to True"):
        SamplingParams.from_generation_config(GenerationConfig(temperature=0.6), EOS)


@pytest.mark.parametrize(
    ("config_eos", "ignore_eos", "stop_ids"),
    [(None, False, ()), (7, True, (7,)), ([7, 2], False, ()), ([2, 7, 9], False, (9,)), (0, True, (0,))],
)
def test_the_config_decides_which_tokens_end_the_text(config_eos, ignore_eos, stop_ids):
    params = SamplingParams.from_generation_config(GenerationConfig(eos_token_id=config_eos), EOS)

    assert (params.ignore_eos, params.stop_token_ids) == (ignore_eos, stop_ids)
    ends = {config_eos} if isinstance(config_eos, int) else set(config_eos or EOS)
    assert set(params.end_token_ids(EOS)) == ends


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("num_return_sequences", 2),
        ("penalty_alpha", 0.6),
        ("no_repeat_ngram_size", 3),
        ("bad_words_ids", [[3]]),
        ("typical_p", 0.9),
        ("guidance_scale", 1.5),
        ("suppress_tokens", [3]),
        ("begin_suppress_tokens", [3]),
        ("forced_eos_token_id", 2),
        ("sequence_bias", {(3,): 1.0}),
        ("exponential_decay_length_penalty", (3, 1.1)),
        ("remove_invalid_values", True),
        ("max_time", 3.0),
        ("output_scores", True),
        ("use_cache", False),
        ("cache_implementation", "static"),
        ("prompt_lookup_num_tokens", 3),
        ("prefill_chunk_size", 64),
        ("token_healing", True),
        ("max_length", 64),
        ("min_length", 4),
        ("an_option_of_tomorrow", 1),
    ],
)
def test_an_option_that_the_engine_cannot_honour_raises_by_name(name, value):
    config = GenerationConfig()
    setattr(config, name, value)

    with pytest.raises(ConfigError, match=rf"^{name}=.* is not supported by the engine: \w+"):
        SamplingParams.from_generation_config(config, EOS)


def test_lengths_with_the_prompt_give_way_to_those_without_as_in_generate():
    config = GenerationConfig(max_new_tokens=5, max_length=64, min_new_tokens=1, min_length=3)

    params = SamplingParams.from_generation_config(config, EOS)

    assert (params.max_tokens, params.min_tokens) == (5, 1)


def test_an_unknown_override_gets_a_suggestion():
    with pytest.raises(ConfigError, match="unknown option 'max_new_tokens': did you mean 'max_tokens'"):
        SamplingParams.from_generation_config(GenerationConfig(), EOS, max_new_tokens=3)
    with pytest.raises(ConfigError, match="unknown option 'max_new_tokens': did you mean 'max_tokens'"):
        SamplingParams(max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"unknown option 'xyzzy': options are max_tokens, .*logprobs"):
        SamplingParams(xyzzy=3)
    params = SamplingParams(max_tokens=3, stop_strings=("a",))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == replace(params) == params


@pytest.mark.parametrize("eos", [2.5, "x", [2, 2.5], -1, True, {1: 2}, [[2]]], ids=str)
def test_an_end_token_that_is_none_is_named(eos):
    config = GenerationConfig()
    config.eos_token_id = eos
    with pytest.raises(ConfigError, match="eos_token_id must be"):
        SamplingParams.from_generation_config(config, (2,))


@pytest.mark.parametrize(("eos", "stops"), [(torch.tensor(3), (3,)), (torch.tensor([2, 3]), (3,)), ((2, 4), (4,))])
def test_end_tokens_may_be_tensors(eos, stops):
    config = GenerationConfig()
    config.eos_token_id = eos
    assert SamplingParams.from_generation_config(config, (2,)).stop_token_ids == stops
