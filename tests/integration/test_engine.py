"""The engine gives each request what `generate` gives it alone, whatever shares its batch, its steps or its pool."""

import random
from functools import cache

import pytest
import torch
from transformers import DynamicCache

import hf_sparsekv as skv
from hf_sparsekv.engine.group import Group
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.compare import assert_same_up_to_rounding
from hf_sparsekv.testing.models import tiny_llama, tiny_qwen2, tiny_qwen3

WINDOW, RECENT, BUDGET = 6, 8, 21
LENGTHS = (1, WINDOW, RECENT, BUDGET, BUDGET + 1, 48, 77)
"""Of the prompts: each number at which something begins or ends."""
SPARSE = skv.SparseKVConfig(
    num_full_layers=1, budget=BUDGET, num_sink_tokens=2, num_recent_tokens=RECENT, observation_window=WINDOW
)
DENSE = SPARSE.with_(num_full_layers=3)
NEW_TOKENS = 24
GREEDY = skv.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
ROOMY = skv.EngineConfig(
    kv_memory_bytes=4 << 20,
    max_num_seqs=8,
    max_batch_tokens=256,
    block_size=8,
    reserve_output_tokens=0,  # small pools preempt
    max_model_len=128,
)
TIGHT = ROOMY.with_(max_num_seqs=6, block_size=4)
"""To be given a memory that does not hold what runs at once."""
DECODES = ("replace_lowest", "ring", "grow")


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=3)


def prompts_of(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in lengths]


def alone(model, config, prompts, new_tokens=NEW_TOKENS):
    """The tokens of every prompt by `skv.generate`, one call each."""
    return [_alone(model, config.to_json(), tuple(prompt), new_tokens) for prompt in prompts]


@cache
def _alone(model, config, prompt, new_tokens):
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = skv.generate(model, torch.tensor([prompt]), skv.SparseKVConfig.from_json(config), **settings)
    return tuple(output.new_tokens[0].tolist())


def run(model, config, prompts, options=ROOMY, params=GREEDY):
    """(tokens of every prompt, preemptions) by one engine, after checking that nothing is left behind."""
    with skv.Engine(model, config, options) as engine:
        outputs = engine.generate(prompts, params)
        assert_nothing_left(engine)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.token_ids for output in outputs], sum(output.report.num_preemptions for output in outputs)


def assert_nothing_left(engine):
    assert engine._blocks.num_free == engine._blocks.num_usable
    assert not engine.has_unfinished
    assert not list(engine._tracker)
    assert not engine._builder._tails
    for group in engine._groups.values():
        assert not group.requests
        assert not group.rows.is_active.any()


def tight(config, model, prompts, requests=2.5, new_tokens=NEW_TOKENS):
    """Options with blocks for so many times the largest request, so that what is admitted outgrows the pool."""
    with skv.Engine(model, config, TIGHT) as engine:
        memory = engine.memory
    longest = max(map(len, prompts)) + new_tokens - 1
    blocks = 1 + int(requests * memory.blocks_of(memory.layers, longest))
    return TIGHT.with_(
        max_model_len=longest + 1, kv_memory_bytes=blocks * memory.block_bytes + TIGHT.max_num_seqs * memory.row_bytes
    )


# --- the same as generate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("scorer", scorer_names())
def test_every_scorer_and_decode_mode_gives_what_generate_gives(model, scorer, decode):
    config, prompts = SPARSE.with_(scorer=scorer, decode=decode), prompts_of((BUDGET + 1, 77))
    expected = alone(model, config, prompts)
    assert run(model, config, prompts)[0] == expected
    assert run(model, config, prompts, ROOMY.with_(prefill_chunk_tokens=13))[0] == expected


@pytest.mark.parametrize(
    "model",
    [tiny_llama(3), tiny_llama(3, 9, 3), tiny_llama(3, 4, 4), tiny_qwen2(3), tiny_qwen3(3)],
    ids=["8/2", "9/3", "4/4", "qwen2", "qwen3"],
)
def test_every_architecture_and_every_length_of_prompt(model):
    prompts = prompts_of()
    assert run(model, SPARSE, prompts)[0] == alone(model, SPARSE, prompts)


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 0.4},
        {"budget": 0.4, "decode": "grow"},
        {"budget": [30, 13]},
        {"budget": [0.25, 40]},
        {"budget": 30, "budget_shape": "pyramid"},
        {"budget": 0.5, "budget_shape": "pyramid"},
        {"budget": 10},
        {"budget": 500},
        {"num_full_layers": 0},
        {"num_full_layers": 0, "decode": "grow"},
        {"num_full_layers": None, "full_layers": [1]},
        {"num_full_layers": None, "full_layers": [2, 0]},
        {"num_full_layers": None, "full_layers": []},
        {"num_sink_tokens": 0, "num_recent_tokens": 1, "observation_window": 1, "budget": 1},
        {"budget": 30, "prompt_share": 1.0},
        {"budget": [30, 13], "prompt_share": 0.0},
        {"decay": 0.5, "pooling": "max", "pool_kernel_size": 3, "group_reduction": "max"},
    ],
    ids=str,
)
def test_every_shape_of_plan(model, changes):
    config, prompts = SPARSE.with_(**changes), prompts_of((1, BUDGET + 1, 48, 77))
    expected = alone(model, config, prompts)
    assert run(model, config, prompts)[0] == expected
    assert run(model, config, prompts, ROOMY.with_(block_size=5, prefill_chunk_tokens=32))[0] == expected


