"""Dense, growing, ring and replacing requests in one small pool: whoever is preempted ends as if it had never been."""

import random

import pytest

import hf_sparsekv as skv
from hf_sparsekv.testing.models import tiny_llama

BASE = skv.SparseKVConfig(num_full_layers=1, budget=21, num_sink_tokens=2, num_recent_tokens=8, observation_window=6)
CONFIGS = [BASE.with_(num_full_layers=2), BASE.with_(decode="grow"), BASE.with_(decode="ring"), BASE]
OPTIONS = skv.EngineConfig(
    kv_memory_bytes=4 << 20,
    max_num_seqs=8,
    max_batch_tokens=64,
    block_size=4,
    reserve_output_tokens=0,  # preempt
    max_model_len=100,
)


def asked(seed):
    """(prompt, sampling, configuration) of each request."""
    rng = random.Random(seed)
    jobs = []
    for i in range(16):
        prompt = [rng.randrange(3, 256) for _ in range(rng.choice([1, 7, 21, 22, 30, 40]))]
        drawn = {"do_sample": True, "temperature": 1.2, "seed": i} if i % 3 == 0 else {}
        params = skv.SamplingParams(max_tokens=rng.randint(40, 60), ignore_eos=True, **drawn)
        jobs.append((prompt, params, CONFIGS[i % 4]))
    return jobs


def run(model, jobs, options):
    """Outputs in order, after checking that nothing is left behind."""
    outputs = {}
    with skv.Engine(model, BASE, options) as engine:
        for i, (prompt, params, config) in enumerate(jobs):
            engine.add_request(prompt, params, config=config, request_id=str(i), stream=False)
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
        assert engine._blocks.num_free == engine._blocks.num_usable
    in_order = [outputs[str(i)] for i in range(len(jobs))]
    assert [output.error for output in in_order] == [None] * len(jobs)
    return in_order


@pytest.mark.parametrize("chunk", [None, 9])
@pytest.mark.parametrize("seed", range(2))
def test_a_crowd_of_all_kinds_in_a_small_pool_is_each_as_in_a_large_one(seed, chunk):
    model, jobs = tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2), asked(seed)
    expected = run(model, jobs, OPTIONS)
    assert sum(output.report.num_preemptions for output in expected) == 0
    with skv.Engine(model, BASE, OPTIONS) as engine:
        memory = engine.memory
    blocks = 1 + int(1.7 * memory.blocks_of(memory.dense, 100))
    small = OPTIONS.with_(
        kv_memory_bytes=blocks * memory.block_bytes + OPTIONS.max_num_seqs * memory.row_bytes,
        prefill_chunk_tokens=chunk,
    )
    outputs = run(model, jobs, small)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    counts = [output.report.num_preemptions for output in outputs]
    assert sum(counts) >= 8, counts
    assert all(sum(counts[kind::4]) for kind in range(4)), counts  # each kind was preempted
