"""LayerPlan: who keeps what, to the byte; `tests/property/test_plan.py` has the laws."""

import json
from functools import partial

import pytest

from hf_sparsekv import LayerPlan, SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import LayerSpec, ModelShape

SHAPE = ModelShape(num_layers=6, num_heads=8, num_kv_heads=2, head_dim=16)
SMALL = {"num_sink_tokens": 2, "num_recent_tokens": 6, "observation_window": 4}
KV_BYTES = 2 * 2 * 16 * 2  # key and value, two heads, bf16


def build(**options: object) -> LayerPlan:
    return LayerPlan.build(SparseKVConfig(**{"budget": 100, "num_full_layers": 2, **SMALL, **options}), SHAPE)


def budgets(plan: LayerPlan) -> list[int | float | None]:
    return [spec.budget for spec in plan.layers]


# --- which layer keeps what ---------------------------------------------------------------------------------------


def test_full_layers_are_counted_from_the_bottom():
    plan = build()
    assert budgets(plan) == [None, None, 100, 100, 100, 100]
    assert [spec.is_full for spec in plan.layers] == [True, True, False, False, False, False]
    assert [spec.layer_idx for spec in plan.layers] == list(range(6))
    assert plan.num_full_layers == 2


@pytest.mark.parametrize(("count", "full"), [(0, 0), (6, 6)])
def test_no_layer_or_every_layer_may_be_full(count, full):
    assert build(num_full_layers=count).num_full_layers == full


def test_named_full_layers_may_stand_anywhere():
    plan = build(num_full_layers=None, full_layers=[5, 1], budget=[10, 0.5, 30, 40])
    assert budgets(plan) == [10, None, 0.5, 30, 40, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_full_layers": 7}, "num_full_layers=7, but the model has only 6 layers"),
        (
            {"num_full_layers": None, "full_layers": [0, 6]},
            "full_layers names layer 6, but the model has layers 0 to 5",
        ),
        ({"budget": [50, 60, 70]}, "budget lists 3 layers, but 4 layers of this model are window layers"),
        ({"budget": [50] * 5}, "budget lists 5 layers, but 4"),
        ({"budget": [50], "num_full_layers": 6}, "budget lists 1 layers, but 0"),
    ],
)
def test_what_the_model_does_not_have_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_a_pyramid_falls_from_the_bottom_to_the_mean_over_beta():
    plan = build(num_full_layers=1, budget=108, budget_shape="pyramid", pyramid_beta=4)
    # 8 protected each; 100 scored on average, 25 at the top, so 175 at the bottom; the lower of two halves rounds up.
    assert budgets(plan) == [None, 183, 146, 108, 70, 33]
    assert sum(budgets(plan)[1:]) == 5 * 108


def test_a_pyramid_of_fractions_falls_too():
    plan = build(budget=0.25, budget_shape="pyramid", pyramid_beta=5)
    assert budgets(plan)[2:] == pytest.approx([0.45, 0.45 - 0.4 / 3, 0.05 + 0.4 / 3, 0.05])


def test_a_pyramid_of_fractions_never_asks_for_more_than_the_whole_prompt():
    """Twice 0.7 less a seventh of it is more than 1: the line falls less steeply, and its mean stays."""
    plan = build(budget=0.7, budget_shape="pyramid", pyramid_beta=7)
    assert budgets(plan)[2:] == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert max(budgets(plan)[2:]) <= 1.0


def test_a_flat_pyramid_and_one_of_a_single_layer_are_uniform():
    assert budgets(build(budget_shape="pyramid", pyramid_beta=1)) == budgets(build())
    assert budgets(build(num_full_layers=5, budget_shape="pyramid")) == budgets(build(num_full_layers=5))


