"""One sample through one cache: what is scored, and what it cost."""

import time
from typing import Any

from evals.scoring import Context, ContextScores, SparseScorer, split_context
from evals.tasks.samples import AWARE, EXACT, NLL, TOKENS, Sample

HELD_BACK_TOKENS = 1
"""Read after the compression at the least: else the first scored token's logits come from before any eviction."""


def context_of(sample: Sample) -> Context:
    """What is compressed, what is read after that, and what is scored."""
    if sample.mode == AWARE or not sample.question:
        head, tail = split_context(sample.document + sample.question, HELD_BACK_TOKENS)
    else:
        head, tail = sample.document, sample.question
    return Context(head, tail, sample.continuations)


def outcome(scorer: SparseScorer, sample: Sample) -> dict[str, Any]:
    """What `judged` says of one sample through one cache, and the seconds it took."""
    start = time.perf_counter()
    result = scorer.score([context_of(sample)])[0]
    return judged(sample, result) | {"seconds": time.perf_counter() - start}


def judged(sample: Sample, result: ContextScores) -> dict[str, Any]:
    """JSON-able: `value`, by option `log_likelihoods` and `token_shares`, evicted tokens, bytes.

    The value is what the sample's scorer says; a token share counts the tokens that are the most probable one. A choice
    goes by log-likelihoods per token: options may differ in length.
    """
    means = [
        score.log_likelihood / len(tokens) for score, tokens in zip(result.scores, sample.continuations, strict=True)
    ]
    shares = [score.num_greedy / len(tokens) for score, tokens in zip(result.scores, sample.continuations, strict=True)]
    if sample.scorer == EXACT:
        value = float(result.scores[0].is_greedy)
    elif sample.scorer == TOKENS:
        value = shares[0]
    elif sample.scorer == NLL:
        value = -means[0]
    else:
        value = float(max(range(len(means)), key=means.__getitem__) == sample.gold)
    return {
        "value": value,
        "log_likelihoods": means,
        "token_shares": shares,
        "num_evicted": result.footprint.num_evicted,
        "cache_bytes": result.footprint.cache_bytes,
        "dense_bytes": result.footprint.dense_bytes,
    }
