"""With a prefix cache each request gets what it gets without one: the same tokens from the same kept sets."""

import random

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv import ops
from hf_sparsekv.attention import packed
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.compare import assert_close_fp32
from hf_sparsekv.testing.models import tiny_llama

SIZE, WINDOW = 4, 6
SPARSE = skv.SparseKVConfig(
    num_full_layers=1, budget=21, num_sink_tokens=2, num_recent_tokens=8, observation_window=WINDOW
)
DENSE = SPARSE.with_(num_full_layers=3)
BOUNDED = SPARSE.with_(prefill="bounded", prefill_chunk_tokens=16)
CACHING = skv.EngineConfig(
    kv_memory_bytes=2 << 20,
    max_num_seqs=6,
    max_batch_tokens=128,
    block_size=SIZE,
    reserve_output_tokens=0,  # small pools preempt
    max_model_len=160,
    prefix_caching=True,
)
GREEDY = skv.SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=3)


@pytest.fixture
def kept(monkeypatch):
    """The kept sets of every selection, in order."""
    sets, select = [], packed.select_kept

    def watch(*arguments):
        result = select(*arguments)
        sets.append([sorted(head) for head in result.index[0].tolist()])
        return result

    monkeypatch.setattr(packed, "select_kept", watch)
    return sets


def tokens_of(length, seed):
    return torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_by_one(engine, prompts, config=None):
    return [engine.generate([prompt], GREEDY, config=config)[0] for prompt in prompts]


def without_cache(model, config, prompts, options=CACHING):
    with skv.Engine(model, config, options.with_(prefix_caching=False)) as engine:
        outputs = one_by_one(engine, prompts)
    assert not any(output.cached_tokens for output in outputs)
    return [output.token_ids for output in outputs]


def assert_nothing_left(engine):
    assert engine._blocks.num_free == engine._blocks.num_usable
    assert not engine._builder._tails
    engine.forget_prefixes()
    assert len(engine._blocks._free) == engine._blocks.num_usable
    assert not any(engine._blocks._state)


CALIBRATED = skv.SparseKVConfig(
    budget_shape="calibrated",
    plan=skv.BudgetPlan(
        num_heads=8, num_kv_heads=2, head_dim=16, unit="tokens", budgets=(40, None, 14), prompt_length=120
    ),
    num_sink_tokens=2,
    num_recent_tokens=8,
    observation_window=WINDOW,
)
CONFIGS = {
    "dense": DENSE,
    "calibrated": CALIBRATED,
    "calibrated in shares": CALIBRATED.with_(
        plan=skv.BudgetPlan(
            num_heads=8, num_kv_heads=2, head_dim=16, unit="fraction", budgets=(0.6, 0.2, None), prompt_length=120
        )
    ),
    "snapkv": SPARSE,
    "hybrid": SPARSE.with_(scorer="hybrid"),
    "keydiff": SPARSE.with_(scorer="keydiff"),
    "ring": SPARSE.with_(decode="ring"),
    "grow": SPARSE.with_(decode="grow"),
    "all fits": SPARSE.with_(budget=150),
    "all fits, grow": SPARSE.with_(budget=150, decode="grow"),
    "fraction": SPARSE.with_(budget=0.4),
    "mixed": SPARSE.with_(budget=[150, 12]),
    "no full layer": SPARSE.with_(num_full_layers=0),
}


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("name", CONFIGS)
def test_questions_about_one_document_give_what_they_give_without_a_cache(model, kept, name, chunk):
    config, options = CONFIGS[name], CACHING.with_(prefill_chunk_tokens=chunk)
    prompts = [tokens_of(40, 0) + tokens_of(length, length) for length in (7, 9, 25, 1, 30)]
    expected = without_cache(model, config, prompts, options)
    expected_sets, kept[:] = list(kept), []
    with skv.Engine(model, config, options) as engine:
        outputs = one_by_one(engine, prompts)
        assert_nothing_left(engine)
    assert [output.token_ids for output in outputs] == expected
    assert kept == expected_sets
    scored = 1 if name in ("dense", "keydiff") else WINDOW
    hits = [0, 40, 40, (41 - scored) // SIZE * SIZE, 40]
    # A layer that keeps a prompt of several chunks whole has no second place for it, to be left to others.
    is_left = chunk is None or ("fits" not in name and name != "mixed")
    assert [output.cached_tokens for output in outputs] == (hits if is_left else [0] * 5)


@pytest.mark.parametrize("scorer", scorer_names())
def test_every_scorer_hits_or_says_that_it_reads_all_rows(model, scorer):
    config = SPARSE.with_(scorer=scorer)
    prompts = [tokens_of(40, 0) + tokens_of(9, seed) for seed in (1, 2)]
    with skv.Engine(model, config, CACHING) as engine:
        outputs = one_by_one(engine, prompts)
        later = engine.generate([prompts[0]], GREEDY, config=SPARSE)[0]
    assert [output.token_ids for output in outputs] == without_cache(model, config, prompts)
    assert outputs[1].cached_tokens == (0 if config.scorer_object.queries == "all" else 40)
    assert later.cached_tokens > 0  # a scorer that takes nothing leaves its prompt to others


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (40, 40, 32),  # all known: the rows that score are computed, block by block
        (SIZE, SIZE + WINDOW, SIZE),  # a prefix of one block
        (SIZE - 1, 40, 0),  # no whole block
        (42, 50, 40),  # of the last block only a part
        (40, WINDOW + SIZE - 1, 0),  # too short for a block and the rows that score
    ],
)
def test_a_hit_is_whole_blocks_and_leaves_the_rows_that_score(model, first, second, cached):
    prompt = tokens_of(80, 3)
    with skv.Engine(model, SPARSE, CACHING) as engine:
        outputs = one_by_one(engine, [prompt[:first], prompt[:second]])
    assert [output.cached_tokens for output in outputs] == [0, cached]
    assert [output.token_ids for output in outputs] == without_cache(model, SPARSE, [prompt[:first], prompt[:second]])