@pytest.mark.parametrize(
    ("budget", "prompt", "kept"),
    [(None, 77, 77), (50, 10, 50), (50, 1000, 50), (0.25, 100, 25), (0.25, 101, 26), (0.25, 8, 8), (0.001, 100, 8)],
)
def test_a_layer_keeps_its_budget_or_its_fraction_rounded_up_but_never_less_than_what_is_protected(
    budget, prompt, kept
):
    spec = LayerSpec(layer_idx=0, is_full=budget is None, budget=budget, num_protected=8)
    assert spec.kept_tokens(prompt) == kept


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers must be a positive int, at most 2147483647: got 0"),
        ("num_layers", True, "num_layers must be a positive int, at most 2147483647: got True"),
        ("head_dim", -64, "head_dim must be a positive int, at most 2147483647: got -64"),
        ("num_heads", 8.0, "num_heads must be a positive int, at most 2147483647: got 8.0"),
        ("num_kv_heads", 3, "num_heads=8 is not a multiple of num_kv_heads=3"),
    ],
)
def test_an_impossible_model_is_refused(field, value, message):
    numbers = {"num_layers": 6, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
    with pytest.raises(ConfigError, match=message):
        ModelShape(**{**numbers, field: value})


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "columns"), [(1, 16), (64, 64), (65, 80), (256, 256), (257, 320), (1000, 1024)])
def test_a_full_layer_costs_whole_blocks_of_keys_and_values(length, columns):
    assert build().layer_bytes(0, length, element_bytes=2) == columns * KV_BYTES


@pytest.mark.parametrize(("length", "columns"), [(1, 16), (65, 80), (100, 112)])
def test_a_window_layer_that_evicts_nothing_adds_one_score_a_head_and_column(length, columns):
    assert build().layer_bytes(2, length, element_bytes=2) == columns * (KV_BYTES + 2 * 4)


def test_a_window_layer_that_evicts_costs_its_slots_and_tables_whatever_the_length():
    # Per slot: keys, values, and 4 + 4 bytes of position and score a head; per request: three lengths, victims.
    expected = 100 * (KV_BYTES + 2 * 8) + 3 * 4 + 2 * 8
    for length in (101, 1000, 10**6):
        assert build().layer_bytes(2, length, element_bytes=2) == expected
        assert build().layer_bytes(2, length, element_bytes=2, batch_size=3) == 3 * expected


def test_a_fraction_is_of_the_prompt_and_not_of_what_was_decoded():
    plan = build(budget=0.25)
    assert plan.layer_bytes(2, 900, element_bytes=2, prompt_length=400) == build().layer_bytes(2, 900, element_bytes=2)


def test_a_growing_layer_adds_blocks_for_what_was_decoded():
    growing, fixed = build(decode="grow"), build()
    at_prompt = fixed.layer_bytes(2, 200, element_bytes=2)
    assert growing.layer_bytes(2, 200, element_bytes=2) == at_prompt
    for decoded, slots in ((1, 64), (64, 64), (65, 128)):
        grown = growing.layer_bytes(2, 200 + decoded, element_bytes=2, prompt_length=200)
        assert grown == at_prompt + slots * (KV_BYTES + 2 * 8)


def test_the_total_is_the_sum_of_the_layers_and_dense_is_keys_and_values_alone():
    plan = build()
    parts = [plan.layer_bytes(i, 500, element_bytes=2, batch_size=3) for i in range(6)]
    assert plan.total_bytes(500, element_bytes=2, batch_size=3) == sum(parts)
    assert plan.dense_bytes(500, element_bytes=2, batch_size=3) == 3 * 500 * 6 * KV_BYTES


def test_the_table_has_a_row_a_layer_and_the_text_merges_equal_neighbours():
    plan = build(budget=[100, 100, 100, 50])
    rows = plan.table(300, element_bytes=2)
    assert [row["tokens"] for row in rows] == [300, 300, 100, 100, 100, 50]
    assert [row["kind"] for row in rows] == ["full"] * 2 + ["window"] * 4
    text = plan.describe(300, element_bytes=2)
    assert [line.split()[0] for line in text.splitlines()] == ["layers", "0-1", "2-4", "5", "total"]
    assert f"{plan.total_bytes(300, element_bytes=2):,}" in text
    assert [row["tokens"] for row in plan.table(60, element_bytes=2)] == [60, 60, 60, 60, 60, 50]


