"""On a GPU the evaluation's one pass gives each configuration what a cache of its own gives it there.

Guards against a path of the forks, of the scores of several layers or of the pass over all rows that differs by device.
"""

import pytest
import torch

import hf_sparsekv as skv
from evals.scoring import Context, SparseScorer
from evals.shared_prefill import SharedPrefill
from hf_sparsekv.scorers import scorer_names
from hf_sparsekv.testing.compare import MAX_LOGITS_RELATIVE_ERROR
from hf_sparsekv.testing.models import tiny_llama

pytestmark = pytest.mark.gpu

CONTINUATIONS = ((1, 2, 3), (1, 2, 4), (7,), (1, 6, 6, 6))
SMALL = {"num_recent_tokens": 8, "observation_window": 8, "num_full_layers": 0}


def tokens(count, seed):
    return tuple(torch.randint(3, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def configurations():
    made = {"dense": skv.SparseKVConfig(num_full_layers=3)}
    made |= {name: skv.SparseKVConfig(scorer=name, budget=24, **SMALL) for name in scorer_names()}
    return made | {"pyramid": skv.SparseKVConfig(budget=30, budget_shape="pyramid", **SMALL)}


@pytest.mark.parametrize("length", [1, 150, 1100])
def test_every_configuration_scores_as_with_a_cache_of_its_own(length):
    model, head, tail = tiny_llama(num_layers=3).to("cuda"), tokens(length, 1), tokens(9, 2)
    configs = configurations()
    results = SharedPrefill(model, configs).read(head).score(tail, CONTINUATIONS)
    for name, config in configs.items():
        scorer = SparseScorer(model, config, batch_size=4, softmax_dtype=torch.float32)
        expected = scorer.score([Context(head, tail, CONTINUATIONS)])[0]
        assert results[name].footprint == expected.footprint
        for score, reference in zip(results[name].scores, expected.scores, strict=True):
            assert score.log_likelihood == pytest.approx(reference.log_likelihood, rel=MAX_LOGITS_RELATIVE_ERROR), name
            assert score.num_greedy == reference.num_greedy, name


def test_the_device_changes_nothing():
    model, configs = tiny_llama(num_layers=3), configurations()
    head, tail = tokens(300, 1), tokens(9, 2)
    on_cpu = SharedPrefill(model, configs).read(head).score(tail, CONTINUATIONS)
    on_gpu = SharedPrefill(model.to("cuda"), configs).read(head).score(tail, CONTINUATIONS)
    for name in configs:
        assert on_gpu[name].footprint == on_cpu[name].footprint
        for score, reference in zip(on_gpu[name].scores, on_cpu[name].scores, strict=True):
            assert score.log_likelihood == pytest.approx(reference.log_likelihood, rel=MAX_LOGITS_RELATIVE_ERROR), name
