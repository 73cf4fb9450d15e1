"""Decode modes over long texts: the beginning is a prompt, and all that follows is decoded, token by token.

    python -m evals.decode_modes --tasks needle --lengths 1024 --decoded 640 --budgets 128,256 --json out.json

What `replace_lowest`, `ring` and `grow` do, and the share of the budget that a prompt holds, shows only when more is
decoded than the budget holds. Samples are those of the offline tasks; their last tokens before the answer are fed as if
the model had written them. So a fact that is told there is evidence that came late: it has no prompt's selection to
keep it. Two things are measured: the answers, and how well the decoded tokens themselves were predicted. Samples of a
task go as one batch.

Shapes: B sample, T decoded token, V vocabulary.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from tqdm import trange
from transformers import PreTrainedModel

import hf_sparsekv as skv
from evals.budget_shapes import essay_samples, value_of
from evals.tasks.essay import SOURCES
from evals.tasks.provenance import SCORED_TEXTS, model_facts, versions
from evals.tasks.samples import AGNOSTIC, NLL, Sample
from evals.tasks.stats import mean_interval, perplexity, share, share_difference
from hf_sparsekv.bench.machine import commit
from hf_sparsekv.bench.program import at_least, ended
from hf_sparsekv.cli.bench_options import check_writable
from hf_sparsekv.cli.loading import load_weights, open_model
from hf_sparsekv.errors import InputError
from hf_sparsekv.hf.models import text_config
from hf_sparsekv.models_store import BUILTIN_ALIAS
from hf_sparsekv.scorers.base import DECODE_MODES

DENSE, REPLACE = "dense", "replace_lowest"
IN_PROMPT, WHILE_DECODING = "answers, told in the prompt", "answers, told while decoding"
ANSWERS, DECODED_TEXT = "answers", "decoded text"
_MODES = ("decode", "prompt_share")


@dataclass(frozen=True)
class Decoded:
    """One configuration on one batch."""

    values: list[float]
    """Of each sample, see `value_of`."""
    text_nll: list[float]
    """Of each sample's decoded tokens, in nats a token."""
    cache_bytes: int
    """Of the whole batch, at the end."""


def configs_of(
    num_layers: int, budgets: Sequence[int], shares: Sequence[float], options: dict[str, Any]
) -> dict[str, skv.SparseKVConfig]:
    """The dense cache, then every mode at every budget, `replace_lowest` with each share of the prompt."""
    found = {DENSE: skv.SparseKVConfig(num_full_layers=num_layers)}
    for budget in budgets:
        base = skv.SparseKVConfig(budget=budget, **options)
        for part in shares:
            found[f"{REPLACE} {part:g}-{budget}"] = base.with_(decode=REPLACE, prompt_share=part)
        found |= {f"{mode}-{budget}": base.with_(decode=mode) for mode in DECODE_MODES if mode != REPLACE}
    return found


def told_while_decoding(sample: Sample, num_decoded: int) -> bool | None:
    """Whether a sample's fact is among the decoded tokens; None where there is no such fact."""
    if "depth" not in sample.facts:
        return None
    return float(sample.facts["depth"]) * len(sample.document) >= len(_text_of(sample)) - num_decoded


def decode(model: PreTrainedModel, config: skv.SparseKVConfig, samples: Sequence[Sample], num_decoded: int) -> Decoded:
    """Read the samples' beginnings as prompts, then decode `num_decoded` tokens of each, and its answer.

    Raises:
        InputError: a sample that is all decoded, without a prompt.
    """
    texts = [_text_of(sample) for sample in samples]
    if min(map(len, texts)) <= num_decoded:
        raise InputError(f"--decoded {num_decoded} of {min(map(len, texts))} tokens leaves no prompt: decode fewer")
    answers = [sample.continuations[0] for sample in samples]
    num_steps = num_decoded + max(map(len, answers)) - 1
    rest = [text[-num_decoded:] + answer[:-1] for text, answer in zip(texts, answers, strict=True)]
    fed_BT = torch.tensor([tokens + (tokens[-1],) * (num_steps - len(tokens)) for tokens in rest], device=model.device)
    prompts = [text[:-num_decoded] for text in texts]
    width = max(map(len, prompts))
    padded = [(0,) * (width - len(prompt)) + tuple(prompt) for prompt in prompts]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    cache = skv.SparseKVCache(model.config, config, prompt_length=width)
    logits: list[list[Tensor]] = [[] for _ in samples]
    text_nll = []
    with torch.inference_mode():
        logits_BV = _step(model, cache, torch.tensor(padded, device=model.device), mask)
        for step in trange(num_steps, desc="Tokens", leave=False):
            if step < num_decoded:
                text_nll.append(torch.nn.functional.cross_entropy(logits_BV.float(), fed_BT[:, step], reduction="none"))
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            logits_BV = _step(model, cache, fed_BT[:, step : step + 1], mask)
            for row, answer in enumerate(answers):
                if num_decoded - 1 <= step < num_decoded - 1 + len(answer):
                    logits[row].append(logits_BV[row])
    values = [value_of(s, torch.stack(one), answer) for s, one, answer in zip(samples, logits, answers, strict=True)]
    return Decoded(values, torch.stack(text_nll).mean(dim=0).tolist(), cache.nbytes)


def _text_of(sample: Sample) -> tuple[int, ...]:
    """All that comes before the answer."""
    return sample.document + sample.question