@pytest.mark.parametrize(("changed", "cached"), [(0, 0), (SIZE - 1, 0), (19, 16), (20, 20), (39, 36)])
def test_prompts_that_differ_in_one_token_share_the_blocks_before_it(model, changed, cached):
    one = tokens_of(60, 3)
    other = [*one[:changed], one[changed] + 1, *one[changed + 1 :]]
    with skv.Engine(model, SPARSE, CACHING) as engine:
        outputs = one_by_one(engine, [one, other])
    assert outputs[1].cached_tokens == cached
    assert [output.token_ids for output in outputs] == without_cache(model, SPARSE, [one, other])


class Watching(skv.Scorer):
    """SnapKV's score; remembers the LSE that it was given, and the one of its definition."""

    name = "watching"

    def __init__(self):
        self.given = []

    def score(self, inputs):
        defined = ops.window_lse(inputs.queries, inputs.keys, inputs.lengths, inputs.scale, inputs.keys.shape[2])
        self.given.append((inputs.lse, defined))
        return inputs.attention_received()


@pytest.mark.parametrize(("chunk", "is_known"), [(WINDOW, True), (WINDOW + 3, True), (WINDOW - 1, False)])
def test_scorers_get_the_lse_of_a_prompt_that_goes_on_if_its_last_chunk_has_all_of_their_rows(model, chunk, is_known):
    scorer = Watching()
    config = SPARSE.with_(scorer=scorer)
    with skv.Engine(model, config, CACHING.with_(prefill_chunk_tokens=chunk)) as engine:
        engine.generate([tokens_of(10 * chunk, 1)], GREEDY)
    assert len(scorer.given) == 2  # window layers
    for given, defined in scorer.given:
        assert (given is not None) == is_known
        if is_known:
            assert_close_fp32(given, defined)


def test_configurations_share_what_they_compute(model, kept):
    prompts = [tokens_of(40, 0) + tokens_of(10, seed) for seed in range(len(CONFIGS))]
    expected = [without_cache(model, config, [p])[0] for config, p in zip(CONFIGS.values(), prompts, strict=True)]
    expected_sets, kept[:] = list(kept), []
    with skv.Engine(model, SPARSE, CACHING) as engine:
        outputs = [one_by_one(engine, [p], c)[0] for c, p in zip(CONFIGS.values(), prompts, strict=True)]
        assert_nothing_left(engine)
    assert [output.token_ids for output in outputs] == expected
    assert kept == expected_sets
    assert [output.cached_tokens for output in outputs] == [0] + [40] * (len(CONFIGS) - 1)


