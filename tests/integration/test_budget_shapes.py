"""Layouts of budgets in an evaluation: equal bytes, and the figures of the sparse cache that has these budgets."""

import math
from dataclasses import replace

import pytest
import torch

import hf_sparsekv as skv
from evals.budget_shapes import UNIFORM, Reader, check_scorers, layouts_of, rows_of, summary
from evals.scoring import SparseScorer
from evals.tasks.measure import outcome
from evals.tasks.samples import AWARE, CHOICE, EXACT, NLL, Sample
from hf_sparsekv.errors import ConfigError, InputError

CONFIG = skv.SparseKVConfig(scorer="hybrid", num_sink_tokens=2, num_recent_tokens=8, observation_window=8)


@pytest.fixture
def model(registered, tiny_llama):
    return tiny_llama(num_layers=3, attn_implementation="sparsekv")


@pytest.fixture
def profile(model):
    ids = torch.randint(3, 256, (1, 140))
    return skv.profile.measure(model, ids, config=CONFIG, num_held_out=12, has_progress=False, with_logits=True)


def sample(length=129):
    ids = torch.randint(3, 256, (length + 6,)).tolist()
    return Sample(
        task="perplexity",
        mode=AWARE,
        seed=1,
        budget_tokens=length + 6,
        document=tuple(ids[:100]),
        question=tuple(ids[100:length]),
        continuations=(tuple(ids[length:]),),
        scorer=NLL,
    )


def test_layouts_take_the_bytes_of_equal_budgets(profile):
    layouts = layouts_of(0, profile, 3, 4)
    names = [layout.name for layout in layouts]
    assert names == [UNIFORM, "pyramid", *skv.profile.OBJECTIVES, "heads", "heads_within_layers"]
    dense = skv.LayerPlan.build(CONFIG, profile.shape).dense_bytes(profile.prompt_length, element_bytes=4)
    for layout in layouts:
        assert dense / 3 * 0.98 < layout.cache_bytes <= dense / 3
    tokens = {layout.name: sum(map(sum, layout.shares)) for layout in layouts}
    assert tokens["heads"] <= tokens[UNIFORM]
    errors = {layout.name: layout.predicted_error for layout in layouts}
    assert errors["heads"] <= errors["heads_within_layers"] <= errors[UNIFORM]


def test_a_ratio_that_no_budget_has_is_refused(profile):
    with pytest.raises(ConfigError, match=r"100x is not possible with prompts of 128 tokens, at most \d+\.\d\dx"):
        layouts_of(0, profile, 100, 4)


def test_tasks_that_are_scored_otherwise_are_refused():
    check_scorers([sample()])
    with pytest.raises(InputError, match="quiz is scored by choice: here tasks are scored by exact or nll"):
        check_scorers([sample(), replace(sample(), task="quiz", scorer=CHOICE)])


def test_a_layout_scores_as_the_cache_with_its_budgets(model, profile):
    one = sample()
    layouts = [x for x in layouts_of(0, profile, 3, 4) if not x.name.startswith("heads")]
    values = Reader(model, [profile]).values(one, layouts)
    length = len(one.document) + len(one.question) - 1  # one token is read after the compression
    for layout, value in zip(layouts, values[1:], strict=True):
        budgets = [max(min(round(row[0] * length), length), CONFIG.num_protected) for row in layout.shares]
        config = CONFIG.with_(num_full_layers=0, budget=budgets)
        assert outcome(SparseScorer(model, config), one)["value"] == pytest.approx(value, rel=1e-4)
    assert len(set(values)) > 3


def test_rows_keep_lengths_apart(profile):
    layouts = layouts_of(0, profile, 3, 4)[:1]
    rows = rows_of([sample(), sample(length=110)], [[1.0, 2.0], [3.0, 5.0]], layouts)
    found = {(row["budget_tokens"], row["layout"]): row["perplexity"]["value"] for row in rows}
    expected = {(135, "dense"): 1.0, (135, UNIFORM): 2.0, (116, "dense"): 3.0, (116, UNIFORM): 5.0}
    assert found == {place: pytest.approx(math.exp(value)) for place, value in expected.items()}


def test_equal_budgets_differ_from_themselves_by_nothing(profile):
    layouts = layouts_of(0, profile, 3, 4)[:2]
    rows = rows_of([replace(sample(), scorer=EXACT)] * 2, [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], layouts)
    same, other = (row["difference_to_uniform"] for row in rows[1:])
    assert same == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert other["value"] == 0.0 and other["low"] < 0.0 < other["high"]


def test_rows_compare_with_equal_budgets_on_the_same_samples(profile):
    layouts = layouts_of(0, profile, 3, 4)[:2]
    rows = rows_of([sample(), sample()], [[1.0, 2.0, 2.5], [1.0, 1.0, 2.0]], layouts)
    assert [row["layout"] for row in rows] == ["dense", UNIFORM, "pyramid"]
    assert rows[1]["nll_difference_to_uniform"]["value"] == 0.0
    assert rows[2]["nll_difference_to_uniform"]["value"] == 0.75
    assert rows[2]["perplexity"]["value"] == pytest.approx(torch.tensor(2.25).exp().item(), rel=1e-5)


def test_a_report_says_what_made_it_and_how_prompts_were_written(profile):
    report = summary([profile], [sample()], [[1.0, 2.0, 2.5]], layouts_of(0, profile, 3, 4)[:2])
    assert {"hf_sparsekv", "torch", "transformers"} <= set(report["versions"])
    assert report["prompts"] == {"chat_template": None, "stop_ids": []}
