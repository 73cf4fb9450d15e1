"""Under autocast an fp32 model computes in half precision; what the cache stores, scores and selects stays defined."""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD, can_chunk_a_later_turn
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.models import tiny_qwen3

pytestmark = pytest.mark.usefixtures("registered")

LENGTH, NEW_TOKENS = 120, 4


@pytest.fixture
def model(tiny_llama):
    """Its head dimension is one that every backend takes."""
    return tiny_llama(num_layers=2, num_heads=4, head_dim=64, attn_implementation="sparsekv")


def config(**options):
    return skv.SparseKVConfig(**{"budget": 40, "num_recent_tokens": 8, "observation_window": 8, **options})


def generated(model, cache, ids, **options):
    mask = torch.ones_like(ids)
    given = {"attention_mask": mask, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(ids, **given, **{CACHE_KEYWORD: cache}, max_new_tokens=NEW_TOKENS)


def conversation(model, options, backend=None, prefill_chunk_size=None, num_turns=2):
    """Some turns, and the cache after them."""
    cache = skv.SparseKVCache(model.config, config(**options), backend=backend)
    ids = torch.randint(3, 256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    chunks = {} if prefill_chunk_size is None else {"prefill_chunk_size": prefill_chunk_size}
    for _ in range(num_turns):
        ids = torch.cat([generated(model, cache, ids, **chunks), ids[:, :30]], dim=1)
    return ids, cache


@pytest.mark.parametrize(
    ("dtype", "backend", "decode"),
    [
        *((torch.bfloat16, backend, "replace_lowest") for backend in ("sdpa", "eager", "torch_cpu", "reference")),
        *((torch.bfloat16, None, decode) for decode in ("ring", "grow")),
        (torch.float16, None, "replace_lowest"),
    ],
)
def test_every_mode_works_and_stores_half_precision(model, dtype, backend, decode):
    with torch.autocast("cpu", dtype):
        _, cache = conversation(model, {"num_full_layers": 1, "decode": decode}, backend)
    assert {layer.state.stored_keys.dtype for layer in cache.layers} == {dtype}
    seen = cache.get_seq_length()
    bytes_per_token = 2 * cache.shape.num_kv_heads * cache.shape.head_dim * 2  # keys and values of 2 bytes
    assert cache.report()["dense_bytes"] == 2 * 2 * seen * bytes_per_token


@pytest.mark.parametrize("scorer", scorer_names())
def test_every_scorer_works(model, scorer):
    with torch.autocast("cpu", torch.bfloat16):
        ids, cache = conversation(model, {"scorer": scorer})
    assert ids.shape[1] > LENGTH
    assert all(max(layer["stored"]) <= 40 for layer in cache.report()["layers"])


def test_query_and_key_norms_work():
    with torch.autocast("cpu", torch.bfloat16):
        conversation(tiny_qwen3(head_dim=64, attn_implementation="sparsekv"), {})


def test_a_prompt_in_chunks_works(model):
    with torch.autocast("cpu", torch.bfloat16):
        options = {"prefill": "bounded", "prefill_chunk_tokens": 32}
        num_turns = 2 if can_chunk_a_later_turn() else 1
        _, cache = conversation(model, options, prefill_chunk_size=32, num_turns=num_turns)
    assert all(max(layer["stored"]) <= 40 for layer in cache.report()["layers"])


def test_a_selection_by_hand_is_the_same_inside_and_outside(model):
    """Scores are fp32: autocast would round the products that they are made of."""
    ids = torch.randint(3, 256, (1, 400))
    kept = []
    for is_inside in (True, False):
        cache = skv.SparseKVCache(model.config, config(scorer="snapkv", pooling="none"))
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(ids, **{CACHE_KEYWORD: cache}, use_cache=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            cache.compress()
        kept.append([layer.state.slots.scores for layer in cache.layers])
    assert all(torch.equal(*scores) for scores in zip(*kept, strict=True))


def test_a_conversation_that_goes_on_without_it_is_refused_in_words(model):
    cache, ids = skv.SparseKVCache(model.config, config()), torch.randint(3, 256, (1, LENGTH))
    with torch.autocast("cpu", torch.bfloat16):
        ids = generated(model, cache, ids)
    with pytest.raises(skv.CacheError, match=r"holds torch\.bfloat16 keys on cpu, the model now makes torch\.float32"):
        generated(model, cache, torch.cat([ids, ids[:, :9]], dim=1))


def test_the_call_that_does_it_all_works_too(tiny_llama):
    ids = torch.randint(3, 256, (1, LENGTH))
    with torch.autocast("cpu", torch.bfloat16):
        out = skv.generate(tiny_llama(head_dim=64), ids, config(), max_new_tokens=4, eos_token_id=None)
    assert out.new_tokens.shape == (1, 4)
