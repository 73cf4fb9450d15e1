"""What cannot be measured, planned or looked at is refused by name, before a model reads anything."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import hf_sparsekv as skv
from hf_sparsekv import profile as room
from hf_sparsekv.errors import ConfigError, InputError, ModelError
from hf_sparsekv.testing.models import MAX_POSITIONS, tiny_llama, tiny_qwen2, tiny_qwen3

HELD_OUT = 12
NAN = float("nan")


def ids_of(length, count=1):
    return torch.randint(3, 256, (count, length))


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=2)


@pytest.fixture(scope="module")
def profile(model):
    return room.measure(model, ids_of(112), num_held_out=HELD_OUT, has_progress=False)


@pytest.fixture
def mistral():
    """With a sliding window, which no sparse cache supports."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return MistralForCausalLM(MistralConfig(num_hidden_layers=2, vocab_size=256, sliding_window=16, **sizes)).eval()


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (ids_of(1), {}, InputError, "the texts have 1 tokens and num_held_out=12 of them follow"),
        (ids_of(HELD_OUT), {}, InputError, "nothing is left to be one"),
        (ids_of(MAX_POSITIONS + 1), {}, InputError, "a text of 4,097 tokens .* longer than the 4,096 positions"),
        (ids_of(200), {"config": "snapkv"}, ConfigError, "config must be a SparseKVConfig: got 'snapkv'"),
        (ids_of(200), {"budgets": 40}, ConfigError, "budgets must be a list of tokens or fractions, or None: got 40"),
        (ids_of(200), {"budgets": "40"}, ConfigError, "budgets must be a list .* got '40'"),
        (b"text", {}, InputError, "a text to measure must be a str"),
    ],
)
def test_what_cannot_be_measured(model, inputs, options, error, message):
    with pytest.raises(error, match=message):
        room.measure(model, inputs, num_held_out=HELD_OUT, has_progress=False, **options)


def test_a_model_whose_numbers_overflow_has_no_profile():
    broken = tiny_llama(num_layers=2)
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight.fill_(NAN)
    config = skv.SparseKVConfig(scorer="streaming_llm")  # its scores are finite whatever the keys are
    with pytest.raises(ConfigError, match="layer 1 of the profile has nan where a finite number must stand"):
        room.measure(broken, ids_of(112), config=config, num_held_out=HELD_OUT, has_progress=False)


LOOKS = {
    "pattern": room.attention_pattern,
    "surface": lambda model, ids: room.activation_surface(model, ids, 0),
    "selection": lambda model, ids: room.prompt_selection(model, ids, skv.SparseKVConfig(budget=40)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("text", "ids must be one text, int64 .* got 'text'; text needs a tokenizer first"),
        (None, "got None"),
        (ids_of(9)[0], r"input_ids must be a tensor \[batch, tokens\]"),
        (ids_of(9, count=2), r"ids must be one text, int64 \[1, tokens\]: got \[2, 9\]"),
        (ids_of(9)[:, :0], "the prompt is empty"),
        (ids_of(9).float(), "must be int64 or int32: got float32"),
        (ids_of(9) + 256, r"token ids must be in \[0, 256\)"),
        (ids_of(MAX_POSITIONS + 1), "longer than the 4,096 positions"),
    ],
)
def test_what_is_no_text_to_look_at(model, look, ids, message):
    with pytest.raises(InputError, match=message):
        look(model, ids)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_is_no_model_to_look_at(look):
    with pytest.raises(ModelError, match="model must be a causal language model"):
        look("x", ids_of(9))


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_one_token_can_be_looked_at(model, look):
    look(model, ids_of(1))


