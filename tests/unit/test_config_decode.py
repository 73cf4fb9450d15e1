"""What decoding does under a configuration: the mode, the weights of a score, the prompt's share."""

import pytest

from hf_sparsekv import SparseKVConfig
from hf_sparsekv.scorers.snapkv import SnapKV


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


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 0.5),
        ({"prompt_share": 0.2}, 0.2),
        ({"preset": "question-in-window"}, 0.5),
        ({"preset": "published"}, 0.0),
        ({"preset": "published", "decode": "ring"}, 0.0),
        ({"preset": "published", "prompt_share": 0.3}, 0.3),
        ({"scorer": "h2o"}, 0.0),
        ({"scorer": "h2o", "prompt_share": 0.4}, 0.4),
        ({"scorer": "tova"}, 0.0),
        ({"scorer": "tova", "decay": 0.9, "prompt_share": 1}, 1),
        ({"decode": "ring"}, 0.0),
        ({"decode": "grow"}, 0.0),
        ({"decay": 0}, 0.0),
        ({"decay": 0, "prompt_share": 0}, 0.0),
        ({"decode": "grow", "prompt_share": 0}, 0.0),
    ],
)
def test_the_prompts_share_is_the_options_then_the_scorers_where_scores_decide(options, share):
    config = SparseKVConfig(**options)
    assert config.pinned_share == share
    assert config.effective()["prompt_share"] == (share if config.decode_mode == "replace_lowest" else None)


def test_a_decay_of_the_scorer_alone_leaves_the_rest_to_the_new_weight():
    class Slow(SnapKV):
        name = "slow"
        decode_decay = 0.75

    assert SparseKVConfig(scorer=Slow()).decode_weights == (0.75, 0.25)


def test_a_preset_takes_another_mode_later():
    assert SparseKVConfig(preset="published").with_(decode="ring").decode_mode == "ring"
