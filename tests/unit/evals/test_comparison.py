"""A budget is the largest whose bytes, all of them, meet the ratio; where none does, the message says what is possible.

Guards against nominal ratios, and against options that silently have no effect.
"""

import pytest

from evals import comparison
from evals.comparison import METHODS, at_ratios, fit_budget, methods_of, published_configs
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import LayerPlan, ModelShape

SHAPE = ModelShape(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
PROMPTS = [[1000, 1024], [2040]]


def compressions(config, prompts=PROMPTS):
    plan = LayerPlan.build(config, SHAPE)
    return [
        sum(plan.dense_bytes(n, element_bytes=2) for n in lengths)
        / sum(plan.total_bytes(n, element_bytes=2) for n in lengths)
        for lengths in prompts
    ]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ratio", [2.0, 4.0])
def test_the_largest_budget_that_meets_the_ratio(name, ratio):
    config = fit_budget(METHODS[name], SHAPE, PROMPTS, ratio, element_bytes=2)
    assert min(compressions(config)) >= ratio
    assert min(compressions(config)) < ratio * 1.01
    more = config.with_(budget=config.budget + 0.002)
    assert min(compressions(more)) < ratio
    assert config.with_(budget=1024) == SparseKVConfig.from_dict(METHODS[name])


def test_full_layers_are_made_up_for_by_the_others():
    even = fit_budget({"num_full_layers": 0}, SHAPE, PROMPTS, 4.0, element_bytes=2)
    three = fit_budget({"num_full_layers": 3}, SHAPE, PROMPTS, 4.0, element_bytes=2)
    assert three.budget < even.budget
    assert min(compressions(three)) >= 4.0


def test_what_is_not_possible_is_said_with_what_is():
    with pytest.raises(ConfigError, match=r"10x is not possible, at most 7\.\d\dx: 3 of 30 layers keep everything"):
        fit_budget({"num_full_layers": 3}, SHAPE, PROMPTS, 10.0, element_bytes=2)
    with pytest.raises(ConfigError, match=r"at most .*0 of 30 layers.*at least 36 tokens.*which has 100 to 100"):
        fit_budget({"num_full_layers": 0}, SHAPE, [[100]], 4.0, element_bytes=2)
    assert fit_budget({"num_full_layers": 0}, SHAPE, [[100, 2000]], 4.0, element_bytes=2)  # the sum counts


def test_methods_are_chosen_by_name():
    found = methods_of(["snapkv", "all"], [2, 4], {"num_recent_tokens": 64})
    assert [m.name for m in found[:2]] == ["snapkv-2x", "snapkv-4x"]
    assert len(found) == 2 * len(METHODS)
    assert all(m.options["num_recent_tokens"] == 64 for m in found)
    (one,) = methods_of(["tova"], [], {"full_layers": [1], "budget": 64})
    assert SparseKVConfig.from_dict(one.options).full_layers == (1,)
    for arguments, words in (
        ((["snapkw"], [], {}), "'snapkw'"),
        (
            (["published"], [], {}),
            r"published-layers: got 'published' \(the preset of that name is the method original",
        ),
        ((["snapkv"], [1], {}), "more than 1: got 1"),
        ((["snapkv"], [float("nan")], {}), "more than 1"),
        ((["snapkv"], [2], {"budget": 64}), "decides the budget"),
        ((["keydiff"], [2], {"row_reduction": "max"}), "keydiff: row_reduction"),
    ):
        with pytest.raises(ConfigError, match=words):
            methods_of(*arguments)
    assert [m.ratio for m in at_ratios("sparse", {}, [2.5])] == [2.5]


def test_the_published_shape_is_scaled():
    found = {m.name: m.options for m in published_configs(32)}
    assert len(found) == 9
    assert found["published-22of32-1536"] == {"num_full_layers": 10, "budget": 0.375}
    assert [m.name for m in published_configs(30)][::3] == [
        "published-21of30-1536",
        "published-24of30-1536",
        "published-29of30-1536",
    ]
    assert comparison.PUBLISHED not in METHODS
