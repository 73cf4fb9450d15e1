"""A look at an engine shows its block tables and stored positions as they are, and disturbs nothing."""

from itertools import pairwise

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.errors import CacheError, InputError
from hf_sparsekv.profile import engine_blocks
from hf_sparsekv.testing.models import tiny_llama

CONFIG = skv.SparseKVConfig(num_full_layers=1, budget=24, num_sink_tokens=2, num_recent_tokens=8, observation_window=8)
OPTIONS = skv.EngineConfig(
    kv_memory_bytes=2 << 20,
    block_size=8,
    max_num_seqs=2,
    max_batch_tokens=64,
    max_model_len=128,
    prefill_chunk_tokens=32,
    reserve_output_tokens=0,
)
NEW_TOKENS = 10
LENGTHS = {"short": 20, "chunked": 50, "waits": 30}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=3)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(3, 256, (n,), generator=generator).tolist() for name, n in LENGTHS.items()}


def run(model, prompts, config=CONFIG, *, watch=True):
    """A look after each step, and the tokens of every request."""
    looks, tokens = [], {}
    with skv.Engine(model, config, OPTIONS) as engine:
        for name, ids in prompts.items():
            engine.add_request(ids, skv.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True), request_id=name)
        while engine.has_unfinished:
            tokens |= {output.request_id: output.token_ids for output in engine.step()}
            if watch:
                looks.append(engine_blocks(engine))
        looks.append(engine_blocks(engine))
    return looks, tokens


def test_every_block_is_free_or_held_once(model, prompts):
    looks, _ = run(model, prompts)
    for look in looks:
        tables = [table for request in look.requests.values() for table in (*request.tables, *request.staging)]
        held = [block for table in tables for block in table]
        assert len(set(held)) == len(held) == look.num_blocks - 1 - look.num_free
        assert all(0 < block < look.num_blocks for block in held)
    assert looks[0].num_waiting == 1
    assert looks[-1].requests == {}
    assert looks[-1].num_free == looks[-1].num_blocks - 1


def test_full_layers_grow_window_layers_are_fixed_and_staging_ends(model, prompts):
    looks, _ = run(model, prompts)
    mine = [look.requests["chunked"] for look in looks if "chunked" in look.requests]
    assert [len(table) for table in mine[0].staging] == [0, 7, 7]
    assert mine[-1].staging == ((), (), ())
    assert {request.blocks_of_layers[0] for request in mine} == {7, 8}
    assert {tuple(map(len, request.tables[1:])) for request in mine} == {(3, 3)}


def alone(model, ids, num_new):
    """The positions that `generate` holds after feeding so many new tokens, per layer."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": num_new + 1}
    cache = skv.generate(model, torch.tensor([ids]), CONFIG, **options).cache
    return [layer["positions"][0] for layer in cache.report(positions=True)["layers"]]


def test_positions_are_those_of_generate_alone(model, prompts):
    looks, _ = run(model, prompts)
    for name, ids in prompts.items():
        held = [r.positions for look in looks if (r := look.requests.get(name)) and r.positions is not None]
        for layers in (held[0], held[len(held) // 2], held[-1]):  # in other rows, as requests come and go
            num_new = layers[0].shape[1] - len(ids)
            assert [layer.tolist() for layer in layers] == alone(model, ids, num_new)


def test_one_token_takes_the_place_of_one_in_every_head(model, prompts):
    looks, _ = run(model, {"only": prompts["chunked"]})
    held = [r.positions for look in looks if (r := look.requests.get("only")) and r.positions is not None]
    assert len(held) > 5
    for before, after in pairwise(held):
        new = after[0].shape[1] - 1
        for head_before, head_after in zip(before[1].tolist(), after[1].tolist(), strict=True):
            assert len(head_after) == CONFIG.budget
            assert set(head_after) - set(head_before) == {new}


def test_a_layer_that_grows_has_no_positions(model, prompts):
    looks, _ = run(model, {"only": prompts["short"]}, CONFIG.with_(decode="grow"))
    found = next(r.positions for look in looks if (r := look.requests.get("only")) and r.positions is not None)
    assert found[0].tolist() == [list(range(found[0].shape[1]))] * 2
    assert found[1:] == (None, None)


def test_looking_changes_no_token(model, prompts):
    assert run(model, prompts)[1] == run(model, prompts, watch=False)[1]


def test_only_an_open_engine_can_be_looked_at(model):
    with pytest.raises(InputError, match=r"engine must be an hf_sparsekv\.Engine: got 3"):
        engine_blocks(3)
    engine = skv.Engine(model, CONFIG, OPTIONS)
    engine.close()
    with pytest.raises(CacheError, match="the engine is closed"):
        engine_blocks(engine)
