"""A decode step costs the same after 16k tokens as after 1k: what it reads is the budget, not what was seen.

Guards against masks, tables, or keys of the whole history that a step makes or reads. Counts tensors, not seconds: how
fast a step is, benchmarks say.
"""

import pytest
import torch
from transformers import DynamicCache

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.testing.memory import ElementsRead
from hf_sparsekv.testing.models import tiny_llama

pytestmark = pytest.mark.usefixtures("registered")

SHORT, LONG, BUDGET, CHUNK = 1024, 16384, 256, 2048
KV_HEADS, HEAD_DIM, LAYERS = 1, 32, 2
CONFIG = skv.SparseKVConfig(num_full_layers=0, budget=BUDGET, prefill="bounded", prefill_chunk_tokens=CHUNK)


@pytest.fixture(scope="module")
def model():
    model = tiny_llama(num_layers=LAYERS, num_heads=2, num_kv_heads=KV_HEADS, vocab_size=64, head_dim=HEAD_DIM)
    model.config.max_position_embeddings = LONG + 8
    return model


def fed(model, cache, length):
    """The cache, after a prompt and one token."""
    prompt = torch.randint(3, 64, (1, length))
    with torch.no_grad():
        for ids in (*prompt.split(CHUNK, dim=1), prompt[:, :1]):
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache})
    return cache


def read_by_a_step(model, cache):
    with torch.no_grad(), ElementsRead() as read:
        model(input_ids=torch.tensor([[7]]), use_cache=True, **{CACHE_KEYWORD: cache})
    return read.num_elements


def sparse(model, length, config=CONFIG):
    model.set_attn_implementation("sparsekv")
    return read_by_a_step(model, fed(model, skv.SparseKVCache(model.config, config, prompt_length=length), length))


def test_a_step_reads_as_much_after_16k_tokens_as_after_1k(model):
    num_read = sparse(model, SHORT)
    assert num_read > 2 * LAYERS * BUDGET * KV_HEADS * HEAD_DIM  # the ruler measures
    assert sparse(model, LONG) == num_read


def test_a_full_layer_reads_its_keys_and_values_once(model):
    one = CONFIG.with_(num_full_layers=1)
    more_tokens = LONG - SHORT
    assert sparse(model, LONG, one) - sparse(model, SHORT, one) == 2 * more_tokens * KV_HEADS * HEAD_DIM


def test_a_step_reads_less_than_with_the_dense_cache(model):
    model.set_attn_implementation("sdpa")
    dense = read_by_a_step(model, fed(model, DynamicCache(config=model.config), LONG))
    assert dense >= 2 * LAYERS * LONG * KV_HEADS * HEAD_DIM
    assert sparse(model, LONG) < 0.1 * dense
    assert sparse(model, LONG, CONFIG.with_(num_full_layers=1)) < dense


def read_by_the_engine(model, config, length):
    """Elements that each of its steps reads, of a prompt and six tokens."""
    options = skv.EngineConfig(kv_memory_bytes=32 << 20, max_num_seqs=2, max_batch_tokens=CHUNK, max_model_len=LONG + 8)
    numbers = []
    with skv.Engine(model, config, options) as engine:
        engine.add_request(torch.randint(3, 64, (length,)).tolist(), skv.SamplingParams(max_tokens=6, ignore_eos=True))
        while engine.has_unfinished:
            with ElementsRead() as read:
                engine.step()
            numbers.append(read.num_elements)
    return numbers


def test_a_step_of_the_engine_reads_as_much_after_16k_tokens_as_after_1k(model):
    decoding = [read_by_the_engine(model, CONFIG, length)[-6:] for length in (SHORT, LONG)]
    assert decoding[0][0] > 2 * LAYERS * BUDGET * KV_HEADS * HEAD_DIM
    assert decoding[1] == decoding[0]


def test_a_full_layer_of_the_engine_reads_its_keys_and_values_once(model):
    one = CONFIG.with_(num_full_layers=1)
    more = read_by_the_engine(model, one, LONG)[-6] - read_by_the_engine(model, one, SHORT)[-6]
    once = 2 * (LONG - SHORT) * KV_HEADS * HEAD_DIM
    assert once <= more < 1.5 * once  # logits and softmax are read too
