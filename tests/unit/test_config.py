"""SparseKVConfig: every option is checked, resolved, and survives JSON."""

import json
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any

import pytest
import torch

from hf_sparsekv import Scorer, SparseKVConfig
from hf_sparsekv.errors import ConfigError, SparseKVError
from hf_sparsekv.scorers import Pooling, ScoreInputs, register_scorer, registry, scorer_names
from hf_sparsekv.scorers.snapkv import SnapKV
from hf_sparsekv.select import check_scores, select_kept

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class LoudValues(Scorer):
    """What a notebook would write: keep the tokens with the largest values."""

    name = "loud_values"
    queries = "none"
    is_query_aware = False
    is_probability = False

    power: float = 1.0

    def score(self, inputs: ScoreInputs) -> torch.Tensor:
        return inputs.values.float().norm(dim=-1) ** self.power


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of the test's own."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


# --- what is refused ----------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # layers
    ("both", {"num_full_layers": 2, "full_layers": [0]}, r"not both: got .*num_full_layers=2 and .*full_layers=\(0,\)"),
    ("count-negative", {"num_full_layers": -1}, "num_full_layers must be at least 0: got -1"),
    ("count-bool", {"num_full_layers": True}, "num_full_layers must be an int: got True"),
    ("count-float", {"num_full_layers": 3.0}, "num_full_layers must be an int: got 3.0"),
    ("layers-negative", {"full_layers": [0, -2]}, r"distinct layer indices from 0 up: got \[0, -2\]"),
    ("layers-twice", {"full_layers": [4, 4]}, r"distinct layer indices from 0 up: got \[4, 4\]"),
    ("layers-string", {"full_layers": "012"}, "full_layers must be a list of layer indices: got '012'"),
    ("layers-int", {"full_layers": 3}, "full_layers must be a list of layer indices: got 3"),
    ("layers-float", {"full_layers": [0, 1.0]}, "full_layers must hold ints: got 1.0"),
    ("layers-bool", {"full_layers": [True]}, "full_layers must hold ints: got True"),
    # tokens
    ("sinks-negative", {"num_sink_tokens": -1}, "num_sink_tokens must be at least 0: got -1"),
    ("sinks-none", {"num_sink_tokens": None}, "num_sink_tokens must be an int: got None"),
    ("recent-zero", {"num_recent_tokens": 0}, "num_recent_tokens must be at least 1: got 0"),
    ("recent-string", {"num_recent_tokens": "32"}, "num_recent_tokens must be an int: got '32'"),
    ("window-zero", {"observation_window": 0}, "observation_window must be at least 1: got 0"),
    ("window-bool", {"observation_window": True}, "observation_window must be an int: got True"),
    (
        "window-past-recent",
        {"observation_window": 33, "num_recent_tokens": 32},
        "observation_window=33 is larger than num_recent_tokens=32.*raise num_recent_tokens to 33",
    ),
    # budget
    ("budget-small", {"budget": 35}, r"budget=35 is smaller than .* = 36: raise the budget to at least 36"),
    ("budget-zero", {"budget": 0}, r"budget=0 is smaller than .* = 36"),
    ("budget-one", {"budget": 1.0}, r"budget=1.0 is not a fraction in \(0, 1\).*use full layers"),
    ("budget-nothing", {"budget": 0.0}, r"budget=0.0 is not a fraction in \(0, 1\)"),
    ("budget-float", {"budget": 512.0}, r"budget=512.0 is not a fraction.*whole tokens as an int"),
    ("budget-nan", {"budget": NAN}, r"budget=nan is not a fraction"),
    ("budget-bool", {"budget": True}, "budget must be an int .* got True"),
    ("budget-none", {"budget": None}, "budget must be an int .* got None"),
    ("budget-string", {"budget": "1024"}, "budget must be an int .* got '1024'"),
    ("budget-empty", {"budget": []}, "budget is an empty list: give one entry for each window layer"),
    ("budget-entry", {"budget": [64, 0.5, 12]}, "budget=12 is smaller than"),
    ("budget-entry-fraction", {"budget": [64, 1.5]}, "budget=1.5 is not a fraction"),
    ("budget-entry-nested", {"budget": [64, [64]]}, r"budget must be an int .* got \[64\]"),
    # shape
    ("shape", {"budget_shape": "pyramyd"}, "unknown budget_shape 'pyramyd': choose one of uniform, pyramid"),
    ("shape-of-list", {"budget_shape": "pyramid", "budget": [64]}, "budget_shape='pyramid' has no effect with a list"),
    ("beta-uniform", {"pyramid_beta": 5}, "pyramid_beta=5 has no effect with budget_shape='uniform'"),
    ("beta-small", {"pyramid_beta": 0.5, "budget_shape": "pyramid"}, "pyramid_beta must be a number >= 1: got 0.5"),
    ("beta-nan", {"pyramid_beta": NAN, "budget_shape": "pyramid"}, "pyramid_beta must be a number >= 1: got nan"),
    ("beta-bool", {"pyramid_beta": True, "budget_shape": "pyramid"}, "pyramid_beta must be a number >= 1: got True"),
    # scoring
    ("pooling", {"pooling": "mean"}, "unknown pooling 'mean': choose one of avg, max, forward, none"),
    ("rows", {"row_reduction": "sum"}, "unknown row_reduction 'sum': choose one of mean, max"),
    ("groups", {"group_reduction": "sum"}, "unknown group_reduction 'sum': choose one of mean, max"),
    ("rows-idle", {"row_reduction": "max", "scorer": "tova"}, "row_reduction='max' has no effect with scorer 'tova'"),
    ("rows-idle-h2o", {"row_reduction": "mean", "scorer": "h2o"}, "row_reduction='mean' has no effect .* 'h2o'"),
    (
        "groups-idle",
        {"group_reduction": "max", "scorer": "keydiff"},
        "group_reduction='max' has no effect .* 'keydiff'",
    ),
    ("width-even", {"pool_kernel_size": 8}, "pool_kernel_size must be odd and at most 41: got 8"),
    ("width-large", {"pool_kernel_size": 43}, "pool_kernel_size must be odd and at most 41: got 43"),
    ("width-zero", {"pool_kernel_size": 0}, "pool_kernel_size must be at least 1: got 0"),
    ("width-float", {"pool_kernel_size": 7.0}, "pool_kernel_size must be an int: got 7.0"),
    ("width-idle", {"pool_kernel_size": 7, "pooling": "none"}, "pool_kernel_size=7 has no effect with pooling='none'"),
    # decode
    ("decode", {"decode": "rings"}, "unknown decode 'rings': choose one of replace_lowest, ring, grow"),
    ("decay-large", {"decay": 1.5}, r"decay must be a number in \[0, 1\]: got 1.5"),
    ("decay-negative", {"decay": -0.1}, r"decay must be a number in \[0, 1\]: got -0.1"),
    ("decay-nan", {"decay": NAN}, r"decay must be a number in \[0, 1\]: got nan"),
    ("decay-bool", {"decay": True}, r"decay must be a number in \[0, 1\]: got True"),
    ("decay-ring", {"decay": 0.5, "decode": "ring"}, "decay=0.5 has no effect with decode='ring'"),
    ("decay-grow", {"decay": 0.5, "decode": "grow"}, "decay=0.5 has no effect with decode='grow'"),
    ("decay-of-ring-scorer", {"decay": 0.5, "scorer": "streaming_llm"}, "decay=0.5 has no effect with decode='ring'"),
    # scorer
    ("scorer", {"scorer": "snapvk"}, "unknown scorer 'snapvk': did you mean 'snapkv'"),
    ("scorer-far", {"scorer": "xyzzy"}, "unknown scorer 'xyzzy': see the list .*snapkv"),
    ("scorer-class", {"scorer": SnapKV}, "pass an object, not the class"),
    ("scorer-none", {"scorer": None}, "scorer must be a name or a Scorer, got None"),
    ("scorer-option", {"scorer_options": {"value_nrom": True}}, "unknown option 'value_nrom' of scorer 'snapkv'"),
    ("scorer-value", {"scorer": "rkv", "scorer_options": {"weight": 2}}, "weight must be a number"),
    ("scorer-object", {"scorer": SnapKV(), "scorer_options": {"value_norm": True}}, "no effect with a scorer object"),
    ("scorer-options-none", {"scorer_options": None}, "scorer_options must be .*got None"),
    ("scorer-options-list", {"scorer_options": ["value_norm"]}, r"scorer_options must be .*got \['value_norm'\]"),
]