@pytest.mark.parametrize("exact_first", [True, False])
@pytest.mark.parametrize("chunk", [None, 10])
def test_a_bounded_prefill_leaves_nothing_to_exact_ones_and_takes_nothing(model, kept, exact_first, chunk):
    """Behind its first chunk its keys and values are no longer the dense model's."""
    document, options = tokens_of(40, 0), CACHING.with_(prefill_chunk_tokens=chunk)
    configs = [SPARSE, BOUNDED, SPARSE, BOUNDED, DENSE, BOUNDED.with_(decode="grow")]
    configs = configs if exact_first else configs[1:] + configs[:1]
    prompts = [document + tokens_of(20, seed) for seed in range(len(configs))]
    expected = [without_cache(model, c, [p], options)[0] for c, p in zip(configs, prompts, strict=True)]
    expected_sets, kept[:] = list(kept), []
    with skv.Engine(model, SPARSE, options) as engine:
        outputs = [one_by_one(engine, [p], c)[0] for c, p in zip(configs, prompts, strict=True)]
        known = engine.metrics.snapshot()["blocks_cached"]
        bounded = engine.generate([tokens_of(60, 7)], GREEDY, config=BOUNDED)[0]
        assert engine.metrics.snapshot()["blocks_cached"] == known  # a new prompt, and no block more
        assert_nothing_left(engine)
    assert [output.token_ids for output in outputs] == expected
    assert kept[: len(expected_sets)] == expected_sets
    exact = [output.cached_tokens for output, c in zip(outputs, configs, strict=True) if c.prefill == "exact"]
    assert exact == [0, 40, 40]
    assert [o.cached_tokens for o, c in zip(outputs, configs, strict=True) if c.prefill == "bounded"] == [0, 0, 0]
    assert bounded.token_ids != without_cache(model, SPARSE, [tokens_of(60, 7)])[0]  # else nothing could go wrong


def test_requests_that_begin_together_share_in_the_next_step_not_in_their_own(model):
    prompts = [tokens_of(40, 0) + tokens_of(10, seed) for seed in range(6)]
    with skv.Engine(model, SPARSE, CACHING) as engine:
        outputs = engine.generate(prompts, GREEDY)  # 128 tokens a step: two prompts and a part, then the others
        assert_nothing_left(engine)
        snapshot = engine.metrics.snapshot()
    assert [output.token_ids for output in outputs] == without_cache(model, SPARSE, prompts)
    assert [output.cached_tokens for output in outputs] == [0, 0, 40, 40, 40, 40]
    assert (snapshot["prefix_hits"], snapshot["prompt_tokens_cached"], snapshot["prompt_tokens"]) == (4, 160, 300)


