"""Two thousand requests of every kind come, go wrong and are taken back: each ends once, and nothing is left behind."""

import random
from collections import Counter

import hf_sparsekv as skv
from hf_sparsekv.testing.models import tiny_llama

NUM_REQUESTS = 2000
MAX_LENGTH = 96
BASE = skv.SparseKVConfig(num_full_layers=1, budget=21, num_sink_tokens=2, num_recent_tokens=8, observation_window=6)
RING = BASE.with_(num_full_layers=0, budget=0.5, scorer="keydiff", decode="ring")
CONFIGS = [BASE, BASE.with_(num_full_layers=2), RING]
OPTIONS = skv.EngineConfig(
    kv_memory_bytes=160 << 10,
    max_num_seqs=24,
    max_batch_tokens=128,
    prefill_chunk_tokens=40,
    block_size=4,
    reserve_output_tokens=0,  # preempt
    max_model_len=MAX_LENGTH,
)


class Letters:
    """A tokenizer whose tokens are single letters; one of them cannot be decoded."""

    def decode(self, token_ids, **_):
        if 77 in token_ids:
            raise ValueError("cannot decode 77")
        return "".join(chr(ord("a") + i % 26) for i in token_ids)


def random_params(rng):
    sampled = {"do_sample": True, "temperature": rng.choice([0.7, 1.5]), "top_k": rng.choice([None, 20])}
    sampled |= {"top_p": rng.choice([None, 0.9]), "seed": rng.randrange(1000)}
    options = sampled if rng.random() < 0.6 else {}
    max_tokens = rng.choice([1, 2, 9, 30, 34])
    return skv.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logprobs=rng.choice([None, None, None, 2]),
        stop_token_ids=tuple(rng.sample(range(256), rng.choice([0, 3]))),
        stop_strings=rng.choice([(), (), ("ab", "q")]),
        **options,
    )


def random_prompt(rng):
    """(token ids, whether the engine can serve them)."""
    prompt = [rng.randrange(3, 256) for _ in range(rng.choice([1, 2, 7, 21, 22, 50, 60]))]
    kind = rng.random()
    if kind < 0.05:
        return [5] * rng.randrange(MAX_LENGTH, 500), False
    if kind < 0.10:
        return [*prompt, rng.choice([256, -1, True, 0.5, None])], False
    return ([], False) if kind < 0.12 else (prompt, True)


def test_two_thousand_requests_end_once_each_and_leave_nothing_behind():
    rng, model = random.Random(0), tiny_llama(num_layers=2, num_heads=4, num_kv_heads=2)
    ended, added, refused, live, kept = Counter(), 0, 0, [], {}
    with skv.Engine(model, BASE, OPTIONS, tokenizer=Letters()) as engine:
        while added < NUM_REQUESTS or engine.has_unfinished:
            for _ in range(min(rng.choice([0, 0, 1, 5, 20]), NUM_REQUESTS - added)):
                (prompt, is_good), params, config = random_prompt(rng), random_params(rng), rng.choice(CONFIGS)
                name, added = str(added), added + 1
                try:
                    engine.add_request(prompt, params, config=config, request_id=name, stream=rng.random() < 0.5)
                except skv.RequestError:
                    assert not is_good
                    refused += 1
                    continue
                assert is_good
                live.append(name)
                kept[name] = (prompt, params, config)
            outputs = engine.step()
            if live and rng.random() < 0.2:
                aborted = engine.abort(live[rng.randrange(len(live))])
                outputs += [] if aborted is None else [aborted]
            for output in outputs:
                if output.is_finished:
                    ended[output.request_id] += 1
                    live.remove(output.request_id)
                    kept[output.request_id] += (output,)
            assert engine._scheduler.num_running <= OPTIONS.max_num_seqs
        assert_nothing_left(engine)
        snapshot = engine.metrics.snapshot()
        sample = rng.sample(sorted(kept), 60)
        assert_each_is_as_alone(engine, [kept[name] for name in sample])
    assert set(ended.values()) == {1}
    assert len(ended) + refused == NUM_REQUESTS
    reasons = Counter(entry[3].finish_reason.value for entry in kept.values())
    assert snapshot["requests_finished"] == {**dict.fromkeys(("stop", "length", "abort", "error"), 0), **reasons}
    assert min(reasons.values()) >= 20, reasons  # every way to end was taken
    assert len(reasons) == 4
    assert refused >= 100
    assert snapshot["preemptions"] >= 20
    errors = {entry[3].error for entry in kept.values() if entry[3].finish_reason == "error"}
    assert errors == {"ValueError: cannot decode 77"}


def assert_nothing_left(engine):
    assert engine._blocks.num_free == engine._blocks.num_usable
    assert not list(engine._tracker)
    assert not engine._builder._tails
    for group in engine._groups.values():
        rows = group.rows
        assert not group.requests
        for tensor in (rows.is_active, rows.tokens, rows.positions, rows.append_lengths, rows.append_tables):
            assert not tensor.any()
        assert not rows.slot_tables.any()
        assert not rows.slot_lengths.any()


def assert_each_is_as_alone(engine, entries):
    """What the crowd gave a request is what it gets alone, as far as it came."""
    for prompt, params, config, output in entries:
        alone = engine.generate([prompt], params, config=config)[0]
        assert alone.token_ids[: len(output.token_ids)] == output.token_ids
        if output.finish_reason in ("stop", "length"):
            assert (alone.text, alone.finish_reason) == (output.text, output.finish_reason)
