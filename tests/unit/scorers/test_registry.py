"""Names, options and errors of the registry."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.scorers import (
    ScoreInputs,
    Scorer,
    build_scorer,
    describe_scorer,
    register_scorer,
    registry,
    scorer_names,
    scorer_table,
    unregister_scorer,
)
from hf_sparsekv.scorers.snapkv import SnapKV

NAMES = scorer_names()


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


@dataclass(frozen=True, kw_only=True)
class Newest(Scorer):
    """A scorer of a user's own."""

    name = "newest"
    queries = "none"

    power: float = 1.0

    def score(self, inputs: ScoreInputs) -> Tensor:
        return inputs.key_positions().float() ** self.power


@pytest.mark.parametrize("name", NAMES)
def test_every_scorer_survives_json(name):
    scorer = build_scorer(name, {})
    described = json.loads(json.dumps(describe_scorer(scorer)))

    assert described["name"] == name
    assert build_scorer(described["name"], described["options"]) == scorer


def test_options_survive_json():
    scorer = build_scorer("rkv", {"weight": 0.25, "num_spared": 4})

    assert describe_scorer(scorer)["options"] == {"weight": 0.25, "threshold": 0.5, "num_spared": 4}
    assert build_scorer("rkv", describe_scorer(scorer)["options"]) == scorer != build_scorer("rkv", {})


@pytest.mark.parametrize("name", NAMES)
def test_a_scorer_is_frozen(name):
    scorer = build_scorer(name, {})
    for option in vars(scorer):
        with pytest.raises(AttributeError):
            setattr(scorer, option, 0)


def test_an_unknown_name_lists_the_names_and_a_close_one():
    with pytest.raises(ConfigError, match=r"unknown scorer 'snapvk': did you mean 'snapkv'") as caught:
        build_scorer("snapvk", {})
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(ConfigError, match="unknown scorer 'zzz'"):
        build_scorer("zzz", {})


def test_an_unknown_option_lists_the_options():
    with pytest.raises(ConfigError, match=r"unknown option 'beta' of scorer 'hybrid'.*share, value_norm"):
        build_scorer("hybrid", {"beta": 1})
    with pytest.raises(ConfigError, match=r"unknown option 'beta' of scorer 'tova'.*no options"):
        build_scorer("tova", {"beta": 1})


def test_an_object_is_taken_as_it_is_and_takes_no_options():
    scorer = Newest(power=2.0)

    assert build_scorer(scorer, {}) is scorer
    with pytest.raises(ConfigError, match="scorer object"):
        build_scorer(scorer, {"power": 3.0})


@pytest.mark.parametrize(("value", "hint"), [(3, "subclass hf_sparsekv.Scorer"), (SnapKV, "not the class")])
def test_what_is_no_scorer_is_refused_with_a_hint(value, hint):
    with pytest.raises(ConfigError, match=hint):
        build_scorer(value, {})


def test_a_registered_scorer_is_known_by_name():
    with pytest.raises(ConfigError, match=r"Newest is not registered.*register_scorer"):
        describe_scorer(Newest())
    assert register_scorer(Newest) is Newest

    assert "newest" in scorer_names()
    assert build_scorer("newest", {"power": 2.0}) == Newest(power=2.0)
    assert describe_scorer(Newest()) == {"name": "newest", "options": {"power": 1.0}}
    assert register_scorer(Newest) is Newest  # a notebook cell run twice


def test_a_taken_name_is_refused_even_for_a_class_called_alike():
    other = type("SnapKV", (Newest,), {"name": "snapkv", "__module__": "elsewhere", "__qualname__": "SnapKV"})

    with pytest.raises(ConfigError, match="'snapkv' is taken by SnapKV"):
        register_scorer(other)
    assert type(build_scorer("snapkv", {})) is SnapKV


def test_the_name_of_a_registered_scorer_can_be_freed_for_another():
    register_scorer(Newest)
    config = SparseKVConfig(scorer="newest")
    other = type("Renamed", (Newest,), {"__module__": __name__, "__qualname__": "Renamed"})
    with pytest.raises(
        ConfigError, match=r"by Newest: choose another, or call hf_sparsekv\.unregister_scorer\('newest'\)"
    ):
        register_scorer(other)

    unregister_scorer("newest")

    assert "newest" not in scorer_names()
    assert type(config.scorer_object) is Newest  # what was made of it goes on
    with pytest.raises(ConfigError, match="unknown scorer 'newest'"):
        SparseKVConfig(scorer="newest")
    register_scorer(other)
    assert type(build_scorer("newest", {})) is other


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("snapkv", "'snapkv' is the package's own and stays"),
        ("newst", r"no scorer is registered as 'newst': give the name of one of yours \(newest\)"),
        (Newest, r"give the name of one of yours \(newest\)"),
    ],
)
def test_only_names_of_registered_scorers_can_be_freed(name, message):
    register_scorer(Newest)
    with pytest.raises(ConfigError, match=message):
        unregister_scorer(name)
    assert {"snapkv", "newest"} <= set(scorer_names())


def test_what_cannot_be_registered_is_refused():
    with pytest.raises(ConfigError, match="not a scorer class"):
        register_scorer(dict)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="Nameless has no name"):
        register_scorer(type("Nameless", (Scorer,), {}))


def test_the_table_says_what_the_documentation_needs():
    rows = {row["name"]: row for row in scorer_table()}

    assert list(rows) == scorer_names()
    assert rows["snapkv"]["papers"] == ["2404.14469", "2406.02069"]
    assert rows["h2o"]["queries"] == "all"
    assert rows["keydiff"]["is_query_aware"] is False
    assert all(row["papers"] for name, row in rows.items() if name != "random")
    assert all(row["summary"].endswith(".") for row in rows.values())
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("snapkv", "value_norm", [1, "false", None]),
        ("hybrid", "share", [-0.1, 1.5, float("nan"), True, "x"]),
        ("hybrid", "value_norm", [0, "no"]),
        ("hybrid", "rest_width", [0, 2, 43, 3.0, True]),
        ("hybrid", "rest", ["values", None, 3]),
        ("keyformer", "temperature", [0, -1.0, float("nan"), float("inf"), True, "hot"]),
        ("keyformer", "seed", [-1, 0.5, True, 2**62]),
        ("random", "seed", [-1, 0.5, True, 2**62]),
        ("rkv", "weight", [-0.1, 1.1, float("nan"), "x"]),
        ("rkv", "threshold", [-0.1, 1.1, None]),
        ("rkv", "num_spared", [-1, 1.5, True]),
        ("expected_attention", "num_future", [0, -5, 1.5, True]),
        ("expected_attention", "value_norm", [1, "yes"]),
    ],
)
def test_values_out_of_range_are_named(name, option, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"{option} must be .*got"):
            build_scorer(name, {option: value})


@pytest.mark.parametrize("seed", [0, 2**40])
def test_the_largest_seed_works(make_inputs, seed):
    scores = build_scorer("random", {"seed": seed}).score(make_inputs(layer_idx=79))

    assert isinstance(scores, torch.Tensor)
