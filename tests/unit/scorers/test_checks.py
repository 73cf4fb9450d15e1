"""A scorer of a user's own whose attributes or scores mean nothing is refused, by class or by layer."""

import pytest
import torch

import hf_sparsekv as skv
from hf_sparsekv.errors import ConfigError, ScoreError
from hf_sparsekv.scorers import Pooling, Scorer, TwoLists, build_scorer, register_scorer
from hf_sparsekv.select import check_score_shapes, check_scores, select_kept
from hf_sparsekv.testing.models import tiny_llama

NAN, INF = float("nan"), float("inf")
SHAPE = (1, 2, 40)


def scorer_class(**attributes):
    def score(self, inputs):
        return inputs.key_positions().float()

    return type("Mine", (Scorer,), {"name": "mine", "queries": "none", "score": score, **attributes})


@pytest.mark.parametrize(
    ("attribute", "values"),
    [
        ("queries", ["some", None, 3]),
        ("default_decode", ["foo", None]),
        ("default_row_reduction", ["sum", None]),
        ("default_pooling", [Pooling("bogus", 3), Pooling("avg", 0), Pooling("avg", 4), Pooling("max", 43), "avg"]),
        ("default_pooling", [Pooling("avg", 7.0), Pooling("avg", True), Pooling("avg", -1), Pooling("avg", "7")]),
        ("decode_decay", [NAN, INF, -0.1, 1.1, "1", True]),
        ("decode_gain", [NAN, INF, -1.0, 1e31, "1", False]),
        ("default_prompt_share", [NAN, -0.1, 1.1, "1", None]),
        ("is_probability", [1, "no", None]),
        ("is_query_aware", ["yes"]),
        ("uses_row_reduction", [1]),
        ("uses_group_reduction", [None]),
        ("ring_freezes_selection", [0]),
    ],
)
def test_an_attribute_that_means_nothing_is_named(attribute, values):
    for value in values:
        mine = scorer_class(**{attribute: value})
        with pytest.raises(ConfigError, match=rf"Mine\.{attribute} "):
            build_scorer(mine(), {})
        with pytest.raises(ConfigError, match=rf"Mine\.{attribute} "):
            register_scorer(mine)
        with pytest.raises(ConfigError, match=rf"Mine\.{attribute} "):
            skv.SparseKVConfig(scorer=mine())


@pytest.mark.parametrize(
    "attributes",
    [
        {"decode_decay": 0, "decode_gain": 0},
        {"decode_decay": 1.0, "decode_gain": 1e30},
        {"default_pooling": Pooling("forward", 41), "default_decode": "ring"},
    ],
)
def test_attributes_at_their_limits_are_taken(attributes):
    mine = scorer_class(**attributes)()
    assert build_scorer(mine, {}) is mine


@pytest.mark.parametrize("value", [1.1e30, -1.1e30, 3e38, -3e38])
@pytest.mark.parametrize("in_second_list", [False, True])
def test_scores_that_would_overflow_are_refused_by_layer_and_scorer(value, in_second_list):
    good, bad = torch.zeros(SHAPE), torch.zeros(SHAPE)
    bad[0, 1, 7] = value
    scores = TwoLists(primary=good, secondary=bad, share=0.5) if in_second_list else bad
    with pytest.raises(ScoreError, match=r"scorer 'mine', layer 3: scores go up to .*at most 1e\+30"):
        check_scores(scores, SHAPE, 3, "mine")


def test_the_largest_scores_pool_without_overflow_and_the_sinks_stay():
    """Everything at the limit: a sum over the widest window must still be a number, or the order is lost."""
    config = skv.SparseKVConfig(
        budget=12, num_recent_tokens=4, observation_window=4, pooling="avg", pool_kernel_size=41, num_sink_tokens=2
    )
    scores = torch.full(SHAPE, 1e30)
    check_scores(scores, SHAPE, 0, "mine")
    kept = select_kept(scores, torch.tensor([12], dtype=torch.int32), 12, None, config)
    assert kept.scores.isfinite().all()
    assert {0, 1, 36, 37, 38, 39} <= set(kept.index[0, 0].tolist())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"share": share}, "share of the first list") for share in (2.0, -0.1, NAN, INF, True, "1", None)),
        *(({"secondary_pooling": kind}, "secondary_pooling") for kind in ("bogus", None, 3)),
        *(({"secondary_width": width}, "secondary_width") for width in (0, 2, -1, 43, 7.0, True, None)),
    ],
)
def test_two_lists_that_do_not_fit_together_are_refused_by_layer_and_scorer(fields, message):
    lists = TwoLists(primary=torch.zeros(SHAPE), secondary=torch.zeros(SHAPE), **({"share": 0.5} | fields))
    for check in (check_scores, check_score_shapes):  # nothing of this needs the device
        with pytest.raises(ScoreError, match=rf"scorer 'mine', layer 5: .*{message}"):
            check(lists, SHAPE, 5, "mine")


def test_a_share_above_one_never_reaches_a_selection():
    """It took the places of recent tokens."""

    def score(self, inputs):
        scores = inputs.key_positions().float()
        return TwoLists(primary=scores, secondary=-scores, share=2.0)

    config = skv.SparseKVConfig(
        num_full_layers=1, budget=24, scorer=scorer_class(score=score)(), num_recent_tokens=8, observation_window=8
    )
    with pytest.raises(ScoreError, match="layer 1: the share"):
        skv.generate(tiny_llama(num_layers=2), torch.randint(3, 256, (1, 80)), config, max_new_tokens=2)
