"""Noise belongs to a layer's heads, on whatever rank they are."""

import pytest
import torch

from hf_sparsekv.scorers.base import HeadShard, ScoreInputs
from hf_sparsekv.scorers.keyformer import Keyformer
from hf_sparsekv.scorers.random import RandomScorer


@pytest.mark.parametrize("scorer", [RandomScorer(seed=3), Keyformer(seed=3)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_heads_get_the_same_scores_on_any_number_of_ranks(scorer, num_ranks):
    keys, values, queries = torch.randn(1, 4, 9, 8), torch.randn(1, 4, 9, 8), torch.randn(1, 8, 9, 8)

    def score(first, count):
        inputs = ScoreInputs(
            keys=keys[:, first : first + count],
            values=values[:, first : first + count],
            queries=queries[:, 2 * first : 2 * (first + count)],
            scale=0.3,
            row_reduction="mean",
            group_reduction="mean",
            num_seen=9,
            layer_idx=1,
            heads=HeadShard(first, 4),
        )
        return scorer.score(inputs)

    count = 4 // num_ranks
    parts = torch.cat([score(rank * count, count) for rank in range(num_ranks)], dim=1)
    assert torch.allclose(parts, score(0, 4), rtol=1e-6, atol=0)
    assert not torch.allclose(parts[:, 0], parts[:, -1])
