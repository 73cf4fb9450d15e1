"""`evaluate`: lm-eval's tasks with a sparse cache, from Python, in one call, with everything that made the figures.

    from evals.harness import evaluate
    config = SparseKVConfig(num_full_layers=3, budget=256, scorer="hybrid")
    figures = evaluate("smollm2-135m-instruct", ["mmlu_philosophy"], config, num_fewshot=5, limit=20)

Needs the extra `eval`. Importing this module also makes the model known to `lm_eval.simple_evaluate("sparsekv",
model_args="pretrained=...,budget=256,num_full_layers=3,scorer=hybrid", ...)`.
"""

import json
from collections.abc import Sequence
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

import hf_sparsekv as skv
from evals.ledger import RequestRecord, require_sparse, summary, summary_by_task
from evals.sparse_lm import SparseKVLM
from evals.tasks.provenance import model_facts, prompt_facts, versions
from hf_sparsekv.errors import ConfigError, InputError

FORMAT = 1
"""Of what `evaluate` returns."""
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
"""All the harness has."""


def evaluate(
    model: Any,
    tasks: str | Sequence[str],
    config: skv.SparseKVConfig | None = None,
    *,
    batch_size: int = 1,
    seed: int = 1234,
    held_back_tokens: int = 1,
    require_eviction: bool = True,
    include_path: str | None = None,
    include_defaults: bool = True,
    task_manager: TaskManager | None = None,
    model_options: dict[str, Any] | None = None,
    **harness_options: Any,
) -> dict[str, Any]:
    """Run tasks of lm-eval with a sparse cache.

    Args:
        model: alias, folder or Hugging Face id, or a loaded model.
        tasks: names of tasks, groups or tags.
        config: the method's options; defaults if None.
        batch_size: contexts that are read, and forks that are scored, at once.
        seed: of Python, NumPy, torch and the choice of examples.
        held_back_tokens: see `SparseKVLM`.
        require_eviction: leave out tasks whose scores are the dense model's, and raise when that is all of them.
        include_path: a folder with tasks of your own.
        include_defaults: whether lm-eval's own tasks are known too; indexing them takes seconds.
        task_manager: what knows the tasks, in place of the two options before it; for several calls.
        model_options: what else `SparseKVLM` takes (`tokenizer`, `rolling_chunk_tokens`, `dtype`, `device`, ...).
        harness_options: what else `lm_eval.simple_evaluate` takes (`limit`, `num_fewshot`, `gen_kwargs`, ...).
    Returns:
        JSON-able: `versions`, `model`, `prompts` (see `prompt_facts`; a task's stop strings are in its samples),
        `config` and `in_force`, `settings`, `eviction` (whole and by task), `results` and `groups` as the harness
        computes them, `refused` (tasks none of whose scores depended on a compressed cache, with the reason; they are
        missing from `results`, but part of their group's mean), and `samples` with a record of every request.
    Raises:
        EvictionError: no score depended on a compressed cache, unless `require_eviction` is False.
        InputError: a task that is not there.
        ConfigError: options that contradict each other or a sparse cache.
    """
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    manager = task_manager or TaskManager(include_path=include_path, include_defaults=include_defaults)
    check_tasks(names, manager)
    if harness_options.get("use_cache") is not None:
        raise ConfigError("use_cache keeps answers without what was evicted for them: leave it out")
    lm = SparseKVLM(
        model,
        sparse_config=skv.SparseKVConfig() if config is None else config,
        held_back_tokens=held_back_tokens,
        require_eviction=False,  # a call of one kind without eviction must not lose what other tasks have scored
        batch_size=batch_size,
        **(model_options or {}),
    )
    seeds = dict.fromkeys(SEEDS, seed)
    output = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, **seeds, **harness_options)
    assert output is not None  # one process
    if require_eviction:
        require_sparse(lm.records, budget=lm.sparse_config.budget)
    settings = {"tasks": names, "batch_size": batch_size, "seed": seed, "require_eviction": require_eviction}
    return _figures(lm, output, settings | harness_options)


def _figures(lm: SparseKVLM, output: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What `evaluate` returns."""
    settings |= {"held_back_tokens": lm.held_back_tokens, "rolling_chunk_tokens": lm.rolling_chunk_tokens}
    settings |= {"max_length": lm.max_length}
    figures = {
        "kind": "lm-eval",
        "format": FORMAT,
        "versions": versions() | {"lm_eval": lm_eval.__version__},
        "commit": output.get("git_hash"),
        "model": model_facts(lm.model, lm.model.config._name_or_path or type(lm.model).__name__),
        "prompts": prompt_facts(_chat_template(lm, settings.get("apply_chat_template", False)), _stop_ids(lm)),
        "config": lm.sparse_config.to_dict(must_be_registered=False),
        "in_force": lm.sparse_config.effective(),
        "settings": settings,
    }
    figures |= _scores(output, lm.records, require_eviction=settings["require_eviction"])
    plain: dict[str, Any] = json.loads(json.dumps(figures, default=handle_non_serializable))
    return plain


def _chat_template(lm: SparseKVLM, wanted: bool | str) -> str | None:
    """Text of the template that the harness was asked to apply."""
    return lm.chat_template(wanted) if wanted else None


def _stop_ids(lm: SparseKVLM) -> list[int]:
    """The model's own, and the harness's end of text."""
    own = lm.model.generation_config.eos_token_id
    return [*(own if isinstance(own, list) else [] if own is None else [own]), lm.eot_token_id]


def check_tasks(names: list[str], manager: TaskManager) -> None:
    """Refuse names that lead to no task, before a model is loaded."""
    if not names:
        raise InputError("no task is named: give at least one, such as 'mmlu'")
    unknown = [name for name in names if name not in manager.task_index]
    if unknown:
        raise InputError(
            f"unknown task {unknown[0]!r}: `lm-eval ls tasks` lists those of the harness; tasks of your own need "
            "include_path, the folder that holds their YAML files"
        )


def _scores(output: dict[str, Any], records: list[RequestRecord], *, require_eviction: bool) -> dict[str, Any]:
    """Results and samples, the refused tasks left out; each sample with the records of its requests."""
    by_task = summary_by_task(records)
    refused = {
        task: f"none of {of_task['num_requests']} scores depended on a compressed cache"
        for task, of_task in by_task.items()
        if require_eviction and not of_task["num_sparse"]
    }
    of_document: dict[tuple[str | None, int | None], list[dict[str, Any]]] = {}
    for record in records:
        of_document.setdefault((record.task, record.doc_id), []).append(record.to_dict())
    samples = {
        task: [sample | {"requests": of_document.get((task, sample["doc_id"]), [])} for sample in of_task]
        for task, of_task in (output.get("samples") or {}).items()
        if task not in refused
    }
    return {
        "eviction": {"all": summary(records), "tasks": by_task},
        "results": {task: values for task, values in output["results"].items() if task not in refused},
        "groups": output.get("groups", {}),
        "refused": refused,
        "task_versions": output.get("versions", {}),
        "num_fewshot": output.get("n-shot", {}),
        "samples": samples,
    }
