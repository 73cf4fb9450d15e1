"""A continuation is the text that follows its context, with the context and without.

Guards against a share of the context's worth that is computed from different continuations.
"""

import math

import numpy as np
import pytest

from evals.tasks.perplexity import Perplexity, kept_share
from hf_sparsekv.errors import ConfigError


def test_a_context_goes_on_in_its_continuation(text, tokenizer):
    task = Perplexity(lengths=(300, 700), num_scored=64, seeds=(0, 1, 2))
    samples = list(task.samples(text))
    assert samples == list(task.samples(text))
    for with_context, without in zip(samples[::2], samples[1::2], strict=True):
        assert len(with_context.document) == with_context.budget_tokens - 64
        assert without.document == with_context.document[-1:]
        assert without.continuations == with_context.continuations
        assert with_context.pair_id == without.pair_id
        assert (with_context.mode, without.mode) == ("agnostic", "no-context")
        whole = tokenizer.decode(with_context.document + with_context.continuations[0])
        half = " ".join(text.essay.sentences[i] for i in text.essay.half(with_context.half))
        assert whole[1:] in f"{half} {half}"  # the end goes on at the beginning


def test_the_kept_share_is_one_for_dense_and_zero_for_no_context():
    nll = np.log(np.array([[40.0, 30.0, 30.0], [40.0, 30.0, 30.0]]))
    assert kept_share(nll) == pytest.approx(1.0)
    nll[:, 2] = math.log(40)
    assert kept_share(nll) == pytest.approx(0.0)
    nll[:, 2] = math.log(32.5)
    assert kept_share(nll) == pytest.approx(0.75)
    assert math.isnan(kept_share(np.log(np.array([[30.0, 30.0, 31.0]]))))


def test_nothing_scored_is_refused():
    with pytest.raises(ConfigError, match="num_scored"):
        Perplexity(num_scored=0)