def _step(model: PreTrainedModel, cache: skv.SparseKVCache, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits [B, V] after one forward pass."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, skv.CACHE_KEYWORD: cache}
    logits: Tensor = model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits


def rows_of(
    samples: Sequence[Sample], found: dict[str, Decoded], configs: dict[str, skv.SparseKVConfig], num_decoded: int
) -> list[dict[str, Any]]:
    """JSON-able: for each measure (see the constants) and configuration the figure, and its difference to dense."""
    names = {None: ANSWERS, True: WHILE_DECODING, False: IN_PROMPT}
    told = [told_while_decoding(sample, num_decoded) for sample in samples]
    rows = []
    for place in dict.fromkeys(told):
        members = [i for i, one in enumerate(told) if one == place]
        rows += [
            {"task": samples[0].task, "measure": names[place], "config": name}
            | _facts_of(name, found, configs)
            | _figures(found[name].values, found[DENSE].values, members, is_nll=samples[0].scorer == NLL)
            for name in found
        ]
    everything = range(len(samples))
    rows += [
        {"task": samples[0].task, "measure": DECODED_TEXT, "config": name}
        | _facts_of(name, found, configs)
        | _figures(found[name].text_nll, found[DENSE].text_nll, everything, is_nll=True)
        for name in found
    ]
    return rows


def _facts_of(name: str, found: dict[str, Decoded], configs: dict[str, skv.SparseKVConfig]) -> dict[str, Any]:
    in_force = configs[name].effective()
    modes = {"decode": None, "prompt_share": None} if name == DENSE else {k: in_force[k] for k in _MODES}
    return modes | {"cache_bytes": found[name].cache_bytes, "dense_cache_bytes": found[DENSE].cache_bytes}


def _figures(
    values: Sequence[float], dense: Sequence[float], members: Sequence[int], *, is_nll: bool
) -> dict[str, Any]:
    """A share of right answers, or a perplexity, with its paired difference from the dense cache."""
    own, base = (np.array(one)[list(members)] for one in (values, dense))
    if is_nll:
        figures = {"perplexity": perplexity(own), "nll_difference": mean_interval(own - base)}
    else:
        figures = {"accuracy": share(own), "difference": share_difference(np.stack([base, own], axis=1))}
    return {"num_samples": len(members)} | {name: interval.to_dict() for name, interval in figures.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, write."""
    args = _parser().parse_args(arguments)
    return ended(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> None:
    console = Console(stderr=True)
    check_writable(args.json)
    source = open_model(args.model, trust_remote_code=False, console=console)
    grid = {"lengths": args.lengths, "seeds": args.seeds, "modes": [AGNOSTIC]}
    essay, samples = essay_samples(source, console, tasks=args.tasks, essay=args.essay, **grid)
    # Before the weights are read: a wrong option costs no time then.
    configs = configs_of(
        text_config(source.config).num_hidden_layers, args.budgets, args.shares, {"scorer": args.scorer}
    )
    model = load_weights(source, dtype=args.dtype, device=args.device, console=console)
    skv.register()
    model.set_attn_implementation("sparsekv")
    facts: dict[str, Any] = {
        "kind": "decode_modes",
        "command": "python -m evals.decode_modes " + " ".join(sys.argv[1:]),
    }
    facts |= {"commit": commit(), "versions": versions(), "prompts": SCORED_TEXTS, "num_decoded": args.decoded}
    facts |= {"model": model_facts(model, args.model), "configs": {n: c.to_dict() for n, c in configs.items()}}
    facts |= {"essay": {"name": essay.essay.name, "sha256": essay.essay.sha256}}
    finished: list[dict[str, Any]] = []
    groups = {(s.task, s.budget_tokens) for s in samples}
    for task, length in sorted(groups):
        batch = [s for s in samples if (s.task, s.budget_tokens) == (task, length)]
        found: dict[str, Decoded] = {}
        rows: list[dict[str, Any]] = []
        for name, config in configs.items():
            console.print(f"{task}, {length} tokens, {name}, {len(batch)} samples")
            found[name] = decode(model, config, batch, args.decoded)
            rows = [{"budget_tokens": length} | row for row in rows_of(batch, found, configs, args.decoded)]
            # After each configuration, which may have taken minutes: what an interrupt leaves is whole.
            text = json.dumps(facts | {"rows": finished + rows}, indent=1)
            args.json.write_text(text + "\n", encoding="utf-8")
        finished += rows
    console.print(f"written to {args.json}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evals.decode_modes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def fractions(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser.add_argument("--model", default=BUILTIN_ALIAS, help="built-in alias, folder or hub id")
    parser.add_argument("--tasks", default="needle,perplexity")
    parser.add_argument("--lengths", type=numbers, default=[1024])
    parser.add_argument("--seeds", type=numbers, default=[1, 3], help="odd ones read the half of the report")
    parser.add_argument("--decoded", type=at_least(1), default=640, help="tokens before the answer that are decoded")
    parser.add_argument("--budgets", type=numbers, default=[128, 256])
    parser.add_argument(
        "--shares", type=fractions, default=[0.0, 0.25, 0.5, 0.75], help="of the free budget that a prompt holds"
    )
    parser.add_argument("--scorer", default="hybrid")
    parser.add_argument("--essay", choices=SOURCES, default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