@pytest.mark.parametrize(("options", "message"), [pytest.param(o, m, id=name) for name, o, m in REFUSED])
def test_a_wrong_option_is_refused_with_its_value_and_the_way_out(options, message):
    with pytest.raises(ConfigError, match=message):
        SparseKVConfig(**options)


def test_a_configuration_error_is_a_value_error_and_ours():
    with pytest.raises(ValueError, match="num_recent_tokens") as caught:
        SparseKVConfig(num_recent_tokens=0)
    assert isinstance(caught.value, SparseKVError)


@pytest.mark.parametrize(
    "options",
    [
        {"num_full_layers": 0},
        {"full_layers": []},
        {"full_layers": [7, 2]},
        {"num_sink_tokens": 0, "num_recent_tokens": 1, "observation_window": 1, "budget": 1},
        {"budget": 36},
        {"budget": 1e-9},
        {"budget": (36, 0.999, 4096)},
        {"budget_shape": "pyramid", "pyramid_beta": 1},
        {"pool_kernel_size": 41},
        {"pool_kernel_size": 1, "pooling": "none"},
        {"decay": 0},
        {"decay": 1.0},
        {"decay": 0.5, "scorer": "streaming_llm", "decode": "replace_lowest"},
    ],
)
def test_the_limits_themselves_are_lawful(options):
    config = SparseKVConfig(**options)
    assert SparseKVConfig.from_json(config.to_json()) == config


