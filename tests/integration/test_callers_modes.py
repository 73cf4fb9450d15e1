"""What a cache holds does not depend on the modes that its callers are in: inference mode, autocast, compilation.

Guards against tensors that only inference mode may write to, scores in half precision, and a compiler that follows
a model into what changes with every step.
"""

import copy

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.hf.compat import CACHE_KEYWORD

pytestmark = pytest.mark.usefixtures("registered")

SMALL = skv.SparseKVConfig(num_full_layers=1, budget=24, num_recent_tokens=8, observation_window=8)
ROOMY = SMALL.with_(budget=500)
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
THREE_TURNS = (80, 1, 1, 30, 1, 2, 1)


def feed(model, cache, ids):
    return model(input_ids=ids, use_cache=True, **{CACHE_KEYWORD: cache}).logits


def run(model, cache, turns=THREE_TURNS):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        pieces = [torch.randint(3, 256, (2, length), generator=generator) for length in turns]
        return [feed(model, cache, ids) for ids in pieces]


def tensors_of(cache):
    """Keys and values, in slots where there are any."""
    for layer in cache.layers:
        columns, slots = layer.state.columns, getattr(layer.state, "slots", None)
        yield from (columns.keys, columns.values) if slots is None else (slots.keys, slots.values, slots.scores)


# --- inference mode -----------------------------------------------------------------------------------------------

STEPS = {
    "prompt": lambda model, cache: feed(model, cache, torch.arange(3, 83)[None]),
    "short prompt": lambda model, cache: feed(model, cache, torch.arange(3, 13)[None]),
    "decoding": lambda model, cache: [STEPS["prompt"](model, cache), feed(model, cache, torch.tensor([[9]]))],
    "compress": lambda model, cache: [STEPS["prompt"](model, cache), cache.compress()],
    "reorder": lambda model, cache: [STEPS["decoding"](model, cache), cache.reorder_cache(torch.tensor([0]))],
}


@pytest.mark.parametrize("config", [SMALL, ROOMY], ids=["evicts", "fits"])
@pytest.mark.parametrize("step", STEPS)
def test_what_inference_mode_began_goes_on_outside_of_it(model, step, config):
    caches = [skv.SparseKVCache(model.config, config) for _ in range(2)]
    with torch.inference_mode():
        STEPS[step](model, caches[0])
    with torch.no_grad():
        STEPS[step](model, caches[1])
        results = [[feed(model, cache, torch.arange(20, 20 + n)[None]) for n in (1, 1, 40, 1)] for cache in caches]
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_a_copy_made_in_inference_mode_goes_on_outside_of_it(model):
    cache = skv.SparseKVCache(model.config, SMALL)
    run(model, cache)
    with torch.inference_mode():
        twin = copy.deepcopy(cache)
    assert torch.equal(run(model, twin, (1,))[0], run(model, cache, (1,))[0])


def test_a_turn_of_generate_may_follow_one_in_inference_mode(tiny_llama):
    plain, ids = tiny_llama(num_layers=3), torch.arange(3, 83)[None]
    results = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            first = skv.generate(plain, ids, SMALL, **GREEDY)
        longer = torch.cat([first.sequences.clone(), ids], dim=1)
        results.append(skv.generate(plain, longer, cache=first.cache, **GREEDY).sequences)
    assert torch.equal(*results)


# --- autocast -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_while_all_fits_autocast_gives_what_it_gives_densely(tiny_llama, backend):
    dense, sparse = (tiny_llama(attn_implementation=name) for name in (backend, "sparsekv"))
    cache, ids = skv.SparseKVCache(sparse.config, ROOMY, backend=backend), torch.randint(3, 256, (2, 40))
    past, one = None, torch.randint(3, 256, (2, 1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for new in (ids, one, one):
            output = dense(new, use_cache=True, **{CACHE_KEYWORD: past})
            past = getattr(output, CACHE_KEYWORD, None) or output.past_key_values
            assert torch.equal(feed(sparse, cache, new), output.logits)


@pytest.mark.parametrize("backend", [None, "torch_cpu", "eager", "reference"])
def test_autocast_stores_one_dtype_and_turns_follow(tiny_llama, backend):
    """Rotated keys would be fp32 beside bf16 values, which no kernel takes."""
    model = tiny_llama(num_layers=3, head_dim=32, attn_implementation="sparsekv")
    cache = skv.SparseKVCache(model.config, SMALL, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        run(model, cache)
    assert cache.report()["evicted_while_decoding"] > 0
    dtypes = [tensor.dtype for tensor in tensors_of(cache)]
    window = [torch.bfloat16, torch.bfloat16, torch.float32]
    assert dtypes == [torch.bfloat16, torch.bfloat16, *window, *window]


@pytest.mark.parametrize("scorer", ["snapkv", "keyformer", "rkv", "expected_attention", "hybrid"])
def test_what_is_kept_does_not_depend_on_the_callers_autocast(model, scorer):
    """Half precision makes near scores equal, and the order of the tokens would decide."""
    caches = [skv.SparseKVCache(model.config, SMALL.with_(scorer=scorer)) for _ in range(2)]
    for cache in caches:
        run(model, cache, (300,))
    caches[0].compress()
    with torch.autocast("cpu", torch.bfloat16):
        caches[1].compress()
    assert all(torch.equal(one, two) for one, two in zip(*map(tensors_of, caches), strict=True))


# --- compilation --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    """What a test compiles is gone behind it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_computes_what_the_plain_one_does(model):
    caches = [skv.SparseKVCache(model.config, SMALL) for _ in range(2)]
    plain, compiled = run(model, caches[0]), run(torch.compile(model, backend="eager"), caches[1])
    assert all(torch.equal(one, two) for one, two in zip(plain, compiled, strict=True))
    assert caches[0].report(positions=True) == caches[1].report(positions=True)
