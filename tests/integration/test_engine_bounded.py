"""Bounded prefill in the engine: chunks end where the configuration says, whatever shares the batch.

Guards against selections that move with the room in a step, pages written past the chunk's own, and scorers whose
failure in an early chunk is forgotten.
"""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.engine.tables import RequestTables
from hf_sparsekv.plan import LayerPlan, ModelShape
from hf_sparsekv.testing.models import tiny_llama

CHUNK, BUDGET, NEW_TOKENS = 16, 21, 12
BOUNDED = skv.SparseKVConfig(
    num_full_layers=1,
    budget=BUDGET,
    num_sink_tokens=2,
    num_recent_tokens=8,
    observation_window=6,
    prefill="bounded",
    prefill_chunk_tokens=CHUNK,
)
EXACT = BOUNDED.with_(prefill="exact", prefill_chunk_tokens=None)
LENGTHS = (1, 15, CHUNK, CHUNK + 1, BUDGET, 2 * CHUNK, 48, 77, 100)
GREEDY = skv.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
ROOMY = skv.EngineConfig(
    kv_memory_bytes=4 << 20,
    max_num_seqs=8,
    max_batch_tokens=256,
    block_size=8,
    reserve_output_tokens=0,
    max_model_len=128,
)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=3)


def prompts_of(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in lengths]


def alone(model, config, prompt):
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return tuple(skv.generate(model, torch.tensor([prompt]), config, **settings).new_tokens[0].tolist())


def assert_nothing_left(engine):
    assert engine._blocks.num_free == engine._blocks.num_usable
    assert not engine._builder._tails
    assert not engine._builder._remains


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scorer": "hybrid"},
        {"scorer": "h2o"},
        {"scorer": "keyformer", "decode": "ring"},
        {"scorer": "keydiff"},
        {"scorer": "expected_attention"},
        {"scorer": "streaming_llm"},
        {"decode": "grow"},
        {"budget": [30, 13]},
        {"budget": 500},
        {"num_full_layers": 0, "budget": 10},
        {"num_full_layers": None, "full_layers": [1]},
    ],
    ids=str,
)
def test_the_engine_gives_what_generate_gives_however_steps_cut_the_prompt(model, changes):
    config, prompts = BOUNDED.with_(**changes), prompts_of()
    expected = [alone(model, config, prompt) for prompt in prompts]
    for options in (
        ROOMY,
        ROOMY.with_(prefill_chunk_tokens=10, block_size=5),  # pieces inside a chunk
        ROOMY.with_(max_batch_tokens=13, max_num_seqs=4, block_size=4),  # pieces of any length
    ):
        with skv.Engine(model, config, options) as engine:
            outputs = engine.generate(prompts, GREEDY)
            assert_nothing_left(engine)
        assert [output.error for output in outputs] == [None] * len(prompts)
        assert [output.token_ids for output in outputs] == expected


def test_bounded_differs_from_exact_where_prompts_are_long(model):
    """Else the equalities of this file would say nothing."""
    prompt = prompts_of((100,))[0]
    assert alone(model, BOUNDED, prompt) != alone(model, EXACT, prompt)


def test_bounded_and_exact_requests_share_batches(model):
    prompts = prompts_of()
    configs = [(BOUNDED, EXACT, BOUNDED.with_(prefill_chunk_tokens=7))[i % 3] for i in range(len(prompts))]
    with skv.Engine(model, BOUNDED, ROOMY.with_(max_batch_tokens=40)) as engine:
        ids = [engine.add_request(p, GREEDY, config=c) for p, c in zip(prompts, configs, strict=True)]
        found = {}
        while engine.has_unfinished:
            found |= {output.request_id: output.token_ids for output in engine.step()}
        assert_nothing_left(engine)
    assert [found[i] for i in ids] == [alone(model, c, p) for p, c in zip(prompts, configs, strict=True)]


