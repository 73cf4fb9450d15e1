"""What a decode step of `generate` takes: plain, by CUDA graphs, and transformers' own with its dense cache.

    python -m evals.generate_speed --json evals/results/generate_speed_h200.json      on a GPU, under a minute
    python -m evals.generate_speed --compile --json ...                 with compiled layers too, which compile first
    python -m evals.generate_speed --model tiny --device cpu --prompt 200 --batch-sizes 1 --repeats 1

Weights and prompts are random, decoding is greedy, no token ends it. A step's time is the difference of a run of all
new tokens and one of a single token, which is all prefill. With graphs it is that of all and of half of the tokens,
which both capture once; what the warm-up and the capture take is given apart. The kinds take turns, and the median of
the repeats counts, after a round that is not counted; transformers' own has one. `replay_ms` is from the launch of a
replayed step to its end, without transformers' loop around it.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import hf_sparsekv as skv
from hf_sparsekv.bench.machine import provenance
from hf_sparsekv.bench.program import at_least, ended
from hf_sparsekv.bench.shapes import dummy_model, shape_config
from hf_sparsekv.cli.bench_options import check_writable
from hf_sparsekv.cli.loading import pick_device
from hf_sparsekv.hf import graphs

FEWEST_TOKENS = 8
"""Half of them has to be more than what warms up and is captured."""
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {"cuda_graphs": False},
    "graphs": {"cuda_graphs": True},
    "compiled": {"cuda_graphs": True, "compile": True},
}


def timed(run: Any, device: torch.device) -> tuple[float, Any]:
    """Seconds, and what it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


class ReplayClock:
    """Times single replays on the GPU while inside."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, Any]] = []
        self._original = graphs.Launches.run

    def __enter__(self) -> "ReplayClock":
        clock, original = self, self._original

        def run(launches: Any, body: Any, workspace: Any) -> Any:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            result = original(launches, body, workspace)
            events[1].record()
            clock.events.append((events[0], events[1]))
            return result

        graphs.Launches.run = run  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        graphs.Launches.run = self._original  # type: ignore[method-assign]

    def median_ms(self) -> float:
        """Of all steps but the first two, which warm up and capture."""
        torch.cuda.synchronize()
        return float(statistics.median(first.elapsed_time(last) for first, last in self.events[2:]))


def measure(model: Any, batch_size: int, args: argparse.Namespace, config: skv.SparseKVConfig) -> dict[str, Any]:
    """All kinds at one batch size."""
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(0, model.config.vocab_size, (batch_size, args.prompt), generator=generator).to(model.device)
    ends: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole, half = args.new_tokens, args.new_tokens // 2

    def one(kind: str, count: int) -> Any:
        if kind == "transformers":
            return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **ends)
        return skv.generate(model, ids, config, **CHOICES[kind], max_new_tokens=count, **ends)

    captures = [] if model.device.type != "cuda" else ["graphs", "compiled"] if args.compile else ["graphs"]
    kinds = ["plain", *captures, *(["transformers"] if batch_size == args.batch_sizes[0] else [])]
    lengths = {kind: (1, half, whole) if kind in captures else (1, whole) for kind in kinds}
    seconds: dict[str, dict[int, list[float]]] = {kind: {count: [] for count in lengths[kind]} for kind in kinds}
    tokens, held = {}, {}
    for repeat in tqdm(range(args.repeats + 1), desc=f"batch of {batch_size}", unit="round"):
        for kind in kinds:
            if kind == "transformers" and repeat > 1:
                continue  # once, after its warm-up
            for count in lengths[kind] if repeat else (8,):
                took, out = timed(lambda kind=kind, count=count: one(kind, count), model.device)
                if repeat:
                    seconds[kind][count].append(took)
            if kind != "transformers":
                tokens[kind], held[kind] = out.new_tokens, out.report["cache_bytes"]
    result: dict[str, Any] = {"batch_size": batch_size}
    for kind in kinds:
        median = {count: statistics.median(values) for count, values in seconds[kind].items()}
        before = lengths[kind][-2]
        result[kind] = {
            "step_ms": 1000 * (median[whole] - median[before]) / (whole - before),
            "first_token_s": median[1],
            "total_s": median[whole],
            "seconds": {str(count): values for count, values in seconds[kind].items()},
        }
        if kind in held:
            result[kind]["cache_bytes"] = held[kind]
    for kind in captures:
        step, figures = result[kind]["step_ms"] / 1000, result[kind]
        figures["warm_up_and_capture_s"] = figures["total_s"] - figures["first_token_s"] - (whole - 1) * step
        figures["first_tokens_as_plain"] = int((tokens["plain"] == tokens[kind]).all(0).cumprod(0).sum())
        with ReplayClock() as clock:
            one(kind, whole)
        figures["replay_ms"] = clock.median_ms()
    return result


def main() -> None:
    """Parse, measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b-shape", help="a shape of hf_sparsekv.bench")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--prompt", type=at_least(1), default=4000)
    parser.add_argument("--new-tokens", type=at_least(FEWEST_TOKENS), default=128)
    parser.add_argument("--batch-sizes", type=at_least(1), nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=at_least(1), default=2)
    parser.add_argument("--compile", action="store_true", help="measure compiled layers too")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--num-full-layers", type=int, default=3)
    parser.add_argument("--scorer", default="snapkv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    check_writable(args.json)
    pick_device(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = dummy_model(shape_config(args.model), dtype=dtype, device=args.device, seed=args.seed)
    config = skv.SparseKVConfig(num_full_layers=args.num_full_layers, budget=args.budget, scorer=args.scorer)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    result: dict[str, Any] = {"batches": [], "settings": settings, "provenance": provenance(model.device)}
    for batch_size in args.batch_sizes:
        result["batches"].append(measure(model, batch_size, args, config))
        print(json.dumps(result["batches"][-1], indent=2))
        if args.json:
            args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(ended(main))
