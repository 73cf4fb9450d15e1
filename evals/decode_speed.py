"""Prefill, decode and memory of one request: the sparse cache against transformers' dense cache, in one run.

    python -m evals.decode_speed --context 4096 --budget 512                 the built-in model on this machine
    python -m evals.decode_speed --shape llama3-8b-shape --device cuda       random weights, on a GPU

Both caches get the same random token ids. Each figure is the median of `--repeats` runs after one that is not counted;
the two caches take turns, so that a slow moment of the machine hits both. The figures of every run are
kept. Scoring is timed around the selection of every window layer; its extra memory is the allocator's peak above what
was held before, in a run of its own.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache

import hf_sparsekv as skv
from hf_sparsekv.attention import forward
from hf_sparsekv.bench.machine import commit
from hf_sparsekv.bench.program import at_least, ended
from hf_sparsekv.bench.shapes import SHAPES, dummy_model, shape_config
from hf_sparsekv.cli.bench_options import check_writable
from hf_sparsekv.cli.loading import DTYPES, pick_device, pick_dtype
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.models_store import resolve_model

forward_module: Any = forward
"""A name is replaced in it for a while."""


class Scoring:
    """Time and extra memory of selections, taken around `finish_prompt`."""

    def __init__(self, device: str) -> None:
        self.seconds, self.extra_bytes, self._device = 0.0, 0, device

    @contextmanager
    def watched(self, *, memory: bool) -> Iterator[None]:
        """Watch every selection inside; memory sampling slows them, so take time and memory in separate runs."""
        original = forward_module.finish_prompt

        def timed(layer: Any, scale: float) -> None:
            synchronize(self._device)
            start = time.perf_counter()
            with peak_memory(self._device) if memory else no_peak() as peak:
                original(layer, scale)
                synchronize(self._device)
            self.seconds += time.perf_counter() - start
            self.extra_bytes = max(self.extra_bytes, peak[0])

        forward_module.finish_prompt = timed
        try:
            yield
        finally:
            forward_module.finish_prompt = original


@contextmanager
def no_peak() -> Iterator[list[int]]:
    """Where memory is not asked for."""
    yield [0]


@contextmanager
def peak_memory(device: str) -> Iterator[list[int]]:
    """The list's entry becomes the highest extra memory in bytes while inside."""
    result = [0]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield result
        result[0] = torch.cuda.max_memory_allocated() - before
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield result
    held = highest = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    result[0] = highest


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock means something."""
    if device == "cuda":
        torch.cuda.synchronize()


def load(args: argparse.Namespace) -> Any:
    """The model: built in, from a folder, or random weights of a shape."""
    dtype = pick_dtype(args.dtype or "auto", args.device)
    if args.shape is not None:
        return dummy_model(shape_config(args.shape), dtype=dtype, device=args.device, seed=args.seed)
    path = resolve_model(args.model, allow_fetch=True).path_or_id
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(args.device).eval()


def one_run(model: Any, ids: torch.Tensor, cache: Any, new_tokens: int, device: str) -> dict[str, float]:
    """Prefill and greedy decode steps, timed."""
    synchronize(device)
    start = time.perf_counter()
    with torch.no_grad():
        token = (
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache}).logits[:, -1:].argmax(-1)
        )
        synchronize(device)
        prefilled = time.perf_counter()
        for _ in range(new_tokens):
            token = model(input_ids=token, use_cache=True, **{CACHE_KEYWORD: cache}).logits[:, -1:].argmax(-1)
        synchronize(device)
    return {"prefill_s": prefilled - start, "decode_s": time.perf_counter() - prefilled}


def take_turns(model: Any, ids: torch.Tensor, config: skv.SparseKVConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Every run of both caches and of the scoring, and what the last of each held."""
    runs: dict[str, list[dict[str, float]]] = {"dense": [], "sparse": []}
    scoring_seconds = []
    bar = tqdm(total=2 * (args.repeats + 1) + 1, unit="run", desc=f"{args.context} tokens")  # on stderr
    for repeat in range(args.repeats + 1):
        bar.set_postfix_str("dense" if repeat else "dense, warming up")
        model.set_attn_implementation("sdpa")
        dense_cache = DynamicCache(config=model.config)
        dense = one_run(model, ids, dense_cache, args.new_tokens, args.device)
        layers: Any = dense_cache.layers
        dense_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        del dense_cache, layers
        bar.update()
        bar.set_postfix_str("sparse" if repeat else "sparse, warming up")
        model.set_attn_implementation("sparsekv")
        cache, scoring = skv.SparseKVCache(model.config, config, prompt_length=args.context), Scoring(args.device)
        with scoring.watched(memory=False):
            sparse = one_run(model, ids, cache, args.new_tokens, args.device)
        bar.update()
        if repeat:  # the first run warms up
            runs["dense"].append(dense)
            runs["sparse"].append(sparse)
            scoring_seconds.append(scoring.seconds)
    bar.set_postfix_str("memory of scoring")
    memory = Scoring(args.device)
    with memory.watched(memory=True):
        one_run(model, ids, skv.SparseKVCache(model.config, config, prompt_length=args.context), 1, args.device)
    bar.update()
    bar.close()
    return {
        "runs": {**runs, "scoring_s": scoring_seconds},
        "scoring_extra_bytes": memory.extra_bytes,
        "cache_bytes": cache.nbytes,
        "planned_bytes": cache.plan.total_bytes(
            args.context + args.new_tokens, element_bytes=model.dtype.itemsize, prompt_length=args.context
        ),
        "dense_cache_bytes": dense_bytes,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every figure of the report."""
    torch.manual_seed(args.seed)
    model = load(args)
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(0, model.config.vocab_size, (1, args.context), generator=generator).to(args.device)
    config = skv.SparseKVConfig(num_full_layers=args.num_full_layers, budget=args.budget, scorer=args.scorer)
    skv.register()
    taken = take_turns(model, ids, config, args)
    medians = {
        name: {
            "prefill_s": statistics.median(run["prefill_s"] for run in taken["runs"][name]),
            "decode_tokens_per_s": args.new_tokens / statistics.median(run["decode_s"] for run in taken["runs"][name]),
        }
        for name in ("dense", "sparse")
    }
    scoring_s = statistics.median(taken["runs"]["scoring_s"])
    return {
        **medians,
        "decode_speedup": medians["sparse"]["decode_tokens_per_s"] / medians["dense"]["decode_tokens_per_s"],
        "scoring_s": scoring_s,
        "scoring_share_of_dense_prefill": scoring_s / medians["dense"]["prefill_s"],
        **taken,
        "settings": vars(args),
        "commit": commit(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_sparsekv": skv.__version__,
        },
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
    }


def main() -> None:
    """Parse, measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="built-in alias, folder or hub id")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape in place of a model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--context", type=at_least(1), default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--num-full-layers", type=int, default=3)
    parser.add_argument("--scorer", default="snapkv")
    parser.add_argument("--new-tokens", type=at_least(1), default=32)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the token ids, and of random weights")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    check_writable(args.json)
    pick_device(args.device)
    result = measure(args)
    result["settings"] = {name: str(v) if isinstance(v, Path) else v for name, v in result["settings"].items()}
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(ended(main))
