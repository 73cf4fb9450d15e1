"""`generate` checks what it is given before any work is done, and no generation configuration gets around it."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import hf_sparsekv as skv

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)
IDS = torch.arange(3, 63)[None]
ONES = torch.ones_like(IDS)
GREEDY = {"do_sample": False, "pad_token_id": 2, "eos_token_id": None}
NAN = float("nan")


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


def generate(model, inputs=IDS, config=SMALL, **options):
    return skv.generate(model, inputs, config, **({"max_new_tokens": 4} | GREEDY | options))


# --- generation configurations ------------------------------------------------------------------------------------


def test_a_configuration_that_switches_the_cache_off_is_overruled(model):
    expected = generate(model)
    own = GenerationConfig(max_new_tokens=4, use_cache=False, **GREEDY)
    given = skv.generate(model, IDS, SMALL, generation_config=own)
    model.generation_config.use_cache = False
    of_model = generate(model)
    for output in (given, of_model):
        assert output.report["tokens_seen"] == [63]
        assert torch.equal(output.sequences, expected.sequences)
    assert own.use_cache is False  # the caller's object stays as it was
    assert model.generation_config.use_cache is False


@pytest.mark.parametrize("place", ["call", "given", "model"])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("prompt_lookup_num_tokens", 3, skv.ConfigError, "prompt_lookup_num_tokens needs a cache that can go back"),
        ("assistant_early_exit", 1, skv.ConfigError, "assistant_early_exit needs a cache that can go back"),
        ("cache_implementation", "static", skv.ConfigError, "cache_implementation names another cache"),
        ("max_new_tokens", 9999, skv.InputError, "60 tokens and 9999 are to be generated, but the model takes 4096"),
        ("prefill_chunk_size", 0, skv.ConfigError, "prefill_chunk_size must be an int from 1 .*got 0"),
    ],
)
def test_an_option_is_refused_wherever_it_is_set(model, place, name, value, error, message):
    options = {}
    if place == "call":
        options[name] = value
    elif place == "given":
        options["generation_config"] = GenerationConfig(**{name: value})
    else:
        setattr(model.generation_config, name, value)
    with pytest.raises(error, match=message):
        skv.generate(model, IDS, SMALL, **options)


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": None}, skv.ModelError, "got NoneType None: load it first"),
        ({"model": 5}, skv.ModelError, "got int 5"),
        ({"model": torch.nn.Linear(2, 2)}, skv.ModelError, "got Linear: load"),
        ({"config": None, "cache": DynamicCache()}, skv.ConfigError, "cache must be a SparseKVCache.*got DynamicCache"),
        ({"config": None, "cache": 5}, skv.ConfigError, "cache must be a SparseKVCache.*got int"),
        ({"cache": 5}, skv.ConfigError, "not both"),
        ({"tokenizer": 5}, skv.InputError, "tokenizer must be a tokenizer of transformers: got 5"),
        ({"generation_config": {}}, skv.ConfigError, "generation_config must be a GenerationConfig .*got {}"),
        ({"input_ids": IDS}, skv.ConfigError, "input_ids is set by this function"),
        *(
            ({"max_new_tokens": value}, skv.ConfigError, "max_new_tokens must be an int from 1 ")
            for value in ("x", [3], NAN, True, 2.5, 0, -1, 10**30)
        ),
        *(
            ({"prefill_chunk_size": value}, skv.ConfigError, "prefill_chunk_size must be an int from 1 ")
            for value in ("x", True, 2.5, 0, -1)
        ),
    ],
)
def test_arguments_that_mean_nothing_are_refused(model, options, error, message):
    with pytest.raises(error, match=message) as caught:
        generate(**({"model": model} | options))
    assert "\n" not in str(caught.value)


# --- prompts ------------------------------------------------------------------------------------------------------


def ids_with(**others):
    return {"input_ids": IDS} | others


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs is an empty list"),
        (IDS.tolist(), r"a list of inputs holds text: got \[3, 4.*torch.tensor\(ids\)"),
        (["a", None], "a list of inputs holds text: got None"),
        (IDS.numpy(), "got ndarray"),
        ({"input_ids": IDS.tolist()}, "input_ids must be a tensor .*got list .*return_tensors='pt'"),
        ({}, "must hold input_ids"),
        *((IDS.to(dtype), "input_ids must be int64 or int32: got") for dtype in (torch.float32, torch.bool)),
        *((IDS.to(dtype), "input_ids must be int64 or int32: got") for dtype in (torch.int8, torch.uint8)),
        (IDS * NAN, "input_ids must be int64 or int32: got float32"),
        (IDS.to(torch.complex64), "got complex64"),
        (IDS.to_sparse(), "input_ids must be a dense tensor with values: got int64 sparse_coo"),
        (IDS.to("meta"), "input_ids must be a dense tensor .*on device meta"),
        *((ids_with(attention_mask=m), "attention_mask must be a tensor") for m in (ONES.tolist(), "x", ONES.numpy())),
        *(
            (ids_with(attention_mask=mask), r"attention_mask .* must have the shape of input_ids \[1, 60\]")
            for mask in (ONES[:, :5], ONES[0], ONES[None], ONES.repeat(2, 1))
        ),
        *(
            (ids_with(attention_mask=ONES * value), f"must hold 1 for a token and 0 for padding: got {value}")
            for value in (2, -1, 0.5, NAN)
        ),
        (ids_with(attention_mask=ONES * 0), "request 0 of the batch has no token"),
        (ids_with(position_ids=list(range(60))), "position_ids must be a tensor .*got list"),
        (
            ids_with(position_ids=torch.arange(60)),
            r"position_ids must .* shape of input_ids \[1, 60\]: got int64 \[60\]",
        ),
        (ids_with(token_type_ids="x"), "token_type_ids must be a tensor"),
    ],
)
def test_what_is_no_prompt_is_refused(model, inputs, message):
    with pytest.raises(skv.InputError, match=message) as caught:
        generate(model, inputs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_a_mask_of_any_dtype_means_the_same_inside_the_inputs_and_beside_them(model, dtype):
    mask = ONES.clone()
    mask[0, 50:] = 0  # padding on the right, which is moved to the left
    expected = generate(model, IDS[:, :50]).new_tokens
    assert torch.equal(generate(model, ids_with(attention_mask=mask.to(dtype))).new_tokens, expected)
    assert torch.equal(generate(model, IDS, attention_mask=mask.to(dtype)).new_tokens, expected)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [(ids_with(attention_mask=ONES), "attention_mask is given twice"), ("text", "attention_mask: given beside text")],
)
def test_a_mask_beside_the_inputs_is_the_only_one(model, inputs, message):
    with pytest.raises(skv.InputError, match=message):
        generate(model, inputs, attention_mask=ONES)


class LettersWithoutPadding:
    """The least of a tokenizer."""

    pad_token = None

    def __call__(self, texts, **_):
        return {"input_ids": torch.tensor([[ord(c) for c in text] for text in texts])}

    def batch_decode(self, ids, **_):
        return ["".join(map(chr, row)) for row in ids.tolist()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab\udcff", "no Unicode text: character 2 is half of a surrogate pair"),
        (["a", "b"], "2 prompts need padding.*set tokenizer.pad_token"),
        (["a", " "], "the prompt is empty"),
    ],
)
def test_text_that_cannot_be_read_is_refused(model, text, message):
    with pytest.raises(skv.InputError, match=message):
        generate(model, text, tokenizer=LettersWithoutPadding())
    assert len(generate(model, "ab", tokenizer=LettersWithoutPadding()).text[0]) == 4


# --- options that do not exist --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", r"did you mean 'max_new_tokens'\?"),
        ("temperatur", r"did you mean 'temperature'\?"),
        ("cuda_graph", r"did you mean 'cuda_graphs'\?"),
        ("budget", r"it is one of SparseKVConfig, give config=SparseKVConfig\(budget=\.\.\.\)"),
    ],
)
def test_an_unknown_option_says_which_was_meant(model, name, hint):
    with pytest.raises(skv.ConfigError, match=f"^unknown option '{name}': {hint}$"):
        generate(model, **{name: 1})


def test_what_resembles_nothing_is_refused_as_transformers_does(model):
    with pytest.raises(ValueError, match=r"not used by the model: \['zzz'\]"):
        generate(model, zzz=1)


def test_what_transformers_passes_on_to_the_model_is_taken(model):
    assert torch.equal(generate(model, num_items_in_batch=1).sequences, generate(model).sequences)
