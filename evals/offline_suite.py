"""The offline tasks through several methods: samples, a budget for each task where a ratio is asked for, rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from evals.claims import Claims
from evals.comparison import Method
from evals.lockstep import follow, release
from evals.run_tasks import Measurement, check_lengths, facts_of, measured
from evals.shared_samples import measure_part
from evals.tasks.catalog import HUB_TASKS, TASKS, samples_of
from evals.tasks.essay import AUTO, EssayTokens, load_essay
from evals.tasks.lines import sample_parts
from evals.tasks.measure import context_of
from evals.tasks.samples import MODES, NO_CONTEXT, Sample
from evals.tasks.summary import DENSE
from hf_sparsekv.cli.loading import ModelSource
from hf_sparsekv.engine.part_files import PartFiles
from hf_sparsekv.errors import ConfigError, InputError, shown
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.parallel.place import Place
from hf_sparsekv.parallel.ranks import losing_others, ranks_of
from hf_sparsekv.plan import LayerPlan

NAME = "offline"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Which samples of the tasks are taken."""

    lengths: Sequence[int] | None = None
    seeds: Sequence[int] | None = None
    """None = each task's own."""
    modes: Sequence[str] = MODES
    half: str | None = None
    """None = both."""
    limit: int | None = None
    """Samples of a task, length and half at most; both protocols of a sample count as one."""
    essay: str = AUTO


@dataclass
class OfflineSuite:
    """Samples of some tasks, made and checked before a model is loaded."""

    samples: dict[str, list[Sample]]
    """By task."""
    essay: dict[str, str]
    unreachable: list[dict[str, Any]] = field(default_factory=list)
    """Rows of methods that cannot meet their ratio on a task."""

    @classmethod
    def prepare(cls, tasks: Sequence[str], source: ModelSource, grid: Grid, console: Console) -> "OfflineSuite":
        """Make the samples.

        Raises:
            InputError: an unknown task, samples that are too long for the model, a text that cannot be had.
            ConfigError: a grid that spans no sample.
        """
        check_names(tasks)  # before a text is fetched
        essay = load_essay(grid.essay, progress=lambda line: console.print(line, highlight=False))
        text = EssayTokens(essay, source.tokenizer)
        span: dict[str, Any] = {"lengths": grid.lengths, "seeds": grid.seeds, "modes": grid.modes, "half": grid.half}
        samples = {task: limited(samples_of([task], text, **span), grid.limit) for task in tasks}
        for of_task in samples.values():
            check_lengths(source.config, of_task)
        return cls(samples, {"name": essay.name, "sha256": essay.sha256})

    def configs(self, task: str, methods: Sequence[Method], model: PreTrainedModel) -> dict[str, Any]:
        """By name; what cannot meet its ratio on this task becomes a row of `unreachable`."""
        prompts: dict[tuple[int, str, str], list[int]] = {}
        for sample in self.samples[task]:
            if sample.mode != NO_CONTEXT:
                key = (sample.budget_tokens, sample.mode, sample.half)
                prompts.setdefault(key, []).append(len(context_of(sample).head))
        made = {}
        for method in methods:
            try:
                config = method.config(
                    model_shape(model.config), list(prompts.values()), element_bytes=model.dtype.itemsize
                )
            except ConfigError as error:
                if method.ratio is None:
                    raise
                self.unreachable += [
                    {"task": task, "budget_tokens": length, "mode": mode, "half": half, "config": method.name}
                    | {"num_samples": len(lengths), "refused": str(error)}
                    for (length, mode, half), lengths in prompts.items()
                ]
            else:
                LayerPlan.build(config, model_shape(model.config))
                made[method.name] = config
        return made

    def run(
        self, model: PreTrainedModel, methods: Sequence[Method], out: Path, *, model_name: str, place: Place
    ) -> dict[str, Any] | None:
        """Measure what `out` does not hold yet, or a share of that in one of several processes.

        Returns:
            A summary as of `evals.run_tasks.run`, `configs` by task; None in a process that does not lead.
        Raises:
            InputError: see `evals.run_tasks.run`.
            ReplicaLostError: another rank of the model has ended.
        """
        self.unreachable.clear()
        with losing_others():
            ranks = ranks_of(model, model_shape(model.config))
            measurements = {
                task: Measurement(model, samples, self.configs(task, methods, model), ranks=ranks, task=task)
                for task, samples in self.samples.items()
            }
            facts = facts_of(model, model_name)
            if ranks.rank > 0:
                follow(measurements, ranks)
                return None
            found = self._lead(measurements, out, facts, place)
            release(ranks)
        return found

    def _lead(
        self, measurements: Mapping[str, Measurement], out: Path, facts: Mapping[str, Any], place: Place
    ) -> dict[str, Any] | None:
        """What `run` does where a replica's lines are written."""
        parts = sample_parts(
            out,
            lambda: [line_id for measurement in measurements.values() for line_id in measurement.line_ids()],
            replica=place.replica,
            num_replicas=place.num_replicas,
        )
        if place.num_replicas > 1:
            measure_part(list(measurements.values()), parts, facts, has_progress=place.rank == 0)
            if place.replica > 0:
                return None
            parts.wait_for_others()
        found = self._summed(measurements, parts, facts)
        Claims(out).forget()
        return found

    def _summed(
        self, measurements: Mapping[str, Measurement], parts: PartFiles, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        by_task = {}
        rows: list[dict[str, Any]] = []
        seconds = 0.0
        commits: set[str] = set()
        for task, measurement in measurements.items():
            found = measured(measurement, parts, facts, essay=self.essay)
            by_task[task] = found["configs"]
            rows += [row | _budget(row, found["configs"]) for row in found["rows"]]
            rows += [row for row in self.unreachable if row["task"] == task]
            seconds += found["seconds"]
            commits |= set(found["commits"])
        merged = {"configs": by_task, "seconds": seconds, "commits": sorted(commits)}
        return found | merged | {"rows": [{"suite": NAME} | row for row in rows]}


def check_names(tasks: Sequence[str]) -> None:
    """Refuse tasks that are not there.

    Raises:
        InputError: names them all.
    """
    unknown = [name for name in tasks if name not in TASKS and name.partition(":")[0] not in HUB_TASKS]
    if unknown:
        known = ", ".join([*TASKS, *(f"{name}:..." for name in HUB_TASKS)])
        raise InputError(f"offline tasks are {known}: got {shown(unknown[0])}")


def _budget(row: dict[str, Any], configs: dict[str, Any]) -> dict[str, Any]:
    return {} if row["config"] == DENSE else {"budget": configs[row["config"]]["in_force"]["budget"]}


def limited(samples: Sequence[Sample], limit: int | None) -> list[Sample]:
    """At most so many samples of each task, length and half, in every mode that they have."""
    if limit is None:
        return list(samples)
    counted: dict[tuple[str, int, str], dict[str, None]] = {}
    kept = []
    for sample in samples:
        length = sample.budget_tokens
        pairs = counted.setdefault((sample.task, length, sample.half), {})
        if sample.pair_id in pairs or len(pairs) < limit:
            pairs[sample.pair_id] = None
            kept.append(sample)
    return kept