# --- JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"budget": [10, 0.5, 30, 40]}, {"decode": "grow"}])
def test_a_plan_survives_json(options):
    plan = build(**options)
    assert LayerPlan.from_json(plan.to_json()) == plan


def without(key: str) -> str:
    return json.dumps({name: value for name, value in json.loads(build().to_json()).items() if name != key})


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", without("shape"), without("layers"), without("grows"), '{"shape": {"depth": 3}}']
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ConfigError, match="not a layer plan"):
        LayerPlan.from_json(text)


def changed(**values: object) -> str:
    return json.dumps(json.loads(build().to_json()) | values)


def changed_layer(**values: object) -> str:
    layers = json.loads(build().to_json())["layers"]
    return changed(layers=[*layers[:-1], layers[-1] | values])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(grows="no"), "grows must be True or False: got 'no'"),
        (changed(layers=[]), r"lists the layers 0 to 5, each once and in order: got \[\]"),
        (changed(layers=5), "'int' object is not iterable"),
        (changed_layer(layer_idx=77), r"lists the layers 0 to 5.*got \[0, 1, 2, 3, 4, 77\]"),
        (changed_layer(layer_idx=-1), "layer_idx must be an int from 0"),
        (changed_layer(budget="x"), "budget must be an int from 8 to 2147483647: got 'x'"),
        (changed_layer(budget=-5), "budget must be an int from 8 to 2147483647: got -5"),
        (changed_layer(budget=1.5), r"budget must be a fraction in \(0, 1\].*got 1.5"),
        (changed_layer(budget=None), "a full layer has no budget, any other has one"),
        (changed_layer(is_full=True), "a full layer has no budget, any other has one"),
        (changed_layer(is_full=0), "is_full must be True or False: got 0"),
        (changed_layer(num_protected=0), "num_protected must be an int from 1"),
        ("[" * 100_000, "invalid JSON"),
        (None, "JSON text is needed, got None"),
    ],
)
def test_a_plan_of_impossible_values_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=f"not a layer plan: .*{message}"):
        LayerPlan.from_json(text)


@pytest.mark.parametrize("length", [-1, 2.5, float("nan"), True, None, 2**31])
def test_a_length_that_is_no_number_of_tokens_is_refused(length):
    plan = build()
    for call in (plan.describe, plan.total_bytes, plan.dense_bytes, plan.table, partial(plan.layer_bytes, 0)):
        with pytest.raises(ConfigError, match="length must be an int from 0 to 2147483647: got"):
            call(length, element_bytes=2)
    with pytest.raises(ConfigError, match="prompt_length must be an int from 0 to 10: got 11"):
        plan.total_bytes(10, element_bytes=2, prompt_length=11)
    for layer_idx in (-1, 6, True):
        with pytest.raises(ConfigError, match="layer_idx must be an int from 0 to 5: got"):
            plan.layer_bytes(layer_idx, 10, element_bytes=2)


def test_no_tokens_cost_no_bytes():
    assert build().total_bytes(0, element_bytes=2) == 0
    assert build().describe(0, element_bytes=2).endswith("(dense 0, 0 tokens)")


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (None, SHAPE, "config must be a SparseKVConfig: got None"),
        ({"budget": 64}, SHAPE, "config must be a SparseKVConfig: got {'budget': 64}"),
        (SparseKVConfig(), 6, "shape must be a ModelShape: got 6"),
    ],
)
def test_a_plan_is_built_of_a_configuration_and_a_shape(config, shape, message):
    with pytest.raises(ConfigError, match=message):
        LayerPlan.build(config, shape)


def test_a_fraction_is_not_rounded_up_by_float_noise():
    spec = LayerSpec(layer_idx=0, is_full=False, budget=0.07, num_protected=1)
    assert [spec.kept_tokens(length) for length in (100, 101, 1)] == [7, 8, 1]