# --- what None means ----------------------------------------------------------------------------------------------


def test_three_full_layers_unless_they_are_named():
    assert SparseKVConfig().num_full_layers == 3
    assert SparseKVConfig(num_full_layers=0).num_full_layers == 0
    named = SparseKVConfig(full_layers=[5, 1])
    assert (named.num_full_layers, named.full_layers) == (None, (5, 1))


@pytest.mark.parametrize(
    ("options", "pool"),
    [
        ({}, Pooling("avg", 7)),
        ({"pool_kernel_size": 3}, Pooling("avg", 3)),
        ({"pooling": "max"}, Pooling("max", 7)),
        ({"pooling": "forward", "pool_kernel_size": 21}, Pooling("forward", 21)),
        ({"pooling": "none"}, Pooling("none", 1)),
        ({"scorer": "hybrid"}, Pooling("forward", 11)),
        ({"scorer": "hybrid", "pooling": "avg"}, Pooling("avg", 11)),
        ({"scorer": "hybrid", "pool_kernel_size": 5}, Pooling("forward", 5)),
        ({"scorer": "tova"}, Pooling("none", 1)),
        ({"scorer": "tova", "pool_kernel_size": 5}, Pooling("avg", 5)),
        ({"scorer": "tova", "pooling": "max"}, Pooling("max", 7)),
    ],
)
def test_pooling_is_the_options_then_the_scorers(options, pool):
    assert SparseKVConfig(**options).pool == pool


@pytest.mark.parametrize(
    ("options", "rows", "groups"),
    [
        ({}, "mean", "mean"),
        ({"scorer": "hybrid"}, "max", "mean"),
        ({"scorer": "hybrid", "row_reduction": "mean"}, "mean", "mean"),
        ({"row_reduction": "max", "group_reduction": "max"}, "max", "max"),
        ({"scorer": "tova", "group_reduction": "max"}, "mean", "max"),
    ],
)
def test_reductions_are_the_options_then_the_scorers(options, rows, groups):
    config = SparseKVConfig(**options)
    assert (config.rows, config.groups) == (rows, groups)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "replace_lowest"),
        ({"scorer": "streaming_llm"}, "ring"),
        ({"scorer": "streaming_llm", "decode": "replace_lowest"}, "replace_lowest"),
        ({"decode": "grow"}, "grow"),
    ],
)
def test_the_decode_mode_is_the_options_then_the_scorers(options, mode):
    assert SparseKVConfig(**options).decode_mode == mode


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, (31 / 32, 1 / 32)),
        ({"observation_window": 4}, (0.75, 0.25)),
        ({"observation_window": 1}, (0.0, 1.0)),
        ({"decay": 0.9}, (0.9, 0.1)),
        ({"decay": 0}, (0.0, 1.0)),
        ({"scorer": "h2o"}, (1.0, 1.0)),
        ({"scorer": "tova"}, (0.0, 1.0)),
        ({"scorer": "h2o", "decay": 0.5}, (0.5, 0.5)),
    ],
)
def test_decoding_moves_the_score_by_the_window_unless_told_otherwise(options, weights):
    assert SparseKVConfig(**options).decode_weights == pytest.approx(weights)


@pytest.mark.usefixtures("_registry")
def test_a_decay_of_the_scorer_alone_leaves_the_rest_to_the_new_weight():
    class Slow(SnapKV):
        name = "slow"
        decode_decay = 0.75

    assert SparseKVConfig(scorer=Slow()).decode_weights == (0.75, 0.25)


def test_sinks_and_recents_are_the_smallest_budget():
    config = SparseKVConfig(num_sink_tokens=2, num_recent_tokens=9, observation_window=9, budget=11)
    assert config.num_protected == 11


# --- a value ------------------------------------------------------------------------------------------------------


def test_a_configuration_is_frozen_and_never_shares_what_it_was_given():
    layers, options = [0, 1], {"value_norm": True}
    config = SparseKVConfig(full_layers=layers, scorer_options=options)
    layers.append(2)
    options["value_norm"] = False
    assert config.full_layers == (0, 1)
    assert config.scorer_options == {"value_norm": True}
    assert config.scorer_object == SnapKV(value_norm=True)
    with pytest.raises(FrozenInstanceError):
        config.budget = 5


