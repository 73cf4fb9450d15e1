"""What the command line's method options amount to."""

import pytest

from hf_sparsekv.cli.options import build_config
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError


def build(path=None, preset=None, budget=None, num_full_layers=None, full_layers=None, scorer=None, settings=None):
    return build_config(path, preset, budget, num_full_layers, full_layers, scorer, settings)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(SparseKVConfig(preset="question-in-window", budget=300, num_sink_tokens=2).to_json())
    return path


def test_a_preset_is_taken_and_what_is_beside_it_wins():
    assert build(preset="published") == SparseKVConfig(preset="published")
    assert build(preset="published", num_full_layers=1, budget="64") == SparseKVConfig(
        preset="published", num_full_layers=1, budget=64
    )
    assert build(preset="published", full_layers="0,4").full_layers == (0, 4)


def test_a_preset_beats_the_file_in_what_it_decides_and_nowhere_else(written):
    expected = SparseKVConfig(preset="published", budget=300, num_sink_tokens=2)
    assert build(written, preset="published") == expected
    assert build(written) == SparseKVConfig(preset="question-in-window", budget=300, num_sink_tokens=2)


def test_a_preset_can_be_named_in_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"preset": "published", "budget": 300}')
    assert build(path) == SparseKVConfig(preset="published", budget=300)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="unknown preset 'best'"):
        build(preset="best")


def test_an_option_of_a_scorer_is_shown_its_place():
    hint = r"one of scorer hybrid: .*--set scorer_options='\{\"share\": \.\.\.\}'"
    with pytest.raises(ConfigError, match=hint):
        build(settings=["share=0.5"])
    assert dict(build(settings=['scorer_options={"share": 0.25}']).scorer_options) == {"share": 0.25}
