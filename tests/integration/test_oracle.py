"""Sparse attention equals dense attention masked to what was kept, in every way a cache can be fed."""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.compare import assert_same_up_to_rounding
from hf_sparsekv.testing.oracle import Oracle, forward_both

pytestmark = pytest.mark.usefixtures("registered")

SMALL = {"num_full_layers": 1, "budget": 24, "num_recent_tokens": 8, "observation_window": 8}
ONE_TURN = (100, *[1] * 30)
THREE_TURNS = (100, *[1] * 5, 40, *[1] * 5, 3, *[1] * 12)


def run(model, config, turns, *, batch=1, padding=None):
    """Feed columns turn by turn to both; compare the logits of every token.

    `padding` maps a turn to the padding of each request: n columns at the left, or -n at the right.
    """
    cache, oracle = skv.SparseKVCache(model.config, config), Oracle(model)
    columns = torch.zeros(batch, 0, dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    for turn, length in enumerate(turns):
        new = torch.ones(batch, length, dtype=torch.bool)
        for row, pads in enumerate((padding or {}).get(turn, ())):
            new[row, :pads] = pads < 0
            if pads < 0:
                new[row, :] = True
                new[row, pads:] = False
        columns = torch.cat([columns, new], dim=1)
        ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)
        sparse, dense = forward_both(model, cache, oracle, ids, columns)
        assert_same_up_to_rounding(sparse[new], dense[new])
        if length == 1 and turn:
            assert_bounds(cache)
    return cache


def assert_bounds(cache):
    """No window layer holds more than its budget once decoding goes on."""
    for layer in cache.report()["layers"]:
        if layer["kind"] == "window":
            for seen, stored in zip(cache.padding.tokens, layer["stored"], strict=True):
                assert stored <= cache.plan.layers[layer["layer"]].kept_tokens(seen)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3), (4, 4)])
@pytest.mark.parametrize("turns", [ONE_TURN, THREE_TURNS], ids=["one turn", "three turns"])
def test_replacement_equals_the_oracle(tiny_llama, heads, kv_heads, turns):
    model = tiny_llama(num_heads=heads, num_kv_heads=kv_heads, attn_implementation="sparsekv")
    cache = run(model, skv.SparseKVConfig(**SMALL), turns)
    report = cache.report()
    assert report["evicted_at_prompt"] > 0
    assert report["evicted_while_decoding"] > 0


@pytest.mark.parametrize("scorer", scorer_names())
@pytest.mark.parametrize("decode", ["replace_lowest", "ring"])
def test_every_scorer_equals_the_oracle(tiny_llama, scorer, decode):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    run(model, skv.SparseKVConfig(**SMALL, scorer=scorer, decode=decode), THREE_TURNS[:12], batch=2)


@pytest.mark.parametrize("decode", ["ring", "grow"])
@pytest.mark.parametrize("turns", [ONE_TURN, THREE_TURNS, (10, *[1] * 80)], ids=["one", "three", "short prompt"])
def test_other_decode_modes_equal_the_oracle(tiny_llama, decode, turns):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    config = skv.SparseKVConfig(**SMALL, decode=decode)
    cache, oracle = skv.SparseKVCache(model.config, config), Oracle(model)
    columns = torch.zeros(2, 0, dtype=torch.bool)
    for length in turns:
        columns = torch.cat([columns, torch.ones(2, length, dtype=torch.bool)], dim=1)
        ids = torch.randint(3, model.config.vocab_size, (2, length))
        assert_same_up_to_rounding(*forward_both(model, cache, oracle, ids, columns))


@pytest.mark.parametrize(
    "padding",
    [{0: (30, 0, 5)}, {0: (-30, 0, -5)}, {0: (-30, 0, 85), 6: (-10, 0, 3)}],
    ids=["left", "right", "mixed, two turns"],
)
@pytest.mark.parametrize("budget", [24, 0.3])
def test_padded_batches_equal_the_oracle(tiny_llama, padding, budget):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    config = skv.SparseKVConfig(**{**SMALL, "budget": budget})
    run(model, config, THREE_TURNS[:12], batch=3, padding=padding)


@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9, 23, 24, 25])
def test_prompts_around_the_window_and_the_budget_equal_the_oracle(tiny_llama, prompt):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    run(model, skv.SparseKVConfig(**SMALL), (prompt, *[1] * 40))


@pytest.mark.parametrize("full_layers", [(), (0, 2), (3,), (0, 1, 2, 3)])
def test_any_set_of_full_layers_equals_the_oracle(tiny_llama, full_layers):
    model = tiny_llama(attn_implementation="sparsekv")
    options = {name: value for name, value in SMALL.items() if name != "num_full_layers"}
    run(model, skv.SparseKVConfig(**options, full_layers=full_layers), (60, *[1] * 6))


def test_beams_move_everything_together(tiny_llama):
    model = tiny_llama(num_layers=3, attn_implementation="sparsekv")
    cache, oracle = skv.SparseKVCache(model.config, skv.SparseKVConfig(**SMALL)), Oracle(model)
    columns = torch.ones(3, 0, dtype=torch.bool)
    orders = iter([torch.tensor(order) for order in ([2, 2, 0], [0, 1, 1], [1, 0, 2], [2, 1, 0])] * 5)
    for step, length in enumerate([60, *[1] * 20]):
        columns = torch.cat([columns, torch.ones(3, length, dtype=torch.bool)], dim=1)
        ids = torch.randint(3, model.config.vocab_size, (3, length))
        assert_same_up_to_rounding(*forward_both(model, cache, oracle, ids, columns))
        if step:
            order = next(orders)
            cache.reorder_cache(order)
            oracle.select_rows(order)


@pytest.mark.builtin_model
def test_the_builtin_model_equals_the_oracle(builtin_model_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(builtin_model_path, attn_implementation="sparsekv")
    config = skv.SparseKVConfig(num_full_layers=3, budget=96, num_recent_tokens=32)
    run(model, config, (300, *[1] * 8, 50, *[1] * 8), batch=2, padding={0: (40, 0)})
