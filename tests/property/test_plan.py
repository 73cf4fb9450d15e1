"""Laws of the plan's arithmetic, for any model and configuration."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_sparsekv import LayerPlan, SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import ModelShape

LAWS = settings(deadline=None, max_examples=60, derandomize=True)

shapes = st.builds(
    lambda layers, kv_heads, group, dim: ModelShape(
        num_layers=layers, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim
    ),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([16, 64, 128]),
)
tokens = st.integers(1, 5000)
fractions = st.floats(0.001, 0.999)


@st.composite
def plans(draw: st.DrawFn, **fixed: object) -> LayerPlan:
    """A plan with any budget (int, fraction or list), shape, full layers and decode mode."""
    shape = draw(shapes)
    sinks, recent = draw(st.integers(0, 8)), draw(st.integers(1, 40))
    full = draw(st.sets(st.integers(0, shape.num_layers - 1)))
    one = st.integers(sinks + recent, 3000) | fractions
    num_windows = shape.num_layers - len(full)
    lists = st.lists(one, min_size=num_windows, max_size=num_windows)
    budget = draw(one | lists if num_windows else one)
    options = {
        "full_layers": sorted(full),
        "budget": budget,
        "budget_shape": "uniform" if isinstance(budget, list) else draw(st.sampled_from(["uniform", "pyramid"])),
        "num_sink_tokens": sinks,
        "num_recent_tokens": recent,
        "observation_window": 1,
        "decode": draw(st.sampled_from(["replace_lowest", "ring", "grow"])),
    }
    return LayerPlan.build(SparseKVConfig(**(options | fixed)), shape)


@LAWS
@given(plans(), tokens, st.integers(0, 500), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_bytes_add_up_over_layers_and_requests(plan, prompt, decoded, batch, element_bytes):
    options = {"element_bytes": element_bytes, "prompt_length": prompt}
    length = prompt + decoded
    layers = range(len(plan.layers))
    total = plan.total_bytes(length, batch_size=batch, **options)
    assert total == batch * sum(plan.layer_bytes(i, length, **options) for i in layers)
    assert plan.dense_bytes(length, element_bytes=2 * element_bytes) == 2 * plan.dense_bytes(
        length, element_bytes=element_bytes
    )


@LAWS
@given(plans(), tokens, st.integers(0, 500), st.integers(1, 500))
def test_decoding_never_shrinks_a_layer_that_has_begun_to_evict(plan, prompt, decoded, more):
    for spec in plan.layers:
        begun = spec.is_full or prompt + decoded > spec.kept_tokens(prompt)
        if begun:
            before = plan.layer_bytes(spec.layer_idx, prompt + decoded, element_bytes=2, prompt_length=prompt)
            after = plan.layer_bytes(spec.layer_idx, prompt + decoded + more, element_bytes=2, prompt_length=prompt)
            assert before <= after
            if not spec.is_full and not plan.grows:
                assert before == after


@LAWS
@given(plans(decode="replace_lowest"), st.integers(0, 2000), tokens)
def test_a_larger_budget_never_costs_less(plan, extra, length):
    """Of two prompts that both exceed their budget, the one that keeps more costs more; 0 more costs the same."""
    for spec in plan.layers:
        if isinstance(spec.budget, int) and length > spec.budget + extra:
            larger = type(spec)(
                layer_idx=spec.layer_idx,
                is_full=False,
                budget=spec.budget + extra,
                num_protected=spec.num_protected,
            )
            layers = tuple(larger if s is spec else s for s in plan.layers)
            other = LayerPlan(shape=plan.shape, layers=layers)
            cost = [p.layer_bytes(spec.layer_idx, length, element_bytes=2) for p in (plan, other)]
            assert cost[0] <= cost[1]
            assert (cost[0] == cost[1]) == (extra == 0)


@LAWS
@given(plans(), tokens, tokens)
def test_a_layer_keeps_no_less_of_a_longer_prompt_and_never_less_than_what_is_protected(plan, first, second):
    short, long = sorted((first, second))
    for spec in plan.layers:
        assert spec.kept_tokens(short) <= spec.kept_tokens(long)
        if not spec.is_full:
            assert spec.kept_tokens(short) >= spec.num_protected


@LAWS
@given(shapes, st.integers(0, 8), st.integers(1, 40), st.integers(0, 3000), st.floats(1, 1000), st.data())
def test_a_pyramid_spends_exactly_what_uniform_budgets_spend(shape, sinks, recent, free, beta, data):
    options = {
        "num_full_layers": data.draw(st.integers(0, shape.num_layers)),
        "budget": sinks + recent + free,
        "num_sink_tokens": sinks,
        "num_recent_tokens": recent,
        "observation_window": 1,
    }
    uniform = LayerPlan.build(SparseKVConfig(**options), shape)
    pyramid = LayerPlan.build(SparseKVConfig(**options, budget_shape="pyramid", pyramid_beta=beta), shape)
    flat, falling = ([s.budget for s in plan.layers if not s.is_full] for plan in (uniform, pyramid))
    assert sum(falling) == sum(flat)
    assert all(lower >= upper - 1 for lower, upper in pairwise(falling))
    assert all(isinstance(budget, int) and budget >= sinks + recent for budget in falling)


@LAWS
@given(shapes, st.floats(0.001, 0.999), st.floats(1, 1000))
def test_a_pyramid_of_fractions_has_the_mean_asked_for(shape, budget, beta):
    config = SparseKVConfig(num_full_layers=0, budget=budget, budget_shape="pyramid", pyramid_beta=beta)
    fractions_of = [spec.budget for spec in LayerPlan.build(config, shape).layers]
    assert sum(fractions_of) / len(fractions_of) == pytest.approx(budget)
    assert fractions_of == sorted(fractions_of, reverse=True)
    assert all(0 < fraction <= 1 for fraction in fractions_of)


@LAWS
@given(plans(), tokens)
def test_no_layer_plans_to_keep_more_than_the_prompt_has(plan, length):
    assert all(row["tokens"] <= length for row in plan.table(length, element_bytes=2))


@LAWS
@given(plans())
def test_a_plan_survives_json(plan):
    assert LayerPlan.from_json(plan.to_json()) == plan


@LAWS
@given(shapes, st.integers(0, 45), st.data())
def test_a_list_of_any_other_length_is_refused(shape, length, data):
    num_full = data.draw(st.integers(0, shape.num_layers))
    assume(length not in (0, shape.num_layers - num_full))
    config = SparseKVConfig(num_full_layers=num_full, budget=[64] * length)
    message = f"budget lists {length} layers, but {shape.num_layers - num_full} layers"
    with pytest.raises(ConfigError, match=message):
        LayerPlan.build(config, shape)
