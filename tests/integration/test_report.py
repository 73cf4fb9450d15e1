"""The report is measured, and what is measured is what the plan promised."""

import copy
import json

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.cache.slots import SlotStore
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.scorers.h2o import H2O

SMALL = {"num_full_layers": 1, "budget": 24, "num_recent_tokens": 8, "observation_window": 8}
OPTIONS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def tensors_of(obj, seen=None):
    """Every tensor that an object holds, however deep."""
    seen = set() if seen is None else seen
    if id(obj) in seen:
        return []
    seen.add(id(obj))
    if isinstance(obj, torch.Tensor):
        return [obj]
    if isinstance(obj, dict):
        return [t for value in obj.values() for t in tensors_of(value, seen)]
    if isinstance(obj, (list, tuple)):
        return [t for value in obj for t in tensors_of(value, seen)]
    if type(obj).__module__.startswith("hf_sparsekv"):
        return tensors_of(vars(obj), seen)
    return []


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3)])
@pytest.mark.parametrize("budget", [24, 0.3, (24, 40, 60)])
@pytest.mark.parametrize("decode", ["replace_lowest", "ring", "grow"])
def test_measured_bytes_are_the_plans(tiny_llama, heads, kv_heads, budget, decode):
    model = tiny_llama(num_heads=heads, num_kv_heads=kv_heads)
    config = skv.SparseKVConfig(**{**SMALL, "budget": budget}, decode=decode)
    output = skv.generate(model, torch.randint(3, 256, (2, 100)), config, max_new_tokens=41, **OPTIONS)
    planned = output.cache.plan.total_bytes(140, element_bytes=4, prompt_length=100, batch_size=2)
    assert output.report["cache_bytes"] == planned
    assert output.report["cache_bytes"] == sum(layer["bytes"] for layer in output.report["layers"])


def test_reported_bytes_are_those_of_every_tensor_in_the_cache(tiny_llama):
    model = tiny_llama()
    ids, mask = torch.randint(3, 256, (2, 100)), torch.ones(2, 100, dtype=torch.long)
    mask[0, :30] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    output = skv.generate(model, inputs, skv.SparseKVConfig(**SMALL), max_new_tokens=9, **OPTIONS)
    cache = output.cache
    rope = cache._inv_freq  # the model's constant, not the request's
    held = {t.data_ptr(): t for t in tensors_of([layer.state for layer in cache.layers]) if t is not rope}
    assert output.report["cache_bytes"] == sum(t.nbytes for t in held.values())


def test_keys_are_stored_once_per_kv_head_and_the_rest_is_freed(tiny_llama):
    model = tiny_llama(num_heads=8, num_kv_heads=2)
    output = skv.generate(
        model, torch.randint(3, 256, (1, 100)), skv.SparseKVConfig(**SMALL), max_new_tokens=9, **OPTIONS
    )
    for window in output.cache._window_layers():
        assert isinstance(window.slots, SlotStore)
        assert window.slots.keys.shape == window.slots.values.shape == (1, 2, 24, 16)
        assert window.slots.keys.is_contiguous()
        assert window.slots.keys.untyped_storage().nbytes() == window.slots.keys.nbytes
        assert window.columns.nbytes == window.tail.nbytes == 0


def test_a_real_models_plan_is_the_product_of_its_numbers():
    """Llama-3-8B: 32 layers, 32 query heads, 8 KV heads, head dimension 128."""
    shape = ModelShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    plan = skv.LayerPlan.build(skv.SparseKVConfig(num_full_layers=3, budget=512), shape)
    kv_bytes = 8 * 128 * 2 * 2
    for spec in plan.layers:
        measured = plan.layer_bytes(spec.layer_idx, 4096, element_bytes=2)
        if spec.is_full:
            assert measured == 4096 * kv_bytes
        else:
            assert measured == 512 * (kv_bytes + 8 * 8) + 12 + 8 * 8
    assert plan.dense_bytes(4096, element_bytes=2) == 32 * 4096 * kv_bytes
    assert plan.total_bytes(4500, element_bytes=2) / plan.dense_bytes(4500, element_bytes=2) < 0.20


def test_the_report_is_json_and_counts_what_happened(tiny_llama):
    model = tiny_llama()
    output = skv.generate(
        model, torch.randint(3, 256, (2, 100)), skv.SparseKVConfig(**SMALL), max_new_tokens=31, **OPTIONS
    )
    report = json.loads(json.dumps(output.cache.report(positions=True)))
    assert report["tokens_seen"] == [130, 130]
    assert report["evicted_at_prompt"] == 2 * 3 * (100 - 24)
    assert report["evicted_while_decoding"] == 2 * 3 * 30
    assert report["ratio"] == pytest.approx(report["cache_bytes"] / report["dense_bytes"])
    assert report["dense_bytes"] == 2 * 130 * 4 * 2 * 2 * 16 * 4
    assert report["in_force"]["scorer"] == "hybrid"
    assert report["in_force"]["pool_kernel_size"] == 21
    assert skv.SparseKVConfig.from_dict(report["config"]) == skv.SparseKVConfig(**SMALL)
    assert set(report["versions"]) == {"hf_sparsekv", "transformers", "torch"}
    sinks_and_recent = set(range(4)) | set(range(122, 130))
    for layer in report["layers"][1:]:
        for heads in layer["positions"]:
            assert all(sinks_and_recent <= set(head) for head in heads)