@pytest.mark.parametrize("chunk", [None, 16])
def test_a_dense_configuration_is_transformers_own_cache(model, chunk):
    prompts = prompts_of()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        result = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **{CACHE_KEYWORD: DynamicCache()}, **settings
        )
        expected.append(tuple(result[0, len(prompt) :].tolist()))
    assert run(model, DENSE, prompts, ROOMY.with_(prefill_chunk_tokens=chunk))[0] == expected


# --- whatever else runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("scorer", ["snapkv", "h2o", "keydiff"])  # read the last query rows, all of them, none
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(model, chunk, scorer, decode):
    config, prompts = SPARSE.with_(scorer=scorer, decode=decode), prompts_of((1, 7, BUDGET + 1, 77))
    assert run(model, config, prompts, ROOMY.with_(prefill_chunk_tokens=chunk))[0] == alone(model, config, prompts)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_and_any_arrival_gives_each_request_what_it_gets_alone(model, seed):
    prompts = prompts_of((*LENGTHS, 3, 60, 22))
    expected = alone(model, SPARSE, prompts)
    order, rng = list(range(len(prompts))), random.Random(seed)
    rng.shuffle(order)
    options = ROOMY.with_(
        max_num_seqs=1 + 3 * (seed % 3), max_batch_tokens=64, prefill_chunk_tokens=rng.choice([9, 64])
    )
    waiting, finished, streamed = list(order), {}, {str(i): () for i in order}
    with skv.Engine(model, SPARSE, options) as engine:
        while waiting or engine.has_unfinished:
            for _ in range(rng.choice([0, 0, 0, 1, 3])):
                if waiting:
                    one = waiting.pop()
                    engine.add_request(prompts[one], GREEDY, request_id=str(one), stream=rng.random() < 0.5)
            for output in engine.step():
                streamed[output.request_id] += output.new_token_ids
                assert streamed[output.request_id] == output.token_ids
                if output.is_finished:
                    assert output.request_id not in finished
                    finished[output.request_id] = output.token_ids
        assert_nothing_left(engine)
    assert [finished[str(i)] for i in range(len(prompts))] == expected


def test_several_configurations_share_a_batch(model):
    configs = [DENSE, SPARSE, SPARSE.with_(budget=0.5, scorer="hybrid", decode="ring"), SPARSE.with_(decode="grow")]
    prompts = prompts_of((5, 22, 48, 77))
    expected = {(i, j): alone(model, c, [p])[0] for i, c in enumerate(configs) for j, p in enumerate(prompts)}
    for options in (ROOMY, ROOMY.with_(prefill_chunk_tokens=10), ROOMY.with_(max_num_seqs=3)):
        outputs = {}
        with skv.Engine(model, SPARSE, options) as engine:
            for i, config in enumerate(configs):
                for j, prompt in enumerate(prompts):
                    engine.add_request(prompt, GREEDY, config=config, request_id=f"{i} {j}", stream=False)
                    outputs |= {output.request_id: output.token_ids for output in engine.step()}
            while engine.has_unfinished:
                outputs |= {output.request_id: output.token_ids for output in engine.step()}
            assert_nothing_left(engine)
        assert outputs == {f"{i} {j}": tokens for (i, j), tokens in expected.items()}


@pytest.mark.parametrize("config", [SPARSE, DENSE, SPARSE.with_(decode="grow")], ids=["sparse", "dense", "grow"])
@pytest.mark.parametrize("chunk", [None, 10])
def test_what_the_memory_held_before_does_not_matter(model, config, chunk):
    prompts = prompts_of((1, BUDGET + 1, 48, 77))
    with skv.Engine(model, config, ROOMY.with_(prefill_chunk_tokens=chunk)) as engine:
        engine._pages.keys.fill_(float("nan"))
        engine._pages.values.fill_(float("nan"))
        outputs = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == alone(model, config, prompts)


