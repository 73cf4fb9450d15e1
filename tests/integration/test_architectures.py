"""Architectures that go through the attention interface with rotary positions work; others are refused by name.

Guards against wrong text from a model that nobody tried: a rotary scheme with several axes, images, state layers, or
attention that uses a layer's keys in a way of its own.
"""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.testing.compare import assert_same_up_to_rounding
from hf_sparsekv.testing.oracle import Oracle, forward_both

pytestmark = pytest.mark.usefixtures("registered")

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)
SHAPE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TURNS = (60, *[1] * 6, 9, *[1] * 4)


def build(config_class, **options):
    config = getattr(transformers, config_class)(**{**SHAPE, **options})
    return AutoModelForCausalLM.from_config(config).eval()


def assert_equals_the_oracle(model):
    cache, oracle = skv.SparseKVCache(model.config, SMALL), Oracle(model)
    columns = torch.ones(2, 0, dtype=torch.bool)
    for length in TURNS:
        columns = torch.cat([columns, torch.ones(2, length, dtype=torch.bool)], dim=1)
        ids = torch.randint(3, 256, (2, length))
        assert_same_up_to_rounding(*forward_both(model, cache, oracle, ids, columns))
    assert cache.report()["evicted_while_decoding"] > 0


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        ("MistralConfig", {"sliding_window": None}),
        ("SmolLM3Config", {}),
        ("MixtralConfig", {**EXPERTS, "sliding_window": None}),
        ("Phi3Config", {}),
        ("StableLmConfig", {}),
        ("GraniteConfig", {}),
        ("Olmo2Config", {}),
        ("GemmaConfig", {}),
    ],
    ids=lambda value: value.removesuffix("Config") if isinstance(value, str) else "",
)
def test_an_architecture_is_dense_while_all_fits_and_the_oracle_when_it_does_not(config_class, options):
    """Windowless Mistral, layers without rotation, experts, one projection for q, k and v, partial rotation, ..."""
    model = build(config_class, **options)
    ids, logits = torch.randint(3, 256, (1, 50)), []
    for attention in ("sdpa", "sparsekv"):
        model.set_attn_implementation(attention)
        large = skv.SparseKVCache(model.config, SMALL.with_(budget=200))
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **({CACHE_KEYWORD: large} if attention == "sparsekv" else {}),
        )
        logits.append(torch.stack(output.logits))
    assert torch.equal(*logits)
    assert_equals_the_oracle(model)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_keys_are_rotated_once_under_every_rotary_scheme(tiny_llama, rope):
    model = tiny_llama(attn_implementation="sparsekv")
    model.config.max_position_embeddings = 64  # the prompt and its answer go past it
    model.config.rope_parameters = {"rope_theta": 10000.0, **rope}
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    assert_equals_the_oracle(model)


@pytest.mark.parametrize(
    ("config_class", "model_type"),
    [("LlavaConfig", "llava"), ("Qwen2_5_VLConfig", "qwen2_5_vl"), ("Phi4MultimodalConfig", "phi4_multimodal")],
)
def test_models_of_several_modalities_are_refused_by_name(config_class, model_type):
    config = getattr(transformers, config_class)()
    with pytest.raises(skv.ModelError, match=f"'{model_type}' uses several modalities"):
        skv.SparseKVCache(config, SMALL)


def test_rotary_positions_of_several_axes_are_refused():
    config = LlamaConfig(**SHAPE)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    with pytest.raises(skv.ModelError, match=r"'llama' uses .*mrope"):
        skv.SparseKVCache(config, SMALL)


@pytest.mark.parametrize("kind", ["conv", "hybrid", "linear_attention", "compressed_sparse_attention"])
def test_layers_that_are_not_full_attention_are_refused_by_kind(kind):
    config = transformers.Qwen2Config(**SHAPE)
    config.layer_types = ["full_attention", kind, "full_attention", "full_attention"]
    with pytest.raises(skv.ModelError, match=f"'qwen2' uses .*{kind}"):
        skv.SparseKVCache(config, SMALL)


def test_attention_that_uses_its_keys_twice_is_refused():
    """Differential attention: two softmaxes a layer, which a cache would take for two forward passes."""
    model = build("DiffLlamaConfig")
    model.set_attn_implementation("sparsekv")
    with torch.no_grad(), pytest.raises(skv.ModelError, match=r"DiffLlama\w+ attends more than once"):
        model(input_ids=torch.randint(3, 256, (1, 50)), **{CACHE_KEYWORD: skv.SparseKVCache(model.config, SMALL)})


def test_attention_that_repeats_its_keys_is_refused():
    """Keys expanded before the attention function would be stored expanded: the saved memory would be gone."""
    model = build("LlamaConfig", attn_implementation="sparsekv")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for name in ("k_proj", "v_proj"):
            old = getattr(attention, name)
            new = torch.nn.Linear(64, 64, bias=False)
            new.weight.copy_(old.weight.repeat(2, 1))
            setattr(attention, name, new)
        attention.num_key_value_groups = 1
        with pytest.raises(skv.ModelError, match=r"LlamaAttention attends with 4 key heads, .* has 2"):
            model(input_ids=torch.randint(3, 256, (1, 50)), **{CACHE_KEYWORD: skv.SparseKVCache(model.config, SMALL)})
