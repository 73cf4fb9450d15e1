"""Tasks of lm-eval through several methods: one line a task and configuration, paired by document with the dense cache.

A task is scored with the dense cache first; its contexts' lengths then decide the budgets where a ratio is asked for.
An interrupted run keeps whole tasks: name single subjects to keep more.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.tasks import TaskManager
from tqdm import tqdm
from transformers import PreTrainedModel

import hf_sparsekv as skv
from evals.comparison import Method
from evals.harness import check_tasks, evaluate
from evals.ledger import EvictionError
from evals.run_tasks import dense_config
from evals.tasks.lines import SampleLines, sample_parts
from evals.tasks.mmlu import GROUP, build_layout, load_examples, load_questions
from evals.tasks.provenance import model_facts, versions
from evals.tasks.samples import AWARE
from evals.tasks.stats import INTERVALS, ITSELF, share, share_difference
from evals.tasks.summary import DENSE
from hf_sparsekv.bench.machine import commit
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.parallel.place import Place

NAME = "lm-eval"
HELD_BACK_TOKENS = 1
METRICS = ("acc", "exact_match", "f1")
"""Of a document, in the order in which one is taken."""


@dataclass(frozen=True, kw_only=True)
class LmOptions:
    """How the harness is run."""

    limit: int | None = None
    """Documents of a task at most."""
    num_fewshot: int | None = None
    """None = the task's own."""
    batch_size: int = 1


@dataclass
class LmSuite:
    """Some tasks, found before a model is loaded."""

    tasks: list[str]
    options: LmOptions
    manager: TaskManager
    tokenizer: Any
    unreachable: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def prepare(cls, tasks: Sequence[str], options: LmOptions, tokenizer: Any, include_path: Path | None) -> "LmSuite":
        """Find the tasks; those named mmlu_local are written to the user's cache, from data that packages carry.

        Raises:
            InputError: a task that is not there.
        """
        folders = [] if include_path is None else [str(include_path)]
        if any(name.startswith(GROUP) for name in tasks):
            folders.append(str(build_layout(load_questions(), load_examples())))
        has_stock = include_path is None and not all(name.startswith(GROUP) for name in tasks)
        manager = TaskManager(include_path=folders or None, include_defaults=has_stock or include_path is not None)
        check_tasks(list(tasks), manager)
        return cls(list(tasks), options, manager, tokenizer)

    def run(
        self, model: PreTrainedModel, methods: Sequence[Method], out: Path, *, model_name: str, place: Place
    ) -> dict[str, Any]:
        """Measure what `out` does not hold yet, in a single process.

        Returns:
            JSON-able: versions, commit, model, configurations and prompts by task, and `rows` like those of
            `evals.tasks.summary.rows`; a group's row pools the documents of its tasks.
        Raises:
            InputError: `out` holds results of something else, or a task has no metric by document.
        """
        assert place.world_size == 1, "checked before"
        settings = {"limit": self.options.limit, "num_fewshot": self.options.num_fewshot}
        settings |= {"held_back_tokens": HELD_BACK_TOKENS}
        facts = {"suite": NAME, "model": model_facts(model, model_name), "settings": settings}
        facts |= {"versions": versions() | {"lm_eval": _lm_eval_version()}}
        rows, configs, prompts = [], {}, {}
        commits: set[str] = set()
        total = len(self.tasks) * (len(methods) + 1)
        with SampleLines(sample_parts(out), facts) as lines, tqdm(total=total, desc="Tasks and configurations") as bar:
            for task in self.tasks:
                dense = self._line(lines, model, task, DENSE, dense_config(model))
                bar.update()
                configs[task] = {DENSE: dense["method"]}
                prompts[task] = dense.get("prompts")  # lines of earlier versions do not say
                commits.add(str(dense["commit"]))
                rows.append(_row(task, DENSE, dense, dense))
                for method in methods:
                    config, reason = _config(method, dense, model)
                    if config is None:
                        rows.append(_place(task, method.name, dense) | {"refused": reason})
                    else:
                        line = self._line(lines, model, task, method.name, config)
                        configs[task][method.name] = line["method"]
                        rows.append(_row(task, method.name, line, dense) | {"budget": config.effective()["budget"]})
                        commits.add(str(line["commit"]))
                    bar.update()
        found = {
            "intervals": INTERVALS,
            "prompts": prompts,
            "commit": commit(),
            "commits": sorted(commits),
            "configs": configs,
            "rows": rows,
        }
        return facts | found

    def _line(
        self, lines: SampleLines, model: PreTrainedModel, task: str, name: str, config: skv.SparseKVConfig
    ) -> dict[str, Any]:
        """The stored result of a task and configuration, measured if it is not there."""
        options = json.dumps(config.to_dict(must_be_registered=False), sort_keys=True)
        expected = {"config_sha256": hashlib.sha256(options.encode()).hexdigest()}
        line_id = f"{name}|{task}"
        if not lines.holds(line_id, expected):
            method = {"config": config.to_dict(must_be_registered=False), "in_force": config.effective()}
            line = {"config": name, "task": task, "commit": commit(), "method": method} | expected
            lines.add(line_id, line | self._measured(model, task, config, is_dense=name == DENSE))
        return lines.known[line_id]

    def _measured(
        self, model: PreTrainedModel, task: str, config: skv.SparseKVConfig, *, is_dense: bool
    ) -> dict[str, Any]:
        try:
            figures = evaluate(
                model,
                task,
                config,
                batch_size=self.options.batch_size,
                held_back_tokens=HELD_BACK_TOKENS,
                require_eviction=not is_dense,
                task_manager=self.manager,
                model_options={"tokenizer": self.tokenizer},
                limit=self.options.limit,
                num_fewshot=self.options.num_fewshot,
                bootstrap_iters=0,
            )
        except EvictionError as error:
            return {"refused": str(error)}
        samples = figures["samples"]
        return {
            "prompts": figures["prompts"],
            "values": {leaf: _values(leaf, some) for leaf, some in samples.items()},
            "num_options": [_num_options(s) for some in samples.values() for s in some],
            "context_tokens": [
                request["num_context_tokens"] for some in samples.values() for s in some for request in s["requests"]
            ],
            "eviction": figures["eviction"]["all"],
            "results": figures["results"],
            "groups": figures["groups"],
            "left_out": figures["refused"],
            "num_fewshot": figures["num_fewshot"],
            "task_versions": figures["task_versions"],
        }