# --- preemption ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("changes", [{}, {"decode": "ring"}, {"decode": "grow"}, {"num_full_layers": 3}], ids=str)
def test_preempted_and_resumed_is_uninterrupted(model, changes, chunk):
    config, prompts, new = SPARSE.with_(**changes), prompts_of((5, 30, 12, 22, 3, 30, 8, 25)), 60
    params = skv.SamplingParams(max_tokens=new, ignore_eos=True)
    options = tight(config, model, prompts, new_tokens=new).with_(prefill_chunk_tokens=chunk)
    tokens, preemptions = run(model, config, prompts, options, params)
    assert preemptions >= 3
    assert tokens == alone(model, config, prompts, new)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_preemption_changes_neither_random_numbers_nor_penalties(model, penalty):
    prompts, new = prompts_of((5, 30, 12, 22, 3, 30, 8, 25)), 60
    params = [
        skv.SamplingParams(
            max_tokens=new, ignore_eos=True, do_sample=i % 3 != 0, seed=i, repetition_penalty=penalty, logprobs=2
        )
        for i in range(len(prompts))
    ]
    with skv.Engine(model, SPARSE, ROOMY) as engine:
        roomy = engine.generate(prompts, params)
    with skv.Engine(model, SPARSE, tight(SPARSE, model, prompts, new_tokens=new)) as engine:
        squeezed = engine.generate(prompts, params)
        assert_nothing_left(engine)
    assert sum(output.report.num_preemptions for output in squeezed) >= 3
    assert [output.token_ids for output in squeezed] == [output.token_ids for output in roomy]
    for one, other in zip(squeezed, roomy, strict=True):
        chosen = [[entry.logprob for entry in output.logprobs] for output in (one, other)]
        assert len(chosen[0]) == new
        assert_same_up_to_rounding(*map(torch.tensor, chosen))


def test_a_resumed_request_goes_on_from_the_tokens_it_had_not_from_those_sampled_again(model, monkeypatch):
    """Elsewhere than here, a batch of another size rounds differently, and sampling again gives other tokens."""
    prompts, new = prompts_of((5, 30, 12, 22, 3, 30, 8, 25)), 60
    params = skv.SamplingParams(max_tokens=new, ignore_eos=True, repetition_penalty=1.3)
    feed_known, spoiled = Group.feed_known, []

    def spoil_and_feed(group):
        for request in group.requests:
            if request.is_replaying:
                group.rows.tokens[request.row] = 3
                group.sampler.reserve_penalty()[request.row] = True
                spoiled.append(request)
        feed_known(group)

    expected, _ = run(model, SPARSE, prompts, ROOMY, params)
    monkeypatch.setattr(Group, "feed_known", spoil_and_feed)
    tokens, _ = run(model, SPARSE, prompts, tight(SPARSE, model, prompts, new_tokens=new), params)
    assert len(spoiled) >= 20
    assert tokens == expected


def test_a_preempted_request_shows_no_token_twice(model):
    prompts, new = prompts_of((5, 30, 12, 22, 3, 30, 8, 25)), 60
    params, seen = skv.SamplingParams(max_tokens=new, ignore_eos=True), {}
    with skv.Engine(model, SPARSE, tight(SPARSE, model, prompts, new_tokens=new)) as engine:
        for prompt in prompts:
            seen[engine.add_request(prompt, params)] = []
        while engine.has_unfinished:
            for output in engine.step():
                seen[output.request_id] += output.new_token_ids
                assert len(output.new_token_ids) == 1
        assert engine.metrics.snapshot()["preemptions"] >= 3
    assert [tuple(tokens) for tokens in seen.values()] == alone(model, SPARSE, prompts, new)


# --- sampling -----------------------------------------------------------------------------------------------------


def test_a_seed_decides_alone_what_is_drawn(model):
    prompts = prompts_of()
    params = [
        skv.SamplingParams(
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            do_sample=True,
            temperature=0.5 + i / 5,
            top_k=[None, 20][i % 2],
            top_p=[None, 0.9, 0.8][i % 3],
            min_p=[0.02, None][i % 2],
            repetition_penalty=[1.0, 1.2][i % 2],
            seed=100 + i,
        )
        for i in range(len(prompts))
    ]
    with skv.Engine(model, SPARSE, ROOMY) as engine:
        together = [output.token_ids for output in engine.generate(prompts, params)]
        backwards = [output.token_ids for output in engine.generate(prompts[::-1], params[::-1])][::-1]
        each = [engine.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
        beside = [prompts[0]] * len(prompts)
        same_prompt = [output.token_ids for output in engine.generate(beside, params)]
    assert together == backwards == each
    assert len(set(same_prompt)) == len(prompts)