def test_preempted_and_resumed_is_uninterrupted(model):
    """Full layers outgrow the pool, so somebody goes and reads its prompt again, chunk by chunk."""
    config, prompts = BOUNDED.with_(decode="grow"), prompts_of((77, 78, 79, 80, 33))
    with skv.Engine(model, config, ROOMY.with_(block_size=2, max_model_len=80 + NEW_TOKENS)) as engine:
        memory = engine.memory
    blocks = 11 + 2 * memory.blocks_of(memory.layers, 81)  # two begin, and some of what they will need
    tight = ROOMY.with_(
        block_size=2,
        max_model_len=80 + NEW_TOKENS,
        max_batch_tokens=24,
        kv_memory_bytes=blocks * memory.block_bytes + 8 * memory.row_bytes,
    )
    with skv.Engine(model, config, tight) as engine:
        outputs = engine.generate(prompts, GREEDY)
        assert_nothing_left(engine)
    assert sum(output.report.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == [alone(model, config, prompt) for prompt in prompts]


def test_a_window_layer_has_blocks_for_its_budget_and_a_chunk_and_no_more(model):
    """A pool that could never stage the prompt serves it; while it is read, the blocks in use are those stated."""
    prompt, size = prompts_of((600,))[0], 8
    layers = 3
    config = BOUNDED.with_(num_full_layers=0)
    options = ROOMY.with_(block_size=size, max_model_len=640)
    with skv.Engine(model, config, options) as engine:
        small = 2 + layers * -(-(BUDGET + CHUNK) // size)
        kv_bytes = small * engine.memory.block_bytes + engine.memory.row_bytes
    with skv.Engine(model, config, options.with_(max_num_seqs=1, kv_memory_bytes=kv_bytes)) as engine:
        request_id = engine.add_request(prompt, GREEDY)
        in_use = set()
        while engine.has_unfinished:
            outputs = engine.step()
            in_use.add(engine._blocks.num_usable - engine._blocks.num_free)
        assert outputs[-1].request_id == request_id
        assert outputs[-1].token_ids == alone(model, config, prompt)
        assert max(in_use) == layers * -(-(BUDGET + CHUNK) // size)
        assert layers * -(-BUDGET // size) in in_use
        assert engine.memory.peak_of(engine.memory.layers, 600) == max(in_use)
    exact = options.with_(max_num_seqs=1, kv_memory_bytes=kv_bytes, prefill_chunk_tokens=CHUNK)
    with pytest.raises(skv.ConfigError, match="does not hold one request"):
        skv.Engine(model, config.with_(prefill="exact", prefill_chunk_tokens=None), exact)


@pytest.mark.parametrize(("chunk", "budget"), [(16, 21), (5, 13), (64, 12), (7, 500)])
def test_tables_count_what_the_largest_chunk_needs(chunk, budget):
    """Against a walk through the chunks."""
    config = BOUNDED.with_(prefill_chunk_tokens=max(chunk, 6), budget=budget, num_full_layers=0)
    plan = LayerPlan.build(config, ModelShape(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
    for prompt in range(1, 90):
        most = kept = 0
        for start in range(0, prompt, plan.chunk_tokens):
            most = max(most, kept + min(plan.chunk_tokens, prompt - start))
            kept = min(budget, kept + min(plan.chunk_tokens, prompt - start))
        assert plan.prefill_tokens(0, prompt) == most
        tables = RequestTables(plan, prompt, prompt + 9, 4)
        own = -(-min(budget, prompt + 9) // 4)
        assert tables.demand(prompt, staged=True) == max(own, -(-most // 4)) or budget >= prompt


class Failing(skv.Scorer):
    """Goes wrong in the first chunk of the prompt whose first key it was told the sum of."""

    name = "failing_in_a_chunk"

    def __init__(self, kind, marked):
        self.kind, self.marked = kind, marked

    def score(self, inputs):
        scores = inputs.attention_received()
        if inputs.positions is None and inputs.num_seen == CHUNK and bool(inputs.keys[0, 0, 0].sum() == self.marked):
            if self.kind == "raises":
                raise RuntimeError("no score today")
            scores[..., 3] = float("nan")
        return scores


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_a_scorer_that_fails_in_an_early_chunk_ends_its_own_request_alone(model, kind):
    prompts = prompts_of((77, 60))
    prompts[0][0] = 5
    seen = []

    class Marking(skv.Scorer):
        name = "marking"

        def score(self, inputs):
            seen.append(inputs.keys[0, 0, 0].sum())
            return inputs.attention_received()

    alone(model, BOUNDED.with_(scorer=Marking()), prompts[0])
    config = BOUNDED.with_(scorer=Failing(kind, seen[0]))
    with skv.Engine(model, config, ROOMY) as engine:
        bad, good = engine.generate(prompts, GREEDY)
        assert_nothing_left(engine)
    assert bad.finish_reason == "error"
    assert ("no score today" if kind == "raises" else "NaN") in bad.error
    assert good.error is None
    assert good.token_ids == alone(model, config, prompts[1])


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_scorers_are_told_which_selection_is_the_prompts_last(model, length):
    told = []

    class Listening(skv.Scorer):
        name = "listening"

        def score(self, inputs):
            told.append((inputs.layer_idx, inputs.num_seen, inputs.is_last))
            return inputs.attention_received()

    config, [prompt] = BOUNDED.with_(scorer=Listening()), prompts_of((length,))
    alone(model, config, prompt)
    by_generate = sorted(told)
    ends = [*range(CHUNK, length, CHUNK), length]
    assert by_generate == [(layer, seen, seen == length) for layer in (1, 2) for seen in ends]
    told.clear()
    with skv.Engine(model, config, ROOMY) as engine:
        engine.generate([prompt], GREEDY)
    assert sorted(told) == by_generate
