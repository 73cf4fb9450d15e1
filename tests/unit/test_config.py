"""SparseKVConfig: every option is checked, resolved, and survives JSON."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields

import pytest
import torch

from hf_sparsekv import Scorer, SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.presets import PRESETS
from hf_sparsekv.scorers import Pooling, ScoreInputs, register_scorer, registry, scorer_names
from hf_sparsekv.scorers.snapkv import SnapKV
from hf_sparsekv.select import check_scores, select_kept


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


# --- what is lawful -----------------------------------------------------------------------------------------------


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


def test_no_full_layers_unless_they_are_named():
    assert SparseKVConfig().num_full_layers == 0
    assert SparseKVConfig(num_full_layers=3).num_full_layers == 3
    named = SparseKVConfig(full_layers=[5, 1])
    assert (named.num_full_layers, named.full_layers) == (None, (5, 1))


@pytest.mark.parametrize(
    ("options", "pool"),
    [
        ({}, Pooling("avg", 21)),
        ({"scorer": "snapkv"}, Pooling("avg", 7)),
        ({"scorer": "snapkv", "pool_kernel_size": 3}, Pooling("avg", 3)),
        ({"scorer": "snapkv", "pooling": "max"}, Pooling("max", 7)),
        ({"pooling": "forward", "pool_kernel_size": 21}, Pooling("forward", 21)),
        ({"pooling": "none"}, Pooling("none", 1)),
        ({"scorer": "hybrid"}, Pooling("avg", 21)),
        ({"scorer": "hybrid", "pooling": "max"}, Pooling("max", 21)),
        ({"scorer": "hybrid", "pool_kernel_size": 5}, Pooling("avg", 5)),
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
        ({}, "max", "mean"),
        ({"scorer": "snapkv"}, "mean", "mean"),
        ({"scorer": "hybrid", "row_reduction": "mean"}, "mean", "mean"),
        ({"row_reduction": "max", "group_reduction": "max"}, "max", "max"),
        ({"scorer": "tova", "group_reduction": "max"}, "mean", "max"),
    ],
)
def test_reductions_are_the_options_then_the_scorers(options, rows, groups):
    config = SparseKVConfig(**options)
    assert (config.rows, config.groups) == (rows, groups)


def test_sinks_and_recents_are_the_smallest_budget():
    config = SparseKVConfig(num_sink_tokens=2, num_recent_tokens=9, observation_window=9, budget=11)
    assert config.num_protected == 11


# --- a value ------------------------------------------------------------------------------------------------------


def test_a_configuration_is_frozen_and_never_shares_what_it_was_given():
    layers, options = [0, 1], {"value_norm": True}
    config = SparseKVConfig(full_layers=layers, scorer="snapkv", scorer_options=options)
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
    prompt_share=0.75,
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
    with pytest.raises(ConfigError, match=r"unknown option 'xyzzy': options are preset, num_full_layers, .*decay"):
        SparseKVConfig.from_dict({"xyzzy": 4})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "invalid JSON"),
        ("[1]", "a JSON object is needed, got list"),
        ("3", "got int"),
        (None, "JSON text is needed, got None"),
        (5, "JSON text is needed, got 5"),
        (b"\xff", "invalid JSON"),
        ('{"budget": ' + "9" * 5000 + "}", "invalid JSON"),
        ("[" * 100_000, "invalid JSON"),
    ],
)
def test_what_is_no_configuration_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        SparseKVConfig.from_json(text)


@pytest.mark.parametrize("text", ['\ufeff{"budget": 99}', '\ufeff{"budget": 99}'.encode(), b'{"budget": 99}'])
def test_bytes_and_a_byte_order_mark_are_read_too(text):
    assert SparseKVConfig.from_json(text) == SparseKVConfig(budget=99)


@pytest.mark.parametrize(
    ("values", "message"), [(None, "got None"), ([1], r"got \[1\]"), ({1: 2}, "unknown option 1: options are")]
)
def test_what_is_no_mapping_of_names_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SparseKVConfig.from_dict(values)


def test_an_unknown_name_is_refused_by_a_changed_copy_too():
    with pytest.raises(ConfigError, match="unknown option 'bugdet': did you mean 'budget'"):
        SparseKVConfig().with_(bugdet=5)


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("options", [{}, {"need": "x"}])
def test_a_scorer_that_cannot_be_built_is_a_configuration_error(options):
    @register_scorer
    @dataclass(frozen=True, kw_only=True)
    class Needy(SnapKV):
        name = "needy"
        need: int

        def __post_init__(self) -> None:
            assert self.need > 0

    with pytest.raises(ConfigError, match="scorer 'needy' cannot be built of scorer_options="):
        SparseKVConfig(scorer="needy", scorer_options=options)
    assert SparseKVConfig(scorer="needy", scorer_options={"need": 1}).scorer_object.name == "needy"


def test_scorer_options_cannot_be_changed_behind_the_checks_back():
    given = {"share": 0.5}
    config = SparseKVConfig(scorer="hybrid", scorer_options=given)
    with pytest.raises(TypeError):
        config.scorer_options["share"] = 9
    given["share"] = 9
    config.to_dict()["scorer_options"]["share"] = 9
    assert config.scorer_options == {"share": 0.5} == config.to_dict()["scorer_options"]


@pytest.mark.parametrize("config", [SparseKVConfig(), EVERYTHING, SparseKVConfig(scorer=SnapKV(value_norm=True))])
def test_equal_configurations_hash_alike_and_copies_are_equal(config):
    for copied in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.with_()):
        assert copied == config
        assert len({copied, config}) == 1
        assert copied.scorer_object == config.scorer_object


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


# --- presets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_what_is_not_given(name):
    config = SparseKVConfig(preset=name, budget=300)
    for option, value in PRESETS[name].items():
        assert getattr(config, option) == value
    assert config == SparseKVConfig(**PRESETS[name], budget=300)
    assert SparseKVConfig.from_dict({"preset": name, "budget": 300}) == config
    assert SparseKVConfig.from_dict(config.to_dict()) == config.with_() == pickle.loads(pickle.dumps(config)) == config


def test_what_is_given_beats_the_preset():
    config = SparseKVConfig(preset="published", num_full_layers=1)
    assert (config.num_full_layers, config.scorer) == (1, "snapkv")
    config = SparseKVConfig(preset="published", full_layers=[4])
    assert (config.num_full_layers, config.full_layers) == (None, (4,))
    assert SparseKVConfig(preset="question-in-window", pool_kernel_size=5).pool == Pooling("avg", 5)


def test_the_defaults_are_a_preset():
    assert SparseKVConfig() == SparseKVConfig(preset="balanced")


@pytest.mark.parametrize("name", ["best", 3, ["published"]])
def test_an_unknown_preset_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match=r"unknown preset .*: choose one of balanced, question-in-window, published"):
        SparseKVConfig(preset=name)


def test_a_preset_over_a_configuration_decides_what_it_decides():
    base = SparseKVConfig(preset="question-in-window", budget=300, num_sink_tokens=2)
    assert base.with_(preset="published") == SparseKVConfig(preset="published", budget=300, num_sink_tokens=2)
    assert base.with_(preset="published", num_full_layers=1).num_full_layers == 1


def test_a_preset_that_decides_nothing_is_refused():
    with pytest.raises(ConfigError, match="preset='balanced' has no effect"):
        SparseKVConfig.from_dict(SparseKVConfig().to_dict() | {"preset": "balanced"})


def test_a_preset_leaves_out_what_has_no_effect_beside_what_is_given():
    other = SparseKVConfig(preset="question-in-window", scorer="tova")
    assert (other.num_full_layers, other.row_reduction, other.pool) == (0, None, Pooling("none", 1))
    assert SparseKVConfig(preset="question-in-window", pooling="none").pool == Pooling("none", 1)
