"""A prompt of 64k tokens in the memory of a chunk: what a bounded prefill allocates does not grow with the prompt.

Guards against a copy of the prompt's keys, masks or logits of all positions, and books that say less than is held.
"""

import gc

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.testing.memory import LargestTensor
from hf_sparsekv.testing.models import tiny_llama

LENGTH, CHUNK, BUDGET = 65536, 2048, 256
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    model = tiny_llama(num_layers=2, num_heads=2, num_kv_heads=1, vocab_size=64, head_dim=32)
    model.config.max_position_embeddings = LENGTH + 8
    return model


def config(num_full_layers, **changes):
    options = {"num_full_layers": num_full_layers, "budget": BUDGET, "prefill": "bounded"}
    return skv.SparseKVConfig(**options, prefill_chunk_tokens=CHUNK).with_(**changes)


def test_64k_tokens_take_the_memory_of_a_chunk(model):
    prompt, sizes = torch.randint(3, 64, (1, LENGTH)), []

    def measure(module, args, kwargs, output):
        sizes.append(sum(layer.state.nbytes for layer in kwargs[CACHE_KEYWORD].layers))
        assert output.logits.shape[1] == 1

    handle = model.register_forward_hook(measure, with_kwargs=True)
    with LargestTensor() as largest:
        out = skv.generate(model, prompt, config(0), **GREEDY)
    handle.remove()
    num_prefills = LENGTH // CHUNK
    assert len(sizes) == num_prefills + 2
    planned = out.cache.plan.total_bytes(LENGTH, element_bytes=4, prompt_length=LENGTH)
    assert sizes[num_prefills:] == [planned] * 2
    observed = 2 * 2 * 32 * 32 * 4  # last 32 query rows, two layers, two heads
    between = 2 * BUDGET * 4  # scores before pooling
    assert max(sizes[:num_prefills]) <= planned + observed + between
    # Nothing larger than 16 MiB of an op's own tiles, where all keys of a layer would be 8 and a mask 128 MiB:
    # the prompt's own ids are the only tensor of its length.
    assert largest.num_bytes <= 17 * 2**20
    assert out.report["evicted_at_prompt"] == 2 * (LENGTH - BUDGET)


def test_a_full_layer_gets_no_mask_of_the_whole_prompt(model):
    """Beside its keys and values, which stay."""
    length = LENGTH // 4
    prompt = torch.randint(3, 64, (1, length))
    gc.collect()
    with LargestTensor() as largest:
        out = skv.generate(model, prompt, config(1), **GREEDY)
    mask_bytes = CHUNK * length
    assert largest.num_bytes < mask_bytes
    assert out.report["layers"][0]["stored"] == [length + 2]
