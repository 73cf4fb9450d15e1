"""Offline tasks through several caches, the same samples for each, paired with the dense cache's results.

A document is read once for all caches, see `evals.shared_prefill`; with `prefill="bounded"` once for each.

    python -m evals.run_tasks --tasks needle,perplexity --lengths 1024 --out needle.jsonl --json needle.json
        --config snapkv-4x:num_full_layers=0,budget=0.25
        --config hybrid-4x:num_full_layers=0,budget=0.25,scorer=hybrid

Every sample's result is a line of `--out`, written as soon as it is there; the same command goes on where an
interrupted one stopped, and one with more tasks, seeds or configurations adds to the file. The summary is made of the
lines.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

import hf_sparsekv as skv
from evals.model_args import split_options
from evals.sample_groups import outcomes_of
from evals.scoring import SparseScorer
from evals.shared_prefill import SharedPrefill
from evals.tasks.catalog import TASKS, samples_of
from evals.tasks.essay import AUTO, SOURCES, EssayTokens, load_essay
from evals.tasks.lines import SampleLines
from evals.tasks.measure import HELD_BACK_TOKENS, context_of
from evals.tasks.provenance import model_facts, versions
from evals.tasks.samples import HALVES, MODES, NO_CONTEXT, Sample
from evals.tasks.summary import DENSE, Results, rows
from hf_sparsekv.bench.machine import commit
from hf_sparsekv.cli.loading import DTYPES, load_weights, open_model
from hf_sparsekv.errors import ConfigError, InputError, SparseKVError, shown
from hf_sparsekv.models_store import BUILTIN_ALIAS

FORMAT = 1
"""Of the lines and of the summary."""


def parse_config(text: str) -> tuple[str, skv.SparseKVConfig]:
    """A named configuration from `name:option=value,option=value`.

    Raises:
        ConfigError: no name, a name that is taken, or an option that is wrong.
    """
    name, colon, options = text.partition(":")
    pairs = [pair.partition("=") for pair in options.split(",") if pair]
    if not name or name == DENSE or "|" in name or not colon or not all(key and equals for key, equals, _ in pairs):
        raise ConfigError(f"a configuration is name:option=value,option=value, and {DENSE!r} is no name: {shown(text)}")
    values: dict[str, Any] = {}
    for key, _, value in pairs:
        try:
            values[key.strip()] = json.loads(value)
        except ValueError:
            values[key.strip()] = value.strip()
    config, unknown = split_options(values, None, known=())
    if unknown:
        raise ConfigError(f"unknown option {shown(next(iter(unknown)))} in {shown(text)}")
    return name, config


def dense_config(model: PreTrainedModel) -> skv.SparseKVConfig:
    """Every layer keeps everything."""
    return skv.SparseKVConfig(num_full_layers=model.config.get_text_config().num_hidden_layers)


def run(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    configs: Mapping[str, skv.SparseKVConfig],
    out: Path,
    *,
    model_name: str,
    essay: Mapping[str, str],
    has_progress: bool = True,
) -> dict[str, Any]:
    """Measure what `out` does not hold yet, and sum all of it up.

    Args:
        model: a causal language model.
        samples: see `evals.tasks.catalog.samples_of`.
        configs: by name; the dense cache always takes part.
        out: JSON lines, made if it is not there.
        model_name: for people.
        essay: name and hash of the text that documents are made of.
        has_progress: draw a bar on stderr.
    Returns:
        JSON-able: versions, commit, model, configurations and `rows`, see `evals.tasks.summary`.
    Raises:
        InputError: samples that are too long for the model or for a bounded prefill, or a file of other results.
    """
    check_lengths(model.config, samples)
    _check_chunks(samples, configs)
    facts = {"format": FORMAT, "model": model_facts(model, model_name), "held_back_tokens": HELD_BACK_TOKENS}
    facts |= {"versions": versions()}
    configs = {DENSE: dense_config(model), **configs}
    with SampleLines(out, facts) as lines:
        results = _measured(model, samples, configs, lines, has_progress=has_progress)
    return facts | {
        "kind": "tasks",
        "commit": commit(),
        "commits": sorted({str(line["commit"]) for line in results.values()}),
        "essay": dict(essay),
        "configs": {
            name: {"config": config.to_dict(must_be_registered=False), "in_force": config.effective()}
            for name, config in configs.items()
        },
        "seconds": sum(line["seconds"] for line in results.values()),
        "rows": rows(samples, results, configs),
    }


def _measured(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    configs: Mapping[str, skv.SparseKVConfig],
    lines: SampleLines,
    *,
    has_progress: bool,
) -> Results:
    """The results of all samples with all configurations: those that are there, then the missing ones."""
    scorers = {
        name: SparseScorer(model, config, softmax_dtype=torch.float32)
        for name, config in configs.items()
        if config.chunk_tokens is not None
    }
    prefill = SharedPrefill(model, {name: config for name, config in configs.items() if name not in scorers})
    wanted = {
        (name, sample.id): _made_of(sample, config)
        for sample in samples
        for name, config in configs.items()
        if name == DENSE or sample.mode != NO_CONTEXT
    }
    todo = [key for key, made_of in wanted.items() if not lines.holds("|".join(key), made_of)]
    names: dict[str, list[str]] = {}
    for name, sample_id in todo:
        names.setdefault(sample_id, []).append(name)
    missing = [sample for sample in samples if sample.id in names]
    now = commit()
    with tqdm(total=len(wanted), initial=len(wanted) - len(todo), disable=not has_progress, desc="Samples") as bar:
        for sample, outcomes in outcomes_of(prefill, missing, names, scorers):
            for name, outcome in outcomes.items():
                line: dict[str, Any] = {"config": name, "task": sample.task, "mode": sample.mode, "half": sample.half}
                line |= {"seed": sample.seed, "budget_tokens": sample.budget_tokens, "num_tokens": sample.num_tokens}
                line |= {"facts": dict(sample.facts), "commit": now, **wanted[name, sample.id], **outcome}
                lines.add(f"{name}|{sample.id}", line)
                bar.update()
    return {key: lines.known["|".join(key)] for key in wanted}


def _made_of(sample: Sample, config: skv.SparseKVConfig) -> dict[str, str]:
    """Hashes that tell whether a stored result is of this sample and this configuration."""
    options = json.dumps(config.to_dict(must_be_registered=False), sort_keys=True)
    return {"sample_sha256": sample.sha256(), "config_sha256": hashlib.sha256(options.encode()).hexdigest()}


def check_lengths(config: PreTrainedConfig, samples: Sequence[Sample]) -> None:
    """Refuse samples that are too long for a model.

    Raises:
        InputError: names the task, the length and the limit.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max(samples, key=lambda sample: sample.num_tokens)
    if limit is not None and longest.num_tokens > limit:
        raise InputError(
            f"{longest.task} has samples of {longest.num_tokens} tokens, the model takes {limit}: give --lengths"
        )


