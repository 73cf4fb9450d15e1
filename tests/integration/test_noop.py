"""While nothing has to be evicted, a sparse cache is the dense cache, bit for bit."""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.testing.models import tiny_llama as build_llama
from hf_sparsekv.testing.models import tiny_qwen2, tiny_qwen3

pytestmark = pytest.mark.usefixtures("registered")

LARGE = skv.SparseKVConfig(num_full_layers=1, budget=400, num_recent_tokens=8, observation_window=8)
NEW_TOKENS = 20


def generate(model, ids, mask, attention, cache=None, **options):
    """Greedy tokens and the logits of every step."""
    model.set_attn_implementation(attention)
    caches = {} if cache is None else {CACHE_KEYWORD: cache}
    options = {"do_sample": False, **options}
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=None,
        **caches,
        **options,
    )


def padded(kind, length=70):
    """Ids and mask of three requests, padded at one side or not at all."""
    ids, mask = torch.randint(3, 256, (3, length)), torch.ones(3, length, dtype=torch.long)
    if kind == "left":
        mask[0, :30], mask[1, :5] = 0, 0
    if kind == "right":
        mask[0, -30:], mask[1, -5:] = 0, 0
    return ids, mask


def assert_identical(one, two):
    assert torch.equal(one.sequences, two.sequences)
    assert len(one.logits) == len(two.logits) == NEW_TOKENS
    for a, b in zip(one.logits, two.logits, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_budget_that_fits_is_bit_identical_to_dense(tiny_llama, backend, kind, dtype):
    model, (ids, mask) = tiny_llama(dtype=dtype), padded(kind)
    dense = generate(model, ids, mask, backend)
    sparse = generate(model, ids, mask, "sparsekv", skv.SparseKVCache(model.config, LARGE, backend=backend))
    assert_identical(dense, sparse)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_budget_that_fits_is_bit_identical_under_autocast(tiny_llama, backend, dtype):
    model, (ids, mask) = tiny_llama(head_dim=64), padded("left")
    with torch.autocast("cpu", dtype):
        dense = generate(model, ids, mask, backend)
        sparse = generate(model, ids, mask, "sparsekv", skv.SparseKVCache(model.config, LARGE, backend=backend))
    assert_identical(dense, sparse)


@pytest.mark.parametrize("build", [tiny_qwen2, tiny_qwen3])
def test_other_architectures_are_bit_identical_too(build):
    model, (ids, mask) = build(), padded("left")
    dense = generate(model, ids, mask, "sdpa")
    assert_identical(dense, generate(model, ids, mask, "sparsekv", skv.SparseKVCache(model.config, LARGE)))


@pytest.mark.parametrize("build", [build_llama, tiny_qwen3], ids=["plain", "query and key norms"])
@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_a_prompt_shorter_than_the_window_is_bit_identical(build, length):
    model, ids = build(), torch.randint(3, 256, (1, length))
    mask = torch.ones_like(ids)
    dense = generate(model, ids, mask, "sdpa")
    assert_identical(dense, generate(model, ids, mask, "sparsekv", skv.SparseKVCache(model.config, LARGE)))


@pytest.mark.parametrize("options", [{"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 16}])
def test_beams_and_chunks_that_fit_are_dense(tiny_llama, options):
    model, (ids, mask) = tiny_llama(), padded("left")
    dense_options = dict(options)
    if "prefill_chunk_size" in options:  # dense attention of a chunk is another kernel call: compare like with like
        from transformers import DynamicCache

        dense = generate(model, ids, mask, "sdpa", DynamicCache(config=model.config), **dense_options)
    else:
        dense = generate(model, ids, mask, "sdpa", **dense_options)
    sparse = generate(model, ids, mask, "sparsekv", skv.SparseKVCache(model.config, LARGE), **options)
    assert torch.equal(dense.sequences, sparse.sequences)


@pytest.mark.parametrize("kind", ["none", "left", "right"])
def test_a_forward_without_our_cache_is_sdpa(tiny_llama, kind):
    model, (ids, mask) = tiny_llama(), padded(kind)
    outputs = []
    for attention in ("sdpa", "sparsekv"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            outputs.append(model(input_ids=ids, attention_mask=mask, use_cache=False).logits)
    assert torch.equal(*outputs)
    assert_identical(generate(model, ids, mask, "sdpa"), generate(model, ids, mask, "sparsekv"))


def test_packed_sequences_without_our_cache_are_sdpa(tiny_llama):
    model, ids = tiny_llama(), torch.randint(3, 256, (1, 24))
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    outputs = []
    for attention in ("sdpa", "sparsekv"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            outputs.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits)
    assert torch.equal(*outputs)


def test_training_without_our_cache_is_sdpa(tiny_llama):
    gradients = []
    for attention in ("sdpa", "sparsekv"):
        model = tiny_llama(attn_implementation=attention)
        ids = torch.arange(3, 40)[None]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*gradients)
