"""A scorer of one's own: its mistakes show when it is registered or configured, not when a prompt is read."""

import pytest
import torch

from hf_sparsekv import Scorer, SparseKVConfig
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.scorers import Pooling, ScoreInputs, register_scorer


class Newest(Scorer):
    """Sound: the newest keys score highest."""

    name = "newest"
    queries = "none"

    def score(self, inputs: ScoreInputs) -> torch.Tensor:
        return inputs.key_positions().float()


def test_a_sound_one_is_taken_as_it_is():
    scorer = Newest()
    assert SparseKVConfig(scorer=scorer).scorer_object is scorer


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": None}, "Own has no name: give it a class attribute"),
        ({"name": ""}, "Own has no name"),
        ({"queries": "window"}, "Own.queries is 'window': make it one of none, last, all"),
        ({"default_row_reduction": "sum"}, "Own.default_row_reduction is 'sum': make it one of mean, max"),
        ({"default_decode": "rings"}, "Own.default_decode is 'rings': make it one of replace_lowest"),
        ({"default_pooling": "avg"}, "Own.default_pooling is 'avg': make it a Pooling"),
        ({"default_pooling": Pooling("avg", 4)}, "odd"),
        ({"score": Scorer.score}, "Own has no method score"),
    ],
)
def test_what_would_only_fail_once_a_prompt_is_read_is_refused_before(attributes, message):
    own = type("Own", (Newest,), {"name": "own"} | attributes)
    with pytest.raises(ConfigError, match=message):
        register_scorer(own)
    if "score" not in attributes:  # Python makes no object of an abstract class
        with pytest.raises(ConfigError, match=message):
            SparseKVConfig(scorer=own())
