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
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

import hf_sparsekv as skv
from evals.lockstep import Work
from evals.model_args import split_options
from evals.sample_groups import by_document, outcomes_of
from evals.scoring import SparseScorer
from evals.shared_prefill import SharedPrefill
from evals.tasks.catalog import TASKS, samples_of
from evals.tasks.essay import AUTO, SOURCES, EssayTokens, load_essay
from evals.tasks.lines import SampleLines, sample_parts
from evals.tasks.measure import HELD_BACK_TOKENS, context_of
from evals.tasks.provenance import SCORED_TEXTS, model_facts, versions
from evals.tasks.samples import HALVES, MODES, NO_CONTEXT, Sample
from evals.tasks.stats import INTERVALS
from evals.tasks.summary import DENSE, Results, rows
from hf_sparsekv.bench.machine import commit
from hf_sparsekv.cli.loading import DTYPES, load_weights, open_model
from hf_sparsekv.engine.part_files import PartFiles
from hf_sparsekv.errors import ConfigError, InputError, SparseKVError, shown
from hf_sparsekv.models_store import BUILTIN_ALIAS
from hf_sparsekv.parallel.ranks import Ranks

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


class Measurement:
    """Some samples through some configurations of one model.

    Args:
        model: a causal language model.
        samples: see `evals.tasks.catalog.samples_of`.
        configs: by name; the dense cache always takes part.
        ranks: that share the model: see `evals.lockstep`. None = this process has all of it.
        task: tells the ranks which of several measurements this is.
    Raises:
        InputError: samples that are too long for the model or for a bounded prefill.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        samples: Sequence[Sample],
        configs: Mapping[str, skv.SparseKVConfig],
        *,
        ranks: Ranks | None = None,
        task: str = "",
    ) -> None:
        check_lengths(model.config, samples)
        _check_chunks(samples, configs)
        self.samples, self.configs = samples, {DENSE: dense_config(model), **configs}
        hashes = {name: _config_sha256(config) for name, config in self.configs.items()}
        self.wanted: dict[tuple[str, str], dict[str, str]] = {}
        """By configuration and sample id, samples in the order in which they are measured: hashes that tell whether a
        stored result is of both."""
        for sample in (sample for group in by_document(samples) for sample in group):
            made_of = sample.sha256()
            for name in self.configs:
                if name == DENSE or sample.mode != NO_CONTEXT:
                    self.wanted[name, sample.id] = {"sample_sha256": made_of, "config_sha256": hashes[name]}
        self._model, self._commit = model, commit()
        self.ranks, self._task = ranks or Ranks(), task

    def line_ids(self) -> list[str]:
        """Of all results, in order."""
        return ["|".join(key) for key in self.wanted]

    def missing(self, lines: SampleLines) -> dict[str, list[str]]:
        """Names of the configurations whose result is not there, by sample id.

        Raises:
            InputError: results of something else.
        """
        names: dict[str, list[str]] = {}
        for (name, sample_id), made_of in self.wanted.items():
            if not lines.holds(f"{name}|{sample_id}", made_of):
                names.setdefault(sample_id, []).append(name)
        return names

    def lines(self, samples: Sequence[Sample], names: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Any]]:
        """Measure: id and line of each result. Other ranks of the model are told to take part."""
        self.ranks.share(Work(self._task, {sample.id: list(names[sample.id]) for sample in samples}))
        for sample, outcomes in self.outcomes(samples, names):
            for name, outcome in outcomes.items():
                line: dict[str, Any] = {"config": name, "task": sample.task, "mode": sample.mode, "half": sample.half}
                line |= {"seed": sample.seed, "budget_tokens": sample.budget_tokens, "num_tokens": sample.num_tokens}
                line |= {"facts": dict(sample.facts), "commit": self._commit}
                yield f"{name}|{sample.id}", line | self.wanted[name, sample.id] | outcome

    def outcomes(
        self, samples: Sequence[Sample], names: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[Sample, dict[str, dict[str, Any]]]]:
        """What configurations make of each sample, by name; all ranks of the model must ask for the same."""
        return outcomes_of(self._prefill, samples, names, self._scorers)

    def results(self, lines: SampleLines) -> Results:
        """All of them, when nothing is missing."""
        return {key: lines.known["|".join(key)] for key in self.wanted}

    @cached_property
    def _scorers(self) -> dict[str, SparseScorer]:
        return {
            name: SparseScorer(self._model, config, softmax_dtype=torch.float32, ranks=self.ranks)
            for name, config in self.configs.items()
            if config.chunk_tokens is not None
        }

    @cached_property
    def _prefill(self) -> SharedPrefill:
        shared = {name: config for name, config in self.configs.items() if name not in self._scorers}
        return SharedPrefill(self._model, shared)


def facts_of(model: PreTrainedModel, model_name: str) -> dict[str, Any]:
    """What made the results: the first line of their file."""
    facts = {"format": FORMAT, "model": model_facts(model, model_name), "held_back_tokens": HELD_BACK_TOKENS}
    return facts | {"versions": versions()}


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
        model, samples, configs: see `Measurement`.
        out: JSON lines, made if it is not there.
        model_name: for people.
        essay: name and hash of the text that documents are made of.
        has_progress: draw a bar on stderr.
    Returns:
        JSON-able: versions, commit, model, configurations and `rows`, see `evals.tasks.summary`.
    Raises:
        InputError: samples that are too long for the model or for a bounded prefill, or a file of other results.
    """
    measurement = Measurement(model, samples, configs)
    parts = sample_parts(out, measurement.line_ids)
    return measured(measurement, parts, facts_of(model, model_name), essay=essay, has_progress=has_progress)


def measured(
    measurement: Measurement,
    parts: PartFiles,
    facts: Mapping[str, Any],
    *,
    essay: Mapping[str, str],
    has_progress: bool = True,
) -> dict[str, Any]:
    """What `run` does, with parts that several processes may have left, and facts as of `facts_of`."""
    samples, configs = measurement.samples, measurement.configs
    with SampleLines(parts, facts) as lines:
        names = measurement.missing(lines)
        total, num_missing = len(measurement.wanted), sum(map(len, names.values()))
        with tqdm(total=total, initial=total - num_missing, disable=not has_progress, desc="Samples") as bar:
            for line_id, line in measurement.lines([sample for sample in samples if sample.id in names], names):
                lines.add(line_id, line)
                bar.update()
        results = measurement.results(lines)
    return {
        **facts,
        "kind": "tasks",
        "intervals": INTERVALS,
        "prompts": SCORED_TEXTS,
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


def _config_sha256(config: skv.SparseKVConfig) -> str:
    options = json.dumps(config.to_dict(must_be_registered=False), sort_keys=True)
    return hashlib.sha256(options.encode()).hexdigest()


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