@pytest.mark.parametrize(
    ("budget", "shape", "expected"),
    [
        (24, "uniform", [[24, 24], [24, 24], [24, 24]]),
        (0.3, "uniform", [[30, 21], [30, 21], [30, 21]]),
        ((24, 0.5, 60), "uniform", [[24, 24], [50, 35], [60, 60]]),
        (24, "pyramid", [[35, 35], [24, 24], [13, 13]]),
    ],
)
def test_the_report_tells_what_a_budget_came_to_for_each_request(tiny_llama, budget, shape, expected):
    """A fraction or a shape is only a setting: the tokens that it means are told, layer by layer."""
    config = skv.SparseKVConfig(**{**SMALL, "budget": budget}, budget_shape=shape)
    ids, mask = torch.randint(3, 256, (2, 100)), torch.ones(2, 100, dtype=torch.long)
    mask[1, :30] = 0
    cache = skv.SparseKVCache(tiny_llama().config, config)
    assert [layer["budget_tokens"] for layer in cache.report()["layers"]] == [[], [], [], []]
    output = skv.generate(tiny_llama(), {"input_ids": ids, "attention_mask": mask}, config, max_new_tokens=3, **OPTIONS)
    full, *windows = output.report["layers"]
    assert full["budget_tokens"] == []
    assert [layer["budget_tokens"] for layer in windows] == expected
    assert [layer["stored"] for layer in windows] == expected


@pytest.mark.parametrize("scorer", [H2O(), "hybrid"])
def test_the_reported_options_make_the_same_configuration_again(tiny_llama, scorer):
    config = skv.SparseKVConfig(**SMALL, scorer=scorer, scorer_options={"share": 0.5} if scorer == "hybrid" else {})
    report = json.loads(json.dumps(skv.SparseKVCache(tiny_llama().config, config).report()))
    again = skv.SparseKVConfig.from_dict(report["config"])
    assert again.scorer_object == config.scorer_object
    assert again.to_dict() == config.to_dict()


def test_a_cache_and_an_output_say_what_they_are_in_a_line(tiny_llama):
    config = skv.SparseKVConfig(**SMALL)
    cache = skv.SparseKVCache(tiny_llama().config, config)
    assert repr(cache).startswith("SparseKVCache(1 full + 3 window layers, budget=24, scorer='hybrid', 0 requests, no")
    output = skv.generate(tiny_llama(), torch.randint(3, 256, (2, 60)), config, max_new_tokens=5, **OPTIONS)
    assert "2 requests, 64 tokens seen" in repr(output.cache)
    assert f"{output.report['cache_bytes']:,} bytes)" in repr(output.cache)
    assert repr(output).startswith("GenerateOutput(2 x 5 new tokens in ")
    assert len(repr(output)) < 300


def test_an_empty_cache_answers_sensibly(tiny_llama):
    cache = skv.SparseKVCache(tiny_llama().config, skv.SparseKVConfig(**SMALL))
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(7, 0) == (7, 0)
    assert cache.is_compileable is False
    report = cache.report(positions=True)
    assert (report["cache_bytes"], report["tokens_seen"], report["ratio"]) == (0, [], None)
    cache.reset()
    cache.compress()
    cache.crop(0)
    for layer in cache.layers:
        assert (layer.get_seq_length(), layer.get_mask_sizes(7), layer.get_max_length()) == (0, (7, 0), -1)
    assert len(cache) == 4
    assert not cache.is_initialized
    assert copy.deepcopy(cache).report() == report | {"layers": cache.report()["layers"]}


def test_a_scorer_of_ones_own_appears_in_the_report(tiny_llama):
    class Newest(skv.Scorer):
        name = "newest"
        queries = "none"
        default_prompt_share = 0.0

        def score(self, inputs):
            return inputs.key_positions().float() / inputs.num_seen

    config = skv.SparseKVConfig(**SMALL, scorer=Newest())
    output = skv.generate(tiny_llama(), torch.randint(3, 256, (1, 60)), config, max_new_tokens=2, **OPTIONS)
    assert output.report["config"]["scorer"] == output.report["in_force"]["scorer"] == "newest"
    assert output.cache.report(positions=True)["layers"][1]["positions"][0][0] == [0, 1, 2, 3, *range(41, 61)]
