"""BudgetPlan and the configurations that use one: what is read, what it becomes, what is refused."""

import json
import pickle

import pytest

from hf_sparsekv import BudgetPlan, LayerPlan, SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import ModelShape

SHAPE = ModelShape(num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16)
VALUES = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "unit": "tokens", "prompt_length": 400}
PLAN = BudgetPlan(budgets=(None, 100, 200), measured={"why": "a test"}, **VALUES)


def calibrated(plan=PLAN, **options):
    return SparseKVConfig(budget_shape="calibrated", plan=plan, **options)


def test_a_plan_becomes_full_layers_and_budgets():
    config = calibrated()
    assert (config.full_layers, config.budget) == ((0,), (100, 200))
    plan = LayerPlan.build(config, SHAPE)
    assert [spec.budget for spec in plan.layers] == [None, 100, 200]
    assert "100" in plan.describe(400, element_bytes=2)


def test_fractions_refer_to_the_prompt_at_hand():
    config = calibrated(BudgetPlan(**{**VALUES, "unit": "fraction", "budgets": (None, 0.25, 0.5)}))
    layers = LayerPlan.build(config, SHAPE).layers
    assert [spec.kept_tokens(1000) for spec in layers] == [1000, 250, 500]


def test_a_plan_without_window_layers_keeps_everything():
    plan = LayerPlan.build(calibrated(BudgetPlan(**VALUES, budgets=(None,) * 3)), SHAPE)
    assert plan.num_full_layers == 3


@pytest.mark.parametrize("how", ["path", "str", "dict", "object"])
def test_a_plan_may_be_given_as_a_file_or_as_its_contents(how, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("\ufeff" + PLAN.to_json(), encoding="utf-8")
    given = {"path": path, "str": str(path), "dict": PLAN.to_dict(), "object": PLAN}[how]
    config = calibrated(given)
    assert config == calibrated()
    assert hash(config) == hash(calibrated())
    assert config.plan.measured == {"why": "a test"}


def test_a_configuration_holds_the_plan_itself_once_it_was_read(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    config = calibrated(path)
    path.unlink()
    assert SparseKVConfig.from_json(config.to_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    changed = config.with_(decode="grow")
    assert changed.budget == (100, 200)
    assert changed != config
    json.dumps(config.effective())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_shape": "calibrated"}, "needs plan=, a file that hf-sparsekv plan --calibrate writes"),
        ({"plan": PLAN}, "has no effect with budget_shape='uniform'"),
        ({"plan": PLAN, "budget_shape": "pyramid"}, "has no effect with budget_shape='pyramid'"),
        ({"plan": PLAN, "budget_shape": "calibrated", "budget": 64}, "budget=64 has no effect"),
        ({"plan": PLAN, "budget_shape": "calibrated", "num_full_layers": 3}, "num_full_layers=3 has no effect"),
        ({"plan": PLAN, "budget_shape": "calibrated", "full_layers": [1]}, r"full_layers=\(1,\) has no effect"),
        ({"plan": PLAN, "budget_shape": "calibrated", "pyramid_beta": 5}, "pyramid_beta=5 has no effect"),
        ({"plan": PLAN, "budget_shape": "calibrated", "num_recent_tokens": 200}, "budget=100 is smaller than"),
        ({"plan": 7, "budget_shape": "calibrated"}, "plan must be a budget plan or the path of its file: got 7"),
        ({"plan": "nowhere.json", "budget_shape": "calibrated"}, "no such budget plan: nowhere.json; make one with"),
        ({"plan": ".", "budget_shape": "calibrated"}, "cannot read the budget plan"),
        ({"plan": {}, "budget_shape": "calibrated"}, "format is None, this release reads 1"),
    ],
)
def test_options_that_contradict_a_plan_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SparseKVConfig(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format is 2, this release reads 1"),
        ({"unit": "bytes"}, "unit must be one of tokens, fraction: got 'bytes'"),
        ({"budgets": []}, "budgets must be a list with an entry for each layer"),
        ({"budgets": [0, 1, 2]}, "the budget of layer 0 must be an int from 1"),
        ({"budgets": [1.5, 1, 2]}, "the budget of layer 0 must be an int from 1"),
        (
            {"budgets": [0.5, 1.0, None], "unit": "fraction"},
            "the budget of layer 1 must be a fraction in .0, 1., or null",
        ),
        ({"budgets": [0.5, 20, None], "unit": "fraction"}, "the budget of layer 1 must be a fraction"),
        ({"num_heads": "8"}, "num_heads must be an int"),
        ({"measured": 3}, "measured must be a mapping"),
        ({"colour": 3}, "unknown entry 'colour'"),
    ],
)
def test_a_file_that_holds_no_plan_is_refused_by_name(change, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN.to_dict(), **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        calibrated(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "\udcff"])
def test_what_is_no_json_object_is_refused(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match="budget plan"):
        calibrated(path)


def test_a_missing_entry_is_named():
    values = PLAN.to_dict()
    del values["unit"]
    with pytest.raises(ConfigError, match="it has no unit"):
        BudgetPlan.from_dict(values)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_layers": 4}, "it has 3 layers, this model 4"),
        ({"num_heads": 4}, "it has 8 query heads, this model 4"),
        ({"num_kv_heads": 4}, "it has 2 KV heads, this model 4"),
        ({"head_dim": 64}, "it has 16 head dimension, this model 64"),
    ],
)
def test_a_plan_of_another_model_is_refused(shape, message):
    values = {"num_layers": 3, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, **shape}
    with pytest.raises(ConfigError, match=message):
        LayerPlan.build(calibrated(), ModelShape(**values))


def test_one_ranks_part_of_the_model_is_no_other_model():
    assert SHAPE.split(2).whole == SHAPE
    assert [spec.budget for spec in LayerPlan.build(calibrated(), SHAPE.split(2)).layers] == [None, 100, 200]
    with pytest.raises(ConfigError, match="another model"):
        LayerPlan.build(calibrated(), ModelShape(num_layers=3, num_heads=4, num_kv_heads=1, head_dim=16))


def test_another_plan_takes_the_place_of_what_was_decided_before():
    first, second = (
        BudgetPlan(num_heads=4, num_kv_heads=2, head_dim=16, unit="tokens", budgets=budgets, prompt_length=200)
        for budgets in ((50, None, 60), (None, 70, 80))
    )
    config = SparseKVConfig(budget=99, num_sink_tokens=2).with_(budget_shape="calibrated", plan=first)
    assert (config.full_layers, config.budget, config.num_sink_tokens) == ((1,), (50, 60), 2)
    assert config.with_(plan=first) == config.with_(decay=None) == config
    other = config.with_(plan=second)
    assert (other.full_layers, other.budget) == ((0,), (70, 80))
    assert config.with_(plan=None, budget_shape="uniform") == SparseKVConfig(num_sink_tokens=2)
    with pytest.raises(ConfigError, match="budget=99 has no effect with budget_shape='calibrated'"):
        config.with_(plan=second, budget=99)