def test_a_changed_copy_is_checked_again_and_the_original_stays():
    config = SparseKVConfig(budget=64)
    assert config.with_(budget=128) == SparseKVConfig(budget=128)
    assert config.with_(scorer="rkv").scorer_object.name == "rkv"
    assert config.budget == 64
    with pytest.raises(ConfigError, match="budget=3 is smaller"):
        config.with_(budget=3)


def test_full_layers_can_take_the_place_of_a_default_count():
    changed = SparseKVConfig().with_(full_layers=(0,), num_full_layers=None)
    assert (changed.full_layers, changed.num_full_layers) == ((0,), None)


# --- JSON ---------------------------------------------------------------------------------------------------------

EVERYTHING = SparseKVConfig(
    full_layers=(0, 1, 5),
    budget=(64, 0.25),
    num_sink_tokens=3,
    num_recent_tokens=16,
    observation_window=8,
    scorer="hybrid",
    scorer_options={"share": 0.5},
    pooling="max",
    pool_kernel_size=5,
    row_reduction="mean",
    group_reduction="max",
    decode="replace_lowest",
    decay=0.25,
)


@pytest.mark.parametrize("name", scorer_names())
def test_every_scorer_survives_json(name):
    config = SparseKVConfig(scorer=name)
    assert SparseKVConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "config", [EVERYTHING, SparseKVConfig(budget_shape="pyramid", pyramid_beta=7.5, decode="grow", budget=0.125)]
)
def test_every_option_survives_json(config):
    back = SparseKVConfig.from_json(config.to_json())
    assert back == config
    assert back.scorer_object == config.scorer_object
    assert list(json.loads(config.to_json())) == [f.name for f in fields(SparseKVConfig)]


@pytest.mark.usefixtures("_registry")
def test_a_registered_object_is_written_by_name():
    config = SparseKVConfig(scorer=LoudValues(power=2.0))
    with pytest.raises(ConfigError, match=r"LoudValues is not registered.*register_scorer"):
        config.to_json()
    register_scorer(LoudValues)
    back = SparseKVConfig.from_json(config.to_json())
    assert (back.scorer, back.scorer_options) == ("loud_values", {"power": 2.0})
    assert back.scorer_object == config.scorer_object


def test_an_unknown_option_suggests_a_close_one():
    with pytest.raises(ConfigError, match="unknown option 'num_sink_token': did you mean 'num_sink_tokens'"):
        SparseKVConfig.from_dict({"num_sink_token": 4})
    with pytest.raises(ConfigError, match=r"unknown option 'xyzzy': options are num_full_layers, .*decay"):
        SparseKVConfig.from_dict({"xyzzy": 4})


@pytest.mark.parametrize(
    ("text", "message"), [("{", "invalid JSON"), ("[1]", "a JSON object is needed, got list"), ("3", "got int")]
)
def test_what_is_no_configuration_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        SparseKVConfig.from_json(text)


def test_values_from_json_are_checked():
    with pytest.raises(ConfigError, match="budget=3 is smaller"):
        SparseKVConfig.from_json('{"budget": 3}')


@pytest.mark.parametrize("name", scorer_names())
def test_what_is_in_force_can_be_printed_for_every_scorer(name):
    config = SparseKVConfig(scorer=name)
    shown = config.effective()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["scorer"] == name
    assert (shown["pooling"], shown["pool_kernel_size"]) == (config.pool.kind, config.pool.width)
    assert shown["decode"] == config.decode_mode
    assert (shown["decay"] is None) == (shown["gain"] is None) == (config.decode_mode != "replace_lowest")
    assert (shown["row_reduction"] is None) != config.scorer_object.uses_row_reduction


# --- a scorer of one's own ----------------------------------------------------------------------------------------


def test_a_notebook_length_scorer_decides_what_stays():
    config = SparseKVConfig(scorer=LoudValues(), budget=4, num_sink_tokens=1, num_recent_tokens=1, observation_window=1)
    values = torch.ones(1, 2, 9, 4)
    values[0, 0, [3, 6]] = values[0, 1, [2, 5]] = 5.0
    inputs = ScoreInputs(
        keys=torch.randn(1, 2, 9, 4),
        values=values,
        queries=torch.randn(1, 4, 0, 4),
        scale=0.5,
        row_reduction=config.rows,
        group_reduction=config.groups,
        num_seen=9,
    )
    scores = config.scorer_object.score(inputs)
    check_scores(scores, (1, 2, 9), 0, config.scorer_object.name)
    kept = select_kept(scores, torch.tensor([4], dtype=torch.int32), 4, None, config)
    assert kept.index.tolist() == [[[0, 3, 6, 8], [0, 2, 5, 8]]]
