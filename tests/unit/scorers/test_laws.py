"""What holds for every scorer: rows do not mix, claims about queries are true, temporaries are bounded."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_sparsekv.scorers import ScoreInputs, Scorer, TwoLists, build_scorer, scorer_names
from hf_sparsekv.scorers.base import TEMPORARY_BYTES
from hf_sparsekv.scorers.random import position_noise
from hf_sparsekv.testing.memory import LargestTensor

BUILT_IN = (
    "expected_attention",
    "h2o",
    "hybrid",
    "keydiff",
    "keyformer",
    "kv_diversity",
    "random",
    "rkv",
    "snapkv",
    "streaming_llm",
    "tova",
)
QUESTION_BLIND = ("keydiff", "kv_diversity", "random", "streaming_llm")


def lists(scorer: Scorer, inputs: ScoreInputs) -> list[Tensor]:
    result = scorer.score(inputs)
    return [result.primary, result.secondary] if isinstance(result, TwoLists) else [result]


def row_of(inputs: ScoreInputs, row: int) -> ScoreInputs:
    tensors = ("keys", "values", "queries", "carried", "positions", "lse")
    alone = {name: value[row : row + 1] for name in tensors if (value := getattr(inputs, name)) is not None}
    return replace(inputs, **alone)


def test_the_built_in_scorers_are_all_here():
    assert set(BUILT_IN) <= set(scorer_names())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_row_scores_alone_as_in_a_batch(make_inputs, name):
    positions = torch.stack([torch.randperm(40)[:12].sort().values for _ in range(9)]).view(3, 3, 12)
    inputs = make_inputs(batch=3, keys=12, positions=positions, num_seen=40, carried=torch.rand(3, 3, 12))
    scorer = build_scorer(name, {})
    together = lists(scorer, inputs)

    for row in range(3):
        for batched, alone in zip(together, lists(scorer, row_of(inputs, row)), strict=True):
            torch.testing.assert_close(batched[row : row + 1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_are_finite_fp32_for_equal_and_zero_keys(make_inputs, name, dtype):
    keys, queries = torch.zeros(2, 3, 11, 8, dtype=dtype), torch.ones(2, 6, 4, 8, dtype=dtype)
    for filled in (keys, keys + 3):
        inputs = replace(make_inputs(), keys=filled, values=filled, queries=queries)
        for scores in lists(build_scorer(name, {}), inputs):
            assert scores.dtype == torch.float32
            assert scores.shape == (2, 3, 11)
            assert scores.isfinite().all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_without_observed_rows_scores_are_still_finite(make_inputs, name):
    for scores in lists(build_scorer(name, {}), make_inputs(rows=0)):
        assert scores.shape == (2, 3, 11)
        assert scores.isfinite().all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_scores_depend_on_queries_exactly_where_a_scorer_says_so(make_inputs, name):
    inputs = make_inputs()
    scorer = build_scorer(name, {})
    first = lists(scorer, inputs)[0]
    second = lists(scorer, replace(inputs, queries=inputs.queries.flip(-1) + 1))[0]

    assert scorer.is_query_aware is (name not in QUESTION_BLIND)
    assert torch.equal(first, second) is not scorer.is_query_aware


@pytest.mark.parametrize("name", QUESTION_BLIND)
def test_scorers_that_look_at_no_query_ask_for_none(name):
    assert build_scorer(name, {}).queries == "none"


@pytest.mark.parametrize(
    ("name", "sum_of_scores"), [("snapkv", 1), ("tova", 1), ("hybrid", 1), ("h2o", 4), ("keyformer", 4)]
)
def test_probabilities_are_on_the_scale_that_decoding_adds_to(make_inputs, name, sum_of_scores):
    """A weighted mean of rows sums to 1; a running sum of four rows to 4."""
    scorer = build_scorer(name, {})
    total = lists(scorer, make_inputs(rows=4))[0].sum(dim=-1)

    assert scorer.is_probability
    assert scorer.decode_gain == (None if name in ("snapkv", "hybrid") else 1.0)
    torch.testing.assert_close(total, torch.full_like(total, sum_of_scores))


def test_scores_on_another_scale_are_declared():
    other = {name for name in BUILT_IN if not build_scorer(name, {}).is_probability}

    assert other == {"expected_attention", "keydiff", "kv_diversity", "random", "rkv", "streaming_llm"}


def test_a_value_norm_keeps_the_scale_of_a_probability(make_inputs):
    inputs = make_inputs()
    scorer = build_scorer("snapkv", {"value_norm": True})
    scaled = replace(inputs, values=inputs.values * 1000)

    torch.testing.assert_close(lists(scorer, scaled), lists(scorer, inputs))


# --- ranking ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rest", "share"), [("keys_and_values", 0.0), ("keys", 0.0), ("newest_row", 0.25)])
def test_hybrid_goes_by_diversity_alone_where_the_prompt_goes_on(make_inputs, rest, share):
    scorer, inputs = build_scorer("hybrid", {"rest": rest, "share": 0.25}), make_inputs(batch=1, keys=12)
    assert scorer.score(inputs).share == 0.25
    goes_on = scorer.score(replace(inputs, is_last=False))
    assert goes_on.share == share
    assert torch.equal(goes_on.primary, scorer.score(inputs).primary)  # what later chunks and decoding go on with


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o", "keyformer", "hybrid", "rkv"])
def test_the_key_that_the_last_queries_look_for_ranks_first(make_inputs, name):
    direction = torch.nn.functional.normalize(torch.randn(8), dim=0)
    inputs = make_inputs(rows=4, keys=40)
    keys = 0.2 * inputs.keys
    keys[:, :, 17] = 6 * direction
    queries = 0.2 * inputs.queries + 3 * direction

    scores = lists(build_scorer(name, {}), replace(inputs, keys=keys, queries=queries))[0]

    assert (scores.argmax(dim=-1) == 17).all()


@pytest.mark.parametrize(("name", "which"), [("keydiff", 0), ("kv_diversity", 0), ("hybrid", 1), ("rkv", 0)])
def test_a_key_unlike_all_others_ranks_first(make_inputs, name, which):
    inputs = make_inputs(rows=1, keys=20)
    keys = torch.ones_like(inputs.keys) + 0.1 * inputs.keys
    keys[:, :, 9] *= -1
    options = {"weight": 0.0} if name == "rkv" else {}

    scores = lists(build_scorer(name, options), replace(inputs, keys=keys))[which]

    assert (scores.argmax(dim=-1) == 9).all()


def test_rkv_spares_the_newest_of_two_copies(make_inputs):
    inputs = make_inputs(rows=1, keys=8)
    keys = torch.eye(8).expand(2, 3, 8, 8).clone()
    keys[:, :, 6] = keys[:, :, 2]

    scores = lists(build_scorer("rkv", {"weight": 0.0}), replace(inputs, keys=keys))[0]

    assert (scores[..., 2] == scores[..., 6]).all()  # each spares the other
    keys[:, :, 4] = keys[:, :, 2]
    three = lists(build_scorer("rkv", {"weight": 0.0}), replace(inputs, keys=keys))[0]
    assert (three[..., 6] > three[..., 2]).all()
    assert (three[..., 6] > three[..., 4]).all()


# --- noise --------------------------------------------------------------------------------------------------------


def test_noise_belongs_to_seed_layer_head_and_position():
    noise = position_noise(7, 2, 3, 100)

    assert torch.equal(position_noise(7, 2, 3, 100), noise)
    for length in (1, 2, 5, 6, 17, 63):
        assert torch.equal(position_noise(7, 2, 3, length), noise[:, :length])
    assert not torch.equal(position_noise(8, 2, 3, 100), noise)
    assert not torch.equal(position_noise(7, 3, 3, 100), noise)
    assert len(noise.unique()) == noise.numel()


@pytest.mark.parametrize("name", ["random", "keyformer"])
def test_noise_follows_a_token_that_earlier_evictions_moved(make_inputs, name):
    kept = torch.tensor([0, 3, 4, 9, 10]).expand(2, 3, 5)
    spread = kept[..., None].expand(-1, -1, -1, 8)
    whole = make_inputs(heads=3, rows=1)
    part = replace(whole, keys=whole.keys.gather(2, spread), values=whole.values.gather(2, spread), positions=kept)
    scorer = build_scorer(name, {"seed": 4})

    before, after = lists(scorer, whole)[0].gather(-1, kept), lists(scorer, part)[0]

    # Keyformer renormalises over the keys that are left: only ratios stay.
    torch.testing.assert_close(after / after[..., :1], before / before[..., :1])


@pytest.mark.parametrize("name", ["random", "keyformer"])
def test_the_global_generator_is_left_alone(make_inputs, name):
    inputs = make_inputs()
    state = torch.get_rng_state()
    build_scorer(name, {}).score(inputs)

    assert torch.equal(torch.get_rng_state(), state)


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keyformer", "rkv"])
def test_no_temporary_is_larger_than_stated(make_inputs, name):
    # All at once: 21 MiB of logits for Keyformer, 18 MiB of similarities for R-KV.
    inputs = make_inputs(batch=1, heads=9, kv_heads=3, rows=512, keys=1250)
    scorer = build_scorer(name, {})

    with LargestTensor() as largest:
        scorer.score(inputs)

    assert TEMPORARY_BYTES // 4 < largest.num_bytes <= TEMPORARY_BYTES


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o", "keydiff", "kv_diversity", "hybrid"])
def test_keys_are_never_copied_whole_to_fp32(make_inputs, monkeypatch, name):
    limit = 2**16
    for owner in ("scorers.base", "ops.reference.pool"):
        monkeypatch.setattr(f"hf_sparsekv.{owner}.TEMPORARY_BYTES", limit)
    monkeypatch.setattr("hf_sparsekv.scorers.base.CHUNK_BYTES", limit)
    inputs = make_inputs(batch=1, heads=3, kv_heads=3, rows=4, keys=2000)  # 192 KB of keys in fp32
    inputs = replace(inputs, **{field: getattr(inputs, field).bfloat16() for field in ("keys", "values", "queries")})
    scorer = build_scorer(name, {"rest": "keys"} if name == "hybrid" else {})

    with LargestTensor(torch.float32) as largest:
        scorer.score(inputs)

    assert limit // 4 < largest.num_bytes <= limit
