"""Samples of one document through all configurations, the document read once where all can share that."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evals.scoring import SparseScorer
from evals.shared_prefill import ReadPrompt, SharedPrefill
from evals.tasks.measure import context_of, judged, outcome
from evals.tasks.samples import Sample, Tokens


def outcomes_of(
    prefill: SharedPrefill,
    samples: Sequence[Sample],
    names: Mapping[str, Sequence[str]],
    scorers: Mapping[str, SparseScorer],
) -> Iterator[tuple[Sample, dict[str, dict[str, Any]]]]:
    """What `judged` says of each sample by configuration, and its share of the seconds.

    Samples of one document follow one another, whatever their order was. Their document is read alone, then what each
    compresses beside it, so that a result does not depend on which other samples are measured.

    Args:
        prefill: with the configurations that share a prefill.
        samples: each once.
        names: of the configurations that are wanted, by sample id.
        scorers: by name, for the configurations that read every prompt themselves.
    """
    for group in by_document(samples):
        prompts = _Prompts(prefill)
        for sample in group:
            shared = [name for name in names[sample.id] if name not in scorers]
            outcomes = _shared_outcomes(prompts, sample, shared) if shared else {}
            yield sample, outcomes | {n: outcome(scorers[n], sample) for n in names[sample.id] if n in scorers}


def by_document(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each document, in the order in which the documents come first."""
    groups: dict[Tokens, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.document, []).append(sample)
    return list(groups.values())


def _shared_outcomes(prompts: "_Prompts", sample: Sample, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    start, context = time.perf_counter(), context_of(sample)
    prompt = prompts.of(context.head, sample.document)
    results = prompt.score(context.tail, context.continuations, names)
    outcomes = {name: judged(sample, result) for name, result in results.items()}
    seconds = (time.perf_counter() - start) / len(outcomes)
    return {name: judgement | {"seconds": seconds} for name, judgement in outcomes.items()}


class _Prompts:
    """The prompts of one document; of the longer ones, only the last is kept."""

    def __init__(self, prefill: SharedPrefill) -> None:
        self._prefill = prefill
        self._document: ReadPrompt | None = None
        self._last: tuple[Tokens, ReadPrompt] | None = None

    def of(self, head: Tokens, document: Tokens) -> ReadPrompt:
        if len(head) >= len(document):
            if self._document is None:
                self._document = self._prefill.read(document)
            if len(head) == len(document):
                return self._document
        if self._last is None or self._last[0] != head:
            self._last = None  # before the next one takes memory
            if self._document is not None and len(head) > len(document):
                self._last = head, self._document.extend(head[len(document) :])
            else:
                self._last = head, self._prefill.read(head)
        return self._last[1]
