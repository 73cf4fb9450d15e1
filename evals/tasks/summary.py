"""From the results of single samples to the rows of a table; every row names its protocol and its half."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from evals.tasks.perplexity import kept_share
from evals.tasks.samples import CHOICE, EXACT, NLL, NO_CONTEXT, Sample
from evals.tasks.stats import ITSELF, agreement, bootstrap, mean_interval, perplexity, share, share_difference

DENSE = "dense"
Results = Mapping[tuple[str, str], Mapping[str, Any]]
"""Of single samples, by configuration and sample id."""


def rows(samples: Sequence[Sample], results: Results, configs: Iterable[str], *, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each task, length, protocol, half and configuration; only of samples that the dense cache has too.

    A sparse configuration that evicted nothing in any of a row's samples gets no figures, but `refused`: they would be
    the dense model's under another name.

    Args:
        samples: those of the run.
        results: see `Results`; some may be missing.
        configs: names, `DENSE` first.
        seed: of the resamples of the intervals, see `evals.tasks.stats`.
    """
    groups: dict[tuple[str, int, str, str], list[Sample]] = {}
    for sample in samples:
        if sample.mode != NO_CONTEXT:
            key = (sample.task, sample.budget_tokens, sample.mode, sample.half)
            groups.setdefault(key, []).append(sample)
    made = []
    for (task, length, mode, half), group in groups.items():
        for name in configs:
            paired = [s for s in group if (name, s.id) in results and (DENSE, s.id) in results]
            if paired:
                place = {"task": task, "budget_tokens": length, "mode": mode, "half": half, "config": name}
                made.append(place | {"num_samples": len(paired)} | _figures(paired, results, name, seed))
    return made


def _figures(samples: list[Sample], results: Results, name: str, seed: int) -> dict[str, Any]:
    found = [results[name, s.id] for s in samples]
    evicting = sum(result["num_evicted"] > 0 for result in found)
    if name != DENSE and not evicting:
        return {"refused": "nothing was evicted in any sample: lower the budget or take longer documents"}
    dense_bytes = float(np.mean([result["dense_bytes"] for result in found]))
    cache_bytes = dense_bytes if name == DENSE else float(np.mean([result["cache_bytes"] for result in found]))
    figures: dict[str, Any] = {
        "num_evicting": evicting,
        "mean_cache_bytes": cache_bytes,
        "mean_dense_bytes": dense_bytes,
        "compression": dense_bytes / cache_bytes,
    }
    values = np.array([[results[DENSE, s.id]["value"], results[name, s.id]["value"]] for s in samples])
    if samples[0].scorer == NLL:
        figures["perplexity"] = perplexity(values[:, 1]).to_dict()
        figures["nll_difference"] = mean_interval(values[:, 1] - values[:, 0]).to_dict()
        figures |= _kept(samples, results, name, seed)
        return figures
    figures["accuracy"] = share(values[:, 1]).to_dict()
    figures["difference"] = (ITSELF if name == DENSE else share_difference(values)).to_dict()
    if samples[0].scorer == CHOICE:
        dense, sparse = ([results[c, s.id]["log_likelihoods"] for s in samples] for c in (DENSE, name))
        figures["agreement"] = agreement(dense, sparse, [s.gold for s in samples])
    shares = np.array([[results[c, s.id].get("token_shares", [np.nan])[0] for c in (DENSE, name)] for s in samples])
    if samples[0].scorer == EXACT and np.isfinite(shares).all():  # lines of earlier runs lack them
        figures["token_share"] = share(shares[:, 1]).to_dict()
        figures["token_share_difference"] = (ITSELF if name == DENSE else share_difference(shares)).to_dict()
    return figures


def _kept(samples: list[Sample], results: Results, name: str, seed: int) -> dict[str, Any]:
    """Perplexity without context and the share of the context's worth that is kept, where the former was measured."""
    triples = [
        [results[DENSE, without]["value"], results[DENSE, s.id]["value"], results[name, s.id]["value"]]
        for s in samples
        if (DENSE, without := f"{s.pair_id}/{NO_CONTEXT}") in results
    ]
    if not triples:
        return {}
    values = np.array(triples)
    return {
        "perplexity_without_context": perplexity(values[:, 0]).value,
        "kept_share": bootstrap(values, kept_share, seed=seed).to_dict(),
    }
