"""What we rely on in transformers, by name: an upgrade that changes it fails here first."""

import importlib
import inspect

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, create_causal_mask, sdpa_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import eager_attention_forward

import hf_sparsekv as skv
from hf_sparsekv.hf.attention import LAYER_ATTRIBUTE, LAYER_KEYWORD
from hf_sparsekv.hf.compat import CACHE_KEYWORD


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_cache_keyword_is_a_parameter_of_the_model():
    assert CACHE_KEYWORD in parameters(inspect.unwrap(modeling_llama.LlamaForCausalLM.forward))


@pytest.mark.parametrize("function", [sdpa_attention_forward, eager_attention_forward])
def test_attention_functions_keep_their_signature(function):
    assert parameters(function)[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert {"scaling", "dropout", "kwargs"} <= set(parameters(function))


def test_masks_keep_their_arguments():
    needed = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask"}
    assert needed | {"allow_is_causal_skip", "local_size", "device"} <= set(parameters(sdpa_mask))
    assert callable(causal_mask_function)
    assert "attention_mask" in parameters(create_causal_mask)


@pytest.mark.parametrize("interface", [AttentionInterface, AttentionMaskInterface])
def test_registration_is_a_class_level_mapping_that_can_be_undone(interface):
    before = dict(interface._global_mapping)
    skv.register()
    skv.register()
    assert "sparsekv" in interface._global_mapping
    skv.unregister()
    skv.unregister()
    assert interface._global_mapping == before


def test_importing_registers_nothing():
    import subprocess
    import sys

    code = (
        "from transformers import AttentionInterface as A, AttentionMaskInterface as M; "
        "before = dict(A._global_mapping), dict(M._global_mapping); import hf_sparsekv; "
        "assert (A._global_mapping, M._global_mapping) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cache_layer_needs_what_ours_defines():
    abstract = CacheLayerMixin.__abstractmethods__
    assert abstract <= {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert {"layers", "layer_class_to_replicate"} <= set(parameters(Cache.__init__))


def test_the_layer_reaches_the_attention_function(tiny_llama):
    """By the call's kwargs where `update` gets them (from 5.24), on the key before."""
    skv.register()
    model = tiny_llama(num_layers=1, attn_implementation="sparsekv")
    got = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        got.append(kwargs.get(LAYER_KEYWORD) or getattr(key, LAYER_ATTRIBUTE, None))
        return query.transpose(1, 2), None

    cache = skv.SparseKVCache(model.config, skv.SparseKVConfig(num_full_layers=1))
    original = AttentionInterface._global_mapping["sparsekv"]
    try:
        AttentionInterface.register("sparsekv", spy)
        with torch.no_grad():
            model(input_ids=torch.tensor([[3, 4]]), use_cache=True, **{CACHE_KEYWORD: cache})
    finally:
        AttentionInterface.register("sparsekv", original)
        skv.unregister()
    assert got == [cache.layers[0]]


def test_a_padding_mask_arrives_as_2d_bool(tiny_llama):
    got = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        got.append(attention_mask)
        return query.transpose(1, 2), None

    skv.register()
    original = AttentionInterface._global_mapping["sparsekv"]
    model = tiny_llama(num_layers=1, attn_implementation="sparsekv")
    mask = torch.tensor([[0, 1, 1]])
    try:
        AttentionInterface.register("sparsekv", spy)
        with torch.no_grad():
            model(input_ids=torch.tensor([[3, 4, 5]]), attention_mask=mask, use_cache=False)
    finally:
        AttentionInterface.register("sparsekv", original)
        skv.unregister()
    assert got[0].dtype == torch.bool
    assert torch.equal(got[0], mask.bool())


def test_rope_parameters_are_where_we_read_them():
    from hf_sparsekv.hf.models import rope_inv_freq

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    assert torch.allclose(rope_inv_freq(config, 16), rotary.inv_freq)
    config.no_rope_layers = [1, 0]
    assert rope_inv_freq(config, 16) is None
    config.no_rope_layers = None
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    assert rope_inv_freq(config, 16) is None


def test_the_rotation_is_ours_where_we_say_so():
    from hf_sparsekv.hf.models import ROTATE_HALF
    from hf_sparsekv.scorers.rotation import rotate

    queries, angles = torch.randn(1, 2, 5, 16), torch.rand(1, 5, 8)
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    for name in sorted(ROTATE_HALF):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        turned, _ = module.apply_rotary_pos_emb(queries, queries, cos, sin)
        torch.testing.assert_close(turned, rotate(queries, angles[:, None]), msg=name)


def test_models_that_rotate_otherwise_get_no_frequencies():
    from transformers import CohereConfig

    from hf_sparsekv.hf.models import rope_inv_freq

    assert rope_inv_freq(CohereConfig(hidden_size=64, num_attention_heads=4), 16) is None
