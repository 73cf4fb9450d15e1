"""Samples measured by several processes: each takes the next document that nobody has, and writes a part of the lines.

Nothing but files is shared. A process that dies takes its last document along; what it had finished is in its part, and
whoever sums up, or the next run, measures the rest. So it goes with a document for which a shared GPU has no room, too:
who sums up has the GPU alone.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from evals.claims import Claims
from evals.run_tasks import Measurement
from evals.sample_groups import by_document
from evals.tasks.lines import SampleLines
from evals.tasks.samples import Sample
from hf_sparsekv.engine.part_files import PartFiles

MAX_UNIT_SAMPLES = 16
"""Of one document that one process takes at once; a process more reads the document again."""


@dataclass(frozen=True)
class Unit:
    """What a process takes at once: samples of one document."""

    measurement: Measurement
    samples: list[Sample]
    names: Mapping[str, Sequence[str]]
    """Of the configurations that are missing, by sample id."""

    @property
    def num_lines(self) -> int:
        """Results that will be made."""
        return sum(len(self.names[sample.id]) for sample in self.samples)

    @property
    def cost(self) -> int:
        """About what it takes, in tokens: each document once, and each sample's part of it for each configuration."""
        return sum(sample.num_tokens * (1 + len(self.names[sample.id])) for sample in self.samples)


def measure_part(
    measurements: Sequence[Measurement], parts: PartFiles, facts: Mapping[str, Any], *, has_progress: bool = True
) -> None:
    """Measure this process's share of what the file does not hold yet.

    Args:
        measurements: of all tasks; the same in all processes.
        parts: see `evals.tasks.lines.sample_parts`; `evals.run_tasks.measured` merges them in the end.
        facts: see `evals.run_tasks.facts_of`.
        has_progress: draw a bar on stderr.
    Raises:
        InputError: the file holds results of something else, or a run of another number of processes is at work.
    """
    claims, total = Claims(parts.output), sum(len(measurement.wanted) for measurement in measurements)
    with ExitStack() as stack:
        with SampleLines(parts, facts) as lines:
            units = _units(measurements, lines)
            if not units:  # a late one must not be in the way of who sums up
                return
            if not parts.is_anyone_at_work():
                claims.forget()  # of a run that is over
            file = stack.enter_context(parts.part())
        done = total - sum(unit.num_lines for unit in units.values())
        bar = stack.enter_context(tqdm(total=total, initial=done, disable=not has_progress, desc="Samples"))
        while (key := claims.take(list(units))) is not None:
            unit = units[key]
            try:
                for line_id, line in unit.measurement.lines(unit.samples, unit.names):
                    file.write(line_id, line)
            except torch.cuda.OutOfMemoryError:
                if unit.measurement.ranks.size > 1:  # the others are in the middle of it
                    raise
                tqdm.write(
                    f"{key}: no room on the GPU beside other processes; measured when they have ended", sys.stderr
                )
                torch.cuda.empty_cache()
            # Those that others have taken count as done: only the last ones are not.
            bar.n = done + sum(unit.num_lines for key, unit in units.items() if key in claims.taken)
            bar.refresh()


def _units(measurements: Sequence[Measurement], lines: SampleLines) -> dict[str, Unit]:
    """What is missing, by a name that all processes give it; the longest first, so that all end at about one time."""
    units = {}
    for measurement in measurements:
        names = measurement.missing(lines)
        for group in by_document(measurement.samples):
            for start in range(0, len(group), MAX_UNIT_SAMPLES):
                piece = group[start : start + MAX_UNIT_SAMPLES]
                missing = [sample for sample in piece if sample.id in names]
                if missing:
                    units[piece[0].id] = Unit(measurement, missing, names)
    return dict(sorted(units.items(), key=lambda entry: -entry[1].cost))
