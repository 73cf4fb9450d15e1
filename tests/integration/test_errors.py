"""A user's mistake ends in an error that names the value, the limit and the fix, before any work is lost."""

from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, LlamaConfig, MistralConfig, T5Config

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD

pytestmark = pytest.mark.usefixtures("registered")

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)


def forward(model, cache, ids=None, **kwargs):
    ids = torch.randint(3, 256, (2, 40)) if ids is None else ids
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{CACHE_KEYWORD: cache}, **kwargs)


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (MistralConfig(sliding_window=128), "sliding window"),
        (Gemma2Config(), "softcapping"),
        (T5Config(), "cross attention"),
    ],
)
def test_unsupported_models_are_refused_by_feature(config, feature):
    with pytest.raises(skv.ModelError, match=feature):
        skv.SparseKVCache(config, SMALL)


def test_mistral_without_a_window_is_fine():
    skv.SparseKVCache(MistralConfig(sliding_window=None), SMALL)


def test_a_configuration_without_kv_heads_is_refused():
    config = LlamaConfig()
    config.num_key_value_heads = None
    with pytest.raises(skv.ModelError, match="num_key_value_heads"):
        skv.SparseKVCache(config, SMALL)
    with pytest.raises(skv.ModelError, match="model configuration"):
        skv.SparseKVCache(object(), SMALL)


@pytest.mark.parametrize(
    ("kwargs", "feature"),
    [({"sliding_window": 8}, "sliding window"), ({"softcap": 30.0}, "softcapping")],
)
def test_attention_features_are_refused_at_the_first_call(tiny_llama, kwargs, feature):
    model = tiny_llama(attn_implementation="sparsekv")
    with pytest.raises(skv.ModelError, match=feature):
        forward(model, skv.SparseKVCache(model.config, SMALL), **kwargs)


def test_attention_weights_are_refused(tiny_llama):
    model = tiny_llama(attn_implementation="sparsekv")
    with pytest.raises((skv.ModelError, ValueError), match="output_attentions"):
        forward(model, skv.SparseKVCache(model.config, SMALL), output_attentions=True)


def test_another_attention_implementation_is_refused(tiny_llama):
    model = tiny_llama(attn_implementation="sdpa")
    with pytest.raises(skv.CacheError, match=r"attn_implementation='sparsekv'.*'sdpa'"):
        forward(model, skv.SparseKVCache(model.config, SMALL))


def test_attention_that_is_not_registered_any_more_is_told_apart(tiny_llama):
    model = tiny_llama(attn_implementation="sparsekv")
    skv.unregister()
    with pytest.raises(skv.CacheError, match=r"not registered.*hf_sparsekv.register\(\)"):
        forward(model, skv.SparseKVCache(model.config, SMALL))
    skv.register()
    forward(model, skv.SparseKVCache(model.config, SMALL))


def test_something_that_is_no_model_is_refused():
    with pytest.raises(skv.ModelError, match=r"got str 'smollm2-135m-instruct': load it first, AutoModelForCausalLM"):
        skv.generate("smollm2-135m-instruct", torch.randint(3, 256, (1, 9)), SMALL)


def test_a_foreign_cache_object_works_densely(tiny_llama):
    model, ids = tiny_llama(attn_implementation="sparsekv"), torch.randint(3, 256, (2, 40))
    ours = forward(model, DynamicCache(config=model.config), ids).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, forward(model, DynamicCache(config=model.config), ids).logits)


def test_a_cache_for_another_depth_is_refused(tiny_llama):
    model = tiny_llama(num_layers=4, attn_implementation="sparsekv")
    shallow = tiny_llama(num_layers=2, attn_implementation="sparsekv")
    with pytest.raises(skv.CacheError, match="2 layers"):
        forward(model, skv.SparseKVCache(shallow.config, SMALL))


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ({"head_dim": 32}, skv.CacheError, "heads of 16 dimensions, .* of 32"),
        ({"num_kv_heads": 4}, skv.ModelError, "the cache is another model's"),
    ],
)
def test_a_cache_for_other_heads_is_refused(tiny_llama, heads, error, message):
    config = tiny_llama(attn_implementation="sparsekv").config
    with pytest.raises(error, match=message):
        forward(tiny_llama(attn_implementation="sparsekv", **heads), skv.SparseKVCache(config, SMALL))