def _lm_eval_version() -> str:
    import lm_eval

    return str(lm_eval.__version__)


def _config(
    method: Method, dense: Mapping[str, Any], model: PreTrainedModel
) -> tuple[skv.SparseKVConfig | None, str | None]:
    """The configuration for the contexts of a task, or why there is none."""
    lengths = [max(n - HELD_BACK_TOKENS, 1) for n in dense["context_tokens"]]
    try:
        return method.config(model_shape(model.config), [lengths], element_bytes=model.dtype.itemsize), None
    except ConfigError as error:
        if method.ratio is None:
            raise
        return None, str(error)


def _place(task: str, name: str, dense: Mapping[str, Any]) -> dict[str, Any]:
    """What the rows of one table share, and the configuration's name."""
    place = {"suite": NAME, "task": task, "budget_tokens": max(dense["context_tokens"]), "mode": AWARE, "half": "all"}
    return place | {"config": name}


def _row(task: str, name: str, line: Mapping[str, Any], dense: Mapping[str, Any]) -> dict[str, Any]:
    """Like a row of `evals.tasks.summary.rows`; documents that either of the two has no value for are left out."""
    place = _place(task, name, dense)
    if "refused" in line:
        return place | {"refused": line["refused"]}
    pairs = [
        (dense["values"][leaf][document], value)
        for leaf, of_leaf in line["values"].items()
        for document, value in of_leaf.items()
        if document in dense["values"].get(leaf, {})
    ]
    values = np.array(pairs)
    eviction = line["eviction"]
    options = [n for n in dense["num_options"] if n]
    return place | {
        "num_samples": len(pairs),
        "num_evicting": eviction["num_evicting"],
        "mean_cache_bytes": eviction["mean_cache_bytes"],
        "mean_dense_bytes": eviction["mean_dense_bytes"],
        "compression": 1.0 if name == DENSE else eviction["compression"],
        "accuracy": share(values[:, 1]).to_dict(),
        "difference": (ITSELF if name == DENSE else share_difference(values)).to_dict(),
        "chance": float(np.mean([1 / n for n in options])) if options else None,
        "left_out": sorted(line["left_out"]),
    }


def _values(task: str, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By document, as the task's first filter has it; the harness lists every document once for each filter."""
    first = samples[0].get("filter") if samples else None
    return {str(sample["doc_id"]): _value(task, sample) for sample in samples if sample.get("filter") == first}


def _value(task: str, sample: Mapping[str, Any]) -> float:
    """A document's figure."""
    metric = next((name for name in METRICS if isinstance(sample.get(name), int | float)), None)
    if metric is None:
        raise InputError(
            f"{task} has none of {', '.join(METRICS)} for each document, so caches cannot be compared on it: use "
            "evals.harness.evaluate for what the harness computes"
        )
    return float(sample[metric])


def _num_options(sample: Mapping[str, Any]) -> int | None:
    """Options of a multiple choice; None for other documents."""
    count = len(sample["requests"])
    return count if count > 1 else None
