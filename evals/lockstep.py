"""Samples measured by several ranks that share one model: rank 0 says which come next, and all of them compute.

Every rank makes the same forward passes, each for the KV heads that it has, and scores and selects for these alone;
beside the collectives of the dense model, one message for each piece of work passes between them. What a rank computes
depends on its own logits nowhere: results are judged by rank 0's, and it alone touches files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_sparsekv.parallel.ranks import Ranks

if TYPE_CHECKING:
    from evals.run_tasks import Measurement


@dataclass(frozen=True)
class Work:
    """What rank 0 measures next."""

    task: str
    names: Mapping[str, Sequence[str]]
    """Of configurations, by sample id; samples in the order in which they are measured."""


def follow(measurements: Mapping[str, "Measurement"], ranks: Ranks) -> None:
    """Take part in what rank 0 measures, until it calls `release`.

    Args:
        measurements: by task; rank 0's are made of the same samples and configurations.
        ranks: of this process; not the first.
    Raises:
        ReplicaLostError: rank 0 has ended before.
    """
    while (work := ranks.share()) is not None:
        measurement = measurements[work.task]
        by_id = {sample.id: sample for sample in measurement.samples}
        for _ in measurement.outcomes([by_id[sample_id] for sample_id in work.names], work.names):
            pass  # rank 0 has the results


def release(ranks: Ranks) -> None:
    """Let the other ranks end: nothing more is measured."""
    ranks.share(None)
