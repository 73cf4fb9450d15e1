"""A model that several ranks share gives what it gives on one: tokens and selections, with no talk beside its own."""

import random
import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_sparsekv as skv
from hf_sparsekv.hf.sharding import check_tp_size
from hf_sparsekv.testing.compare import MAX_LOGITS_RELATIVE_ERROR
from hf_sparsekv.testing.models import tiny_llama
from hf_sparsekv.testing.ranks import run_ranks

PROGRAM = Path(__file__).parent / "programs" / "shared_model.py"
SPARSE = skv.SparseKVConfig(num_full_layers=1, budget=21, num_sink_tokens=2, num_recent_tokens=8, observation_window=6)
GREEDY = skv.SamplingParams(max_tokens=20, ignore_eos=True)
LENGTHS = (1, 6, 21, 48, 77, 140)
NEW_TOKENS, LAYERS = 8, 3


@pytest.fixture(scope="module")
def program():
    """The functions that the ranks run, for this process."""
    return runpy.run_path(str(PROGRAM))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared")
    tiny_llama(num_layers=LAYERS, num_heads=8, num_kv_heads=4).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def whole(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts_of(lengths=LENGTHS, vocab_size=256):
    numbers = random.Random(1)
    return [[numbers.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def assert_as_on_one(program, found, whole, configs, prompts, options):
    for config in configs:
        parsed = skv.SparseKVConfig.from_json(config)
        tokens, positions = program["generated"](whole, parsed, prompts[-1])
        served, _ = program["served"](whole, parsed, prompts, GREEDY, options)
        for rank in found:
            assert rank[config]["generate"][0] == tokens, config
            assert [output[:2] for output in rank[config]["engine"]] == [output[:2] for output in served], config
        by_layer = zip(*(rank[config]["generate"][1] for rank in found), strict=True)
        assert [[head for part in layer for head in part] for layer in by_layer] == positions, config
    logits = program["logits_of"](whole, prompts[-1])
    bound = 1e-5 * abs(logits).max()
    assert all(abs(rank["logits"] - logits).max() < bound for rank in found)


@pytest.mark.parametrize(
    "changes",
    [
        [{"scorer": "snapkv"}, {"scorer": "random"}, {"decode": "grow"}],
        pytest.param(
            [{"scorer": "hybrid"}, {"scorer": "keyformer"}, {"scorer": "expected_attention"}, {"decode": "ring"}],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "the others"],
)
def test_two_ranks_give_what_one_gives(program, folder, whole, changes):
    configs = [SPARSE.with_(**change).to_json() for change in changes]
    prompts = prompts_of()
    options = program["OPTIONS"]
    # Of each rank: some requests are preempted, on both alike.
    tight = options.with_(kv_memory_bytes=75_000, max_batch_tokens=160)
    found = run_ranks(PROGRAM, "compare", 2, folder, configs, prompts, GREEDY, tight)
    assert_as_on_one(program, found, whole, configs, prompts, options)
    preemptions = [[output[2] for config in configs for output in rank[config]["engine"]] for rank in found]
    assert preemptions[0] == preemptions[1]
    assert sum(preemptions[0]) > 0


def test_a_calibrated_plan_is_kept_to_on_two_ranks(program, folder, whole):
    """The plan is of the whole model; each rank has a share of its heads and all of its budgets."""
    method = {"num_sink_tokens": 2, "num_recent_tokens": 8, "observation_window": 6, "budget_shape": "calibrated"}
    shape = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "prompt_length": 140}
    plans = [
        skv.BudgetPlan(unit="tokens", budgets=(21, None, 50), **shape),
        skv.BudgetPlan(unit="fraction", budgets=(0.5, 0.1, None), **shape),
    ]
    configs = [skv.SparseKVConfig(plan=plan, **method).to_json() for plan in plans]
    prompts, options = prompts_of(), program["OPTIONS"]
    found = run_ranks(PROGRAM, "compare", 2, folder, configs, prompts, GREEDY, options)
    assert_as_on_one(program, found, whole, configs, prompts, options)
    for config, expected in zip(configs, ([21, 151, 50], [70, 14, 151]), strict=True):
        for rank in found:
            assert [{len(head) for head in layer} for layer in rank[config]["generate"][1]] == [{n} for n in expected]


def test_prefixes_and_bounded_prefills_are_the_same_on_two_ranks(program, folder, whole):
    """Both ranks find the same in their prefix caches, or they would come to different steps and wait for ever."""
    bounded = SPARSE.with_(prefill="bounded", prefill_chunk_tokens=16, scorer="random")
    configs = [SPARSE, bounded, SPARSE.with_(scorer="random"), bounded.with_(decode="grow"), SPARSE]
    document = prompts_of((80,))[0]
    prompts = [document + prompt for prompt in prompts_of((9, 20, 14, 30, 40))]
    # Of each rank half: the pool of both is small enough to forget prefixes.
    tight, half = (program["OPTIONS"].with_(kv_memory_bytes=size) for size in (300_000, 150_000))
    expected = program["shared_prefixes"](whole, configs, prompts, GREEDY, tight)
    cached = [entry[1] for entry in expected]
    assert cached[1] == cached[3] == 0
    assert cached[2] == cached[4] == len(document)
    assert cached[-1] == 0
    kept = [program["generated"](whole, config, prompts[0]) for config in configs[:2]]
    found = run_ranks(PROGRAM, "share_prefixes", 2, folder, configs, prompts, GREEDY, half)
    assert found[0][0] == found[1][0]
    assert [entry[0::2] for entry in found[0][0]] == [entry[0::2] for entry in expected]
    assert [entry[1] for entry in found[0][0][:5]] == cached[:5]
    for i, (tokens, positions) in enumerate(kept):
        assert [rank[1][i][0] for rank in found] == [tokens, tokens]
        by_layer = zip(*(rank[1][i][1] for rank in found), strict=True)
        assert [[head for part in layer for head in part] for layer in by_layer] == positions


@pytest.mark.slow
@pytest.mark.builtin_model
def test_three_ranks_share_the_built_in_model(program, builtin_model_path):
    whole = AutoModelForCausalLM.from_pretrained(builtin_model_path, dtype=torch.float32).eval()
    configs = [SPARSE.with_(num_full_layers=3, budget=24, scorer=name).to_json() for name in ("snapkv", "keyformer")]
    prompts, options = prompts_of((6, 40), 4000), program["OPTIONS"].with_(kv_memory_bytes=64 << 20)
    found = run_ranks(PROGRAM, "compare", 3, str(builtin_model_path), configs, prompts, GREEDY, options)
    assert_as_on_one(program, found, whole, configs, prompts, options)


@pytest.mark.parametrize(
    "names",
    [
        ["snapkv", "random", "hybrid"],
        pytest.param(["h2o", "keyformer", "tova", "kv_diversity", "expected_attention"], marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def test_an_evaluation_keeps_scores_and_counts_what_it_does_on_one(program, folder, whole, names):
    configs = {name: SPARSE.with_(scorer=name) for name in names} | {"whole": SPARSE.with_(num_full_layers=0)}
    prompt, tail, *continuations = prompts_of((140, 3, 5, 1, 9))
    expected = program["evaluated"](whole, configs, prompt, tail, continuations)
    found = run_ranks(PROGRAM, "evaluate", 2, folder, configs, prompt, tail, continuations)
    for name, alone in expected.items():
        by_layer = zip(*(rank[name]["kept"] for rank in found), strict=True)
        assert [[head for part in layer for head in part] for layer in by_layer] == alone["kept"], name
        for rank in found:
            for way in ("shared", "own"):
                log_likelihoods, footprint = rank[name][way]
                assert log_likelihoods == pytest.approx(alone[way][0], rel=MAX_LOGITS_RELATIVE_ERROR), name
                assert footprint == alone["own"][1], name
        # Measured on both ranks, three int32 of each window layer's table twice.
        num_window_layers = LAYERS - configs[name].num_full_layers
        assert sum(rank[name]["rank_bytes"] for rank in found) == alone["rank_bytes"] + num_window_layers * 3 * 4


def test_a_scorer_that_fails_on_one_rank_ends_an_evaluation_with_its_words(folder):
    lost, failed = run_ranks(PROGRAM, "evaluate_a_bad_head", 2, folder, SPARSE, prompts_of()[-1], timeout_s=60.0)
    assert failed[0] == "ScoreError"
    assert "one_bad_head" in failed[1]
    assert (lost[0], "another rank of this replica has ended" in lost[1]) == ("ReplicaLostError", True)


def test_what_rank_0_chose_holds_for_all(folder, program, whole):
    found = run_ranks(PROGRAM, "sample", 2, folder, SPARSE, prompts_of()[-1])
    for name in ("sampled", "beams", "engine", "blocks"):
        assert found[0][name] == found[1][name], name
    assert [rank["is_random_state_untouched"] for rank in found] == [False, True]
    assert (
        len({tokens for tokens, _, _ in found[0]["engine"]}) == 3
    )  # requests of the same prompt have seeds of their own
    torch.manual_seed(0)
    alone = program["generated"](whole, SPARSE, prompts_of()[-1], do_sample=True, temperature=2.0)[0]
    assert found[0]["sampled"] == alone
    assert found[0]["beams"] == program["generated"](whole, SPARSE, prompts_of()[-1], num_beams=3)[0]


def test_a_failure_on_one_rank_is_that_requests_alone(folder, whole):
    prompts = prompts_of()
    found = run_ranks(PROGRAM, "fail_on_one_rank", 2, folder, SPARSE, prompts, GREEDY)
    (outputs, tokens), (same, refusal) = found
    assert outputs == same
    has_failed = [error is not None for _, error in outputs]
    assert has_failed == [len(prompt) > 60 for prompt in prompts]
    assert "NaN" in outputs[-1][1]
    assert "rank 0 leads" in refusal
    with skv.Engine(whole, SPARSE.with_(budget=30)) as engine:
        assert tokens == engine.generate([prompts[0]], GREEDY)[0].token_ids


def test_an_interrupt_while_scores_are_compared_ends_the_engine(folder):
    """Rank 1 waits for rank 0's scores then: a message in their place would be taken for them, or never be read."""
    name = "interrupt_while_scores_are_compared"
    (said, num_sent), (kind, reason) = run_ranks(PROGRAM, name, 2, folder, SPARSE, prompts_of()[-1], timeout_s=60.0)
    assert "the other ranks wait for it: start all processes again" in said
    assert num_sent == 0
    assert (kind, "another rank of this replica has ended" in reason) == ("ReplicaLostError", True)


def test_a_step_has_the_collectives_of_the_dense_model_and_one_for_its_tokens(folder):
    prompt = prompts_of((50,))[0]
    for dense, sparse, served in run_ranks(PROGRAM, "collectives", 2, folder, SPARSE, prompt):
        layers = {name: count for name, count in dense.items() if name != "gloo:broadcast"}
        assert layers["gloo:all_reduce"] >= NEW_TOKENS * 2 * LAYERS
        assert {name: count for name, count in sparse.items() if name != "gloo:broadcast"} == layers
        # Rank 0's scores for each token, and its prompt once (as sizes and bytes).
        assert sparse["gloo:broadcast"] - dense.get("gloo:broadcast", 0) == NEW_TOKENS + 2
        # Each step's tokens on the device; on the host a message for each step, one more that only reads, and the
        # outputs (in two pieces if they are long); and the exchange about the prompt's scores, as sizes and bytes.
        told = served["gloo:broadcast"] - dense.get("gloo:broadcast", 0)
        assert told in (2 * NEW_TOKENS + 2, 2 * NEW_TOKENS + 3)
        expected = Counter(layers) + Counter({"gloo:all_gather": 2})
        assert {name: count for name, count in served.items() if name != "gloo:broadcast"} == dict(expected)


def test_heads_that_do_not_divide_are_refused_with_what_fits(tmp_path):
    tiny_llama(num_layers=1, num_heads=6, num_kv_heads=3).save_pretrained(tmp_path)
    for errors in run_ranks(PROGRAM, "refuse", 2, str(tmp_path)):
        assert errors == ["tp=2 does not divide the model's 3 KV heads: choose tp=1 or 3"] * 2
    with pytest.raises(skv.ConfigError, match="choose tp=1 or 2 or 4"):
        check_tp_size(tiny_llama(num_heads=8, num_kv_heads=4).config, 3)