@pytest.mark.parametrize(("config", "outputs_too"), [(DENSE, True), (SPARSE, False), (CONFIGS["grow"], False)])
def test_the_next_turn_of_a_conversation_begins_with_the_last(model, config, outputs_too):
    prompts, outputs = [tokens_of(20, 0)], []
    with skv.Engine(model, config, CACHING) as engine:
        for turn in range(4):
            outputs += engine.generate([prompts[-1]], GREEDY)
            prompts.append([*prompts[-1], *outputs[-1].token_ids, *tokens_of(7, turn)])
        assert_nothing_left(engine)
    assert [output.token_ids for output in outputs] == without_cache(model, config, prompts[:-1])
    # Of twelve outputs the last was never fed.
    known = [len(prompt) + (11 if outputs_too else 0) for prompt in prompts[:-2]]
    assert [output.cached_tokens for output in outputs] == [0, *[count // SIZE * SIZE for count in known]]


def test_a_pool_under_pressure_serves_everybody_and_forgets_the_longest_unused(model):
    documents = [tokens_of(60, seed) for seed in range(8)]
    prompts = [documents[i] + tokens_of(9, 100 + i) for i in (0, 1, 2, 3, 4, 5, 6, 7, 7, 0, 7)]
    options = small(model, SPARSE, requests=4.0)
    with skv.Engine(model, SPARSE, options) as engine:
        outputs = one_by_one(engine, prompts)
        assert engine._blocks.num_evicted > 0
        assert_nothing_left(engine)
    assert [output.token_ids for output in outputs] == without_cache(model, SPARSE, prompts)
    assert [output.cached_tokens > 0 for output in outputs] == [False] * 8 + [True, False, True]


@pytest.mark.parametrize("name", ["dense", "snapkv", "grow"])
def test_preempted_requests_come_back_through_the_cache_with_the_same_result(model, name):
    config, prompts = CONFIGS[name], [tokens_of(20, 0) + tokens_of(6 + seed, seed) for seed in range(8)]
    params = skv.SamplingParams(max_tokens=60, ignore_eos=True)
    with skv.Engine(model, config, CACHING.with_(prefix_caching=False)) as engine:
        expected = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    with skv.Engine(model, config, small(model, config, requests=2.2)) as engine:
        outputs = engine.generate(prompts, params)
        assert_nothing_left(engine)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.report.num_preemptions for output in outputs) >= 3


def test_a_request_that_is_aborted_while_it_shares_takes_nothing_from_the_others(model):
    prompts = [tokens_of(60, 0) + tokens_of(40, seed) for seed in range(6)]
    expected = without_cache(model, SPARSE, prompts)
    for steps in range(6):
        with skv.Engine(model, SPARSE, CACHING.with_(prefill_chunk_tokens=16, max_batch_tokens=40)) as engine:
            engine.generate(prompts[:1], GREEDY)
            names, outputs = [engine.add_request(prompt, GREEDY, stream=False) for prompt in prompts], {}
            for _ in range(steps):
                outputs |= {output.request_id: output for output in engine.step()}
            for name in names[::2]:
                engine.abort(name)
            while engine.has_unfinished:
                outputs |= {output.request_id: output for output in engine.step()}
            assert_nothing_left(engine)
        assert [outputs[name].token_ids for name in names[1::2]] == expected[1::2]
        assert all(outputs[name].cached_tokens == 60 for name in names[1::2])


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_a_forward_pass_that_failed_leaves_no_prefix(model, config, monkeypatch):
    prompt = tokens_of(40, 0)

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    with skv.Engine(model, config, CACHING) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.generate([prompt], GREEDY)
        again = one_by_one(engine, [prompt, prompt])
        assert_nothing_left(engine)
    assert [output.cached_tokens > 0 for output in again] == [False, True]
    assert [output.token_ids for output in again] == without_cache(model, config, [prompt] * 2)


def test_what_the_memory_held_before_does_not_matter(model):
    prompts = [tokens_of(40, 0) + tokens_of(9, seed) for seed in range(3)]
    with skv.Engine(model, SPARSE, CACHING) as engine:
        engine._pages.keys.fill_(float("nan"))
        engine._pages.values.fill_(float("nan"))
        outputs = one_by_one(engine, prompts)
    assert [output.token_ids for output in outputs] == without_cache(model, SPARSE, prompts)


def test_prefixes_are_forgotten_between_requests_only(model):
    prompt = tokens_of(40, 0)
    with skv.Engine(model, SPARSE, CACHING) as engine:
        one_by_one(engine, [prompt])
        name = engine.add_request(prompt, GREEDY)
        with pytest.raises(skv.RequestError, match="while requests are running"):
            engine.forget_prefixes()
        engine.abort(name)
        engine.forget_prefixes()
        assert engine.metrics.snapshot()["blocks_cached"] == 0
        assert one_by_one(engine, [prompt])[0].cached_tokens == 0


def small(model, config, requests):
    """Options with blocks for so many times the largest request."""
    with skv.Engine(model, config, CACHING) as engine:
        memory = engine.memory
    length = 95
    blocks = 1 + int(requests * memory.blocks_of(memory.layers, length))
    rows = CACHING.max_num_seqs * memory.row_bytes
    return CACHING.with_(max_model_len=length, kv_memory_bytes=blocks * memory.block_bytes + rows)


def random_entry(rng, documents):
    document = rng.choice(documents)
    prompt = document[: rng.randrange(1, len(document))] + [rng.randrange(3, 256) for _ in range(rng.randrange(20))]
    params = skv.SamplingParams(max_tokens=rng.randrange(1, 30), ignore_eos=True)
    return prompt, params, rng.choice([*(CONFIGS | {"all fits": BOUNDED}).values(), SPARSE.with_(scorer="h2o")])


@pytest.mark.parametrize(("seed", "requests"), [(0, 2.0), (1, 2.5)])
def test_a_soak_of_shared_prefixes_gives_each_request_what_it_gets_alone(model, seed, requests):
    rng, entries, outputs, live = random.Random(seed), {}, {}, []
    documents = [tokens_of(46, i) for i in range(4)]
    options = small(model, DENSE, requests=requests)
    options = options.with_(max_batch_tokens=64, prefill_chunk_tokens=rng.choice([None, 17]))
    with skv.Engine(model, SPARSE, options) as engine:
        while len(entries) < 150 or engine.has_unfinished:
            for _ in range(min(rng.choice([0, 0, 1, 3]), 150 - len(entries))):
                prompt, params, config = random_entry(rng, documents)
                name = engine.add_request(prompt, params, config=config, stream=False)
                entries[name] = (prompt, params, config)
                live.append(name)
            finished = {output.request_id: output for output in engine.step()}
            if live and rng.random() < 0.05:
                aborted = engine.abort(live[rng.randrange(len(live))])
                finished |= {} if aborted is None else {aborted.request_id: aborted}
            outputs |= finished
            live = [name for name in live if name not in finished]
        snapshot, evicted = engine.metrics.snapshot(), engine._blocks.num_evicted
        assert_nothing_left(engine)
    assert snapshot["prefix_hits"] >= 30
    assert snapshot["preemptions"] >= 1
    assert evicted >= 100
    with skv.Engine(model, SPARSE, CACHING.with_(prefix_caching=False)) as engine:
        for name, (prompt, params, config) in entries.items():
            alone = engine.generate([prompt], params, config=config)[0].token_ids
            tokens = outputs[name].token_ids
            assert alone[: len(tokens)] == tokens
            assert len(tokens) == params.max_tokens or outputs[name].finish_reason == "abort"
