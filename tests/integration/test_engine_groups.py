"""Requests with sparse configurations of their own: what they reserve, and when it goes again."""

import gc
import weakref

import pytest

import hf_sparsekv as skv
from hf_sparsekv.engine import groups
from hf_sparsekv.testing.models import tiny_llama

SPARSE = skv.SparseKVConfig(num_full_layers=1, budget=21, num_sink_tokens=2, num_recent_tokens=8, observation_window=6)
OTHERS = [SPARSE.with_(budget=22 + i) for i in range(9)]
OPTIONS = skv.EngineConfig(
    kv_memory_bytes=1 << 20,
    max_num_seqs=4,
    max_batch_tokens=64,
    block_size=4,
    reserve_output_tokens=0,  # small pools preempt
    max_model_len=128,
)
PROMPT = [(7 * i) % 250 + 3 for i in range(50)]
GREEDY = skv.SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=3)


@pytest.fixture
def engine(model):
    with skv.Engine(model, SPARSE, OPTIONS) as engine:
        yield engine
        assert engine._blocks.num_free == engine._blocks.num_usable


def held(engine):
    """The configurations that have rows, in the order in which they were made."""
    return [group.rows.config for group in engine._groups.values()]


def run(engine, config):
    return engine.generate([PROMPT], GREEDY, config=config)[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "config", "error"),
    [
        ([], GREEDY, OTHERS[0], "empty prompt"),
        ([999], GREEDY, OTHERS[0], "token ids must be"),
        (PROMPT, skv.SamplingParams(max_tokens=100), OTHERS[0], "at most 128"),
        (PROMPT, skv.SamplingParams(stop_strings=("a",)), OTHERS[0], "tokenizer"),
        (PROMPT, "greedy", OTHERS[0], "params must be"),
        (PROMPT, GREEDY, SPARSE.with_(num_full_layers=4), "only 3 layers"),
        (PROMPT, GREEDY, {"budget": 30}, "config must be a SparseKVConfig: got {"),
    ],
)
def test_a_request_that_is_refused_reserves_nothing(engine, prompt, params, config, error):
    with pytest.raises(skv.SparseKVError, match=error):
        engine.add_request(prompt, params, config=config)
    assert held(engine) == [SPARSE]


def test_a_group_is_made_once_for_all_requests_of_a_configuration(engine):
    run(engine, OTHERS[0])
    group = engine._groups[engine._groups.plan_of(OTHERS[0])[0]]
    engine.add_request(PROMPT, GREEDY, config=OTHERS[0])
    engine.add_request(PROMPT, GREEDY, config=skv.SparseKVConfig.from_json(OTHERS[0].to_json()))
    engine.add_request(PROMPT, GREEDY)
    assert held(engine) == [SPARSE, OTHERS[0]]
    assert engine._groups[engine._groups.plan_of(OTHERS[0])[0]] is group
    while engine.has_unfinished:
        engine.step()


def test_of_the_idle_groups_the_last_four_stay_and_the_memory_of_the_others_goes(engine):
    rows = {}
    for config in OTHERS:
        run(engine, config)
        rows[config] = weakref.ref(engine._groups[engine._groups.plan_of(config)[0]].rows)
        assert len(held(engine)) <= 1 + groups.MAX_IDLE + 1
    # The last one was made when four others were left.
    assert held(engine) == [SPARSE, *OTHERS[-5:]]
    gc.collect()
    assert [config for config, ref in rows.items() if ref() is not None] == OTHERS[-5:]


def test_the_longest_idle_goes_first_not_the_oldest(engine):
    for config in OTHERS[:5]:
        run(engine, config)
    run(engine, OTHERS[0])
    run(engine, OTHERS[5])
    assert held(engine) == [SPARSE, OTHERS[0], *OTHERS[2:6]]


def test_a_group_with_a_live_request_stays_whatever_state_that_is_in(model):
    with skv.Engine(model, SPARSE, OPTIONS.with_(max_num_seqs=2)) as engine:
        expected = [run(engine, config) for config in OTHERS][::-1]
        # The idle ones first: then the others, which are made anew, look for something to drop.
        names = [engine.add_request(PROMPT, GREEDY, config=config, stream=False) for config in OTHERS[::-1]]
        assert set(held(engine)) >= set(OTHERS)  # queued, all but two
        outputs = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
        assert [outputs[name].token_ids for name in names] == expected
        aborted = engine.add_request(PROMPT, GREEDY, config=SPARSE.with_(budget=50))
        assert len(held(engine)) == 1 + groups.MAX_IDLE + 1
        engine.abort(aborted)


def test_a_preempted_request_keeps_its_group(model):
    config = SPARSE.with_(num_full_layers=3)
    options = OPTIONS.with_(max_num_seqs=3, max_model_len=100)
    params = skv.SamplingParams(max_tokens=40, ignore_eos=True)
    with skv.Engine(model, SPARSE, options) as engine:
        expected = engine.generate([PROMPT], params, config=config)[0].token_ids
        memory = engine.memory
    blocks = int(1.8 * memory.blocks_of(memory.dense, len(PROMPT) + 40))  # two begin, but cannot both end
    tight = options.with_(kv_memory_bytes=blocks * memory.block_bytes + 3 * memory.row_bytes)
    with skv.Engine(model, SPARSE, tight) as engine:
        outputs = engine.generate([PROMPT] * 3, params, config=config)
        assert sum(output.report.num_preemptions for output in outputs) >= 1
        assert [output.token_ids for output in outputs] == [expected] * 3
        assert not engine._groups._live


def test_a_configuration_that_comes_back_gives_what_it_gave(engine):
    first = [run(engine, config) for config in (SPARSE, *OTHERS)]
    assert [run(engine, config) for config in (SPARSE, *OTHERS)] == first
    assert len(set(first)) > 1


def test_a_further_configuration_costs_what_is_documented(engine):
    run(engine, OTHERS[3])
    group, memory = engine._groups[engine._groups.plan_of(OTHERS[3])[0]], engine.memory
    sampler = group.sampler._rows.nbytes + group.sampler._row_ids.nbytes
    assert group.rows.nbytes + sampler == memory.num_rows * memory.row_bytes_of(group.rows.plan)


def test_a_request_whose_rows_cannot_be_reserved_was_never_there(engine, monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError("no rows")

    expected = run(engine, None)
    with monkeypatch.context() as patch:
        patch.setattr(groups, "RowState", no_memory)
        with pytest.raises(MemoryError, match="no rows"):
            engine.add_request(PROMPT, GREEDY, config=OTHERS[0], request_id="a")
        assert not engine.has_unfinished
        assert held(engine) == [SPARSE]
    assert run(engine, None) == expected
    assert engine.add_request(PROMPT, GREEDY, config=OTHERS[0], request_id="a") == "a"
    assert engine.abort("a").finish_reason == "abort"