def test_a_sliding_window_is_refused_where_attention_is_watched(mistral):
    for look in (LOOKS["pattern"], LOOKS["selection"]):
        with pytest.raises(ModelError, match="uses a sliding window"):
            look(mistral, ids_of(40))
    with pytest.raises(ModelError, match="uses a sliding window"):
        room.measure(mistral, ids_of(112), num_held_out=HELD_OUT, has_progress=False)
    assert LOOKS["surface"](mistral, ids_of(40)).magnitude.shape == (40, 32)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_qwen3])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 4, "num_kv_heads": 1},
        {"num_layers": 1},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
    ],
    ids=["mha", "mqa", "one_layer", "bf16", "fp16"],
)
def test_every_shape_is_measured_planned_and_kept_to(make, shape):
    model = make(**({"num_layers": 2} | shape))
    ids = ids_of(112)
    profile = room.measure(model, ids, budgets=(40, 80), num_held_out=HELD_OUT, has_progress=False)
    size = model.dtype.itemsize
    dense = skv.LayerPlan.build(skv.SparseKVConfig(), profile.shape).dense_bytes(100, element_bytes=size)
    plan = room.make_plan(profile, target_bytes=dense * 3 // 4, element_bytes=size)
    config = skv.SparseKVConfig(budget_shape="calibrated", plan=plan)
    options = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None}
    out = skv.generate(model, ids[:, :100], config, **options)
    kept = [max(layer["stored"]) for layer in out.report["layers"]]
    assert kept == [100 if budget is None else budget for budget in plan.budgets]
    assert min(kept) < 100


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: room.make_plan("x", target_bytes=9, element_bytes=4), ConfigError, "profile must be a Profile"),
        (lambda p: room.make_plan(p, target_bytes=9, element_bytes=4, unit="kB"), ConfigError, "unit must be one of"),
        (lambda p: room.summed_error(p, [40]), ConfigError, "one entry for each of 2 layers: got 1"),
        (lambda p: room.summed_error(p, [40, 0]), ConfigError, "tokens of layer 1 must be an int from 36 to 100"),
        (lambda p: room.summed_error(p, [40, 101]), ConfigError, "tokens of layer 1 must be an int from 36 to 100"),
        (lambda p: room.summed_error(p, [40, 40], "x"), ConfigError, "unknown objective 'x'"),
        (lambda p: room.allocate([[NAN, 1.0]], [[1, 2]], 3), ConfigError, "errors must be finite"),
        (lambda p: room.allocate([[1.0, 2.0]], [[1]], 3), ConfigError, r"got \[2\] and \[1\] choices"),
        (lambda p: room.allocate([[1.0]], [], 3), ConfigError, r"got \[1\] and \[\] choices"),
        (lambda p: room.recall_texts("x", num_held_out=4, lead=3), InputError, "texts must be token ids"),
        (lambda p: room.recall_texts(ids_of(9)[0], num_held_out=4, lead=3), InputError, r"got \[9\]"),
        (lambda p: room.recall_texts(ids_of(90), num_held_out="4", lead=3), ConfigError, "num_held_out must be an int"),
        (lambda p: room.recall_texts(ids_of(90), num_held_out=4, lead=0), ConfigError, "lead must be an int from 1"),
    ],
)
def test_what_cannot_be_planned(profile, call, error, message):
    with pytest.raises(error, match=message):
        call(profile)


@pytest.mark.parametrize("option", [{"length": 0}, {"length": -5}, {"max_texts": 0}])
def test_pieces_have_a_length_and_a_number(option):
    options = {"tokenizer": None, "vocab_size": 256, "length": 5, "max_texts": 1} | option
    with pytest.raises(ConfigError, match="must be an int from 1"):
        room.prompts_of(ids_of(90), **options)


def changed(values, path, value):
    """A copy with one entry replaced."""
    copy = json.loads(json.dumps(values))
    place = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(copy)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["prompt_length"], -3, "prompt_length must be an int from 1"),
        (["prompt_length"], 20, "a budget of the profile must be an int from 1 to 19"),
        (["num_texts"], "a", "num_texts must be an int"),
        (["budgets", 0], -10, "a budget of the profile must be an int from 1 to 99"),
        (["budgets", 0], 36.5, "a budget of the profile must be an int"),
        (["layers", 0, "layer_idx"], 1, "layer 0 of the profile says it is layer 1"),
        (["layers", 0, "residual_error", 0], "x", "layer 0 of the profile has 'x' where a finite number"),
        (["layers", 0, "residual_error"], "12345678", "has '1' where a finite number"),
        (["layers", 1, "output_error", 0], NAN, "layer 1 of the profile has nan where"),
        (["layers", 1, "heads", 0, "entropy"], None, "has None where"),
    ],
)
def test_a_damaged_profile_is_no_profile(profile, path, value, message):
    with pytest.raises(ConfigError, match=message):
        room.Profile.from_json(changed(profile.to_dict(), path, value))


def test_a_profile_says_what_it_lacks(profile):
    values = profile.to_dict()
    del values["shape"]
    with pytest.raises(ConfigError, match="it lacks 'shape'"):
        room.Profile.from_json(json.dumps(values))
    with pytest.raises(ConfigError, match="layer 0 of the profile says it is layer 5"):
        replace(profile, layers=(replace(profile.layers[0], layer_idx=5), profile.layers[1]))