def test_another_batch_size_on_a_used_cache_is_refused(tiny_llama):
    model = tiny_llama(attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, SMALL)
    forward(model, cache)
    with pytest.raises(skv.CacheError, match="2 requests"):
        forward(model, cache, torch.randint(3, 256, (3, 1)))


def test_cropping_is_refused(tiny_llama):
    model = tiny_llama(attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, SMALL)
    forward(model, cache)
    for crop in (-1, 39):
        with pytest.raises(skv.CacheError, match="cannot crop"):
            cache.crop(crop)
    cache.crop(0)
    cache.crop(40)


def test_custom_4d_masks_and_packed_sequences_are_refused(tiny_llama):
    model = tiny_llama(attn_implementation="sparsekv")
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    with pytest.raises(skv.InputError, match="2D padding mask"):
        forward(model, skv.SparseKVCache(model.config, SMALL), attention_mask=mask)


def test_a_turn_of_nothing_but_padding_is_refused(tiny_llama):
    model = tiny_llama(attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, SMALL)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1] = 0
    forward(model, cache, attention_mask=mask)
    with pytest.raises(skv.CacheError, match="request 1"):
        cache.compress()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scorer_that_cannot_rank_is_named_with_its_layer(tiny_llama, bad):
    class Broken(skv.Scorer):
        name = "broken"
        queries = "none"

        def score(self, inputs):
            scores = inputs.key_positions().float()
            scores[..., 5] = bad if inputs.layer_idx == 2 else 0.0
            return scores

    model = tiny_llama()
    config = SMALL.with_(scorer=Broken())
    with pytest.raises(skv.ScoreError, match="'broken', layer 2"):
        skv.generate(model, torch.randint(3, 256, (1, 60)), config, max_new_tokens=2)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.zeros(5, dtype=torch.long), r"\[batch, tokens\]"),
        (torch.full((1, 5), 256), r"\[0, 256\)"),
        (torch.full((1, 5), -1), r"\[0, 256\)"),
        (torch.zeros(1, 4096, dtype=torch.long), "4096 tokens"),
        ({"attention_mask": torch.ones(1, 5)}, "input_ids"),
        ({"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(1, 5)}, r"\[1, 5\].*\[2, 5\]"),
        ("text", "tokenizer"),
        (7, "int"),
    ],
)
def test_bad_prompts_are_refused(tiny_llama, inputs, message):
    with pytest.raises(skv.InputError, match=message):
        skv.generate(tiny_llama(), inputs, SMALL, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "fits"),
    [({}, False), ({"max_length": 4097}, False), ({"max_length": 4096}, True), ({"max_new_tokens": 6}, True)],
    ids=["transformers' default of 20", "max_length", "max_length that fits", "max_new_tokens that fit"],
)
def test_what_is_to_be_generated_counts_wherever_its_number_comes_from(tiny_llama, options, fits):
    prompt = torch.full((1, 4090), 5)
    refused = nullcontext() if fits else pytest.raises(skv.InputError, match="the model takes 4096 in all")
    with refused:
        assert skv.generate(tiny_llama(num_layers=1), prompt, SMALL, **options).sequences.shape[1] <= 4096


@pytest.mark.parametrize("name", ["past_key_values", "use_cache", "cache_implementation"])
def test_arguments_that_we_set_are_refused(tiny_llama, name):
    with pytest.raises(skv.ConfigError, match=name):
        skv.generate(tiny_llama(), torch.randint(3, 256, (1, 9)), SMALL, **{name: "x"})


def test_configurations_that_do_not_fit_the_model_are_refused(tiny_llama):
    config = tiny_llama(num_layers=4).config
    for options, message in (
        ({"num_full_layers": 5}, "only 4 layers"),
        ({"full_layers": (4,)}, "layers 0 to 3"),
        ({"num_full_layers": 3, "budget": (64, 64)}, "lists 2 layers, but 1 layers"),
    ):
        with pytest.raises(skv.ConfigError, match=message):
            skv.SparseKVCache(config, skv.SparseKVConfig(**options))
    with pytest.raises(skv.ConfigError, match="flash"):
        skv.SparseKVCache(config, SMALL, backend="flash")
    with pytest.raises(skv.ConfigError, match="SparseKVConfig"):
        skv.SparseKVCache(config, {"budget": 5})
    for length in (0, -1, 2.5, True):
        with pytest.raises(skv.ConfigError, match="prompt_length"):
            skv.SparseKVCache(config, SMALL, prompt_length=length)