def _check_chunks(samples: Sequence[Sample], configs: Mapping[str, skv.SparseKVConfig]) -> None:
    """Refuse a bounded prefill that would select within what is scored, which is read in one piece.

    Raises:
        InputError: names the configuration, the task, the length and the limit.
    """
    fed: dict[str, int] = {}
    for sample in samples:
        context = context_of(sample)
        fed[sample.task] = max(fed.get(sample.task, 0), len(context.tail) + max(map(len, context.continuations)) - 1)
    task, longest = max(fed.items(), key=lambda entry: entry[1])
    for name, config in configs.items():
        if config.chunk_tokens is not None and longest > config.chunk_tokens:
            raise InputError(
                f"{task} scores {longest} tokens behind a prompt, but configuration {name!r} selects after every "
                f"{config.chunk_tokens}: raise its prefill_chunk_tokens to {longest}, or leave the task out"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evals.run_tasks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def ints(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--model", default=BUILTIN_ALIAS, help="built-in alias, folder or hub id")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names with commas: %(default)s")
    parser.add_argument("--config", action="append", default=[], help="name:option=value,...; may be given again")
    parser.add_argument("--lengths", type=ints, help="tokens, with commas; default: each task's own")
    parser.add_argument("--seeds", type=ints, help="with commas; even ones belong to the tune half, odd ones to report")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--essay", choices=SOURCES, default=AUTO)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a sample and configuration")
    parser.add_argument("--json", type=Path, help="the summary; default: printed")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, and write the summary."""
    args = _parser().parse_args(arguments)
    try:
        configs = dict(parse_config(text) for text in args.config)
        if len(configs) < len(args.config):
            raise ConfigError("two configurations have the same name")
        if args.json and not args.json.parent.is_dir():
            raise InputError(f"cannot write {args.json}: no such folder; make it first")
        console = Console(stderr=True)
        source = open_model(args.model, trust_remote_code=False, console=console)
        text = EssayTokens(load_essay(args.essay, progress=console.print), source.tokenizer)
        modes = args.modes.split(",")
        samples = samples_of(
            args.tasks.split(","), text, lengths=args.lengths, seeds=args.seeds, modes=modes, half=args.half
        )
        check_lengths(source.config, samples)
        model = load_weights(source, dtype=args.dtype, device=args.device, console=console)
        essay = {"name": text.essay.name, "sha256": text.essay.sha256}
        summary = run(model, samples, configs, args.out, model_name=args.model, essay=essay)
    except SparseKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; what is finished stays in {args.out}, the same command goes on", file=sys.stderr)
        return 130
    printed = json.dumps(summary, indent=2) + "\n"
    if args.json:
        args.json.write_text(printed, encoding="utf-8")
    else:
        print(printed, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
