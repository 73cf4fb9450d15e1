"""Prefill and decode tokens per second of one model on several GPUs, against the same on one.

    python evals/parallel_speed.py --tp 1 --json tp1.json
    torchrun --nproc-per-node 2 evals/parallel_speed.py --tp 2 --json tp2.json
    python evals/parallel_speed.py --compare tp1.json tp2.json

Weights are random, made on the devices. Prefill is a closed loop of prompts with one output token each. Decode is
timed over `--steps` steps in which all requests that fit decode; then some more steps are profiled, on rank 0, for the
part of the time in which a collective is running there, which includes waiting for the other ranks. A case that cannot
run, such as a model that one GPU does not hold, gives its error in place of figures; the file is written after each.
What fails in the middle of a step ends all processes: run what is left with `--shape` and `--kind`, or without graphs
(`--no-cuda-graphs`) or compilation (`--no-compile`).

On CPUs: torchrun --nproc-per-node 2 evals/parallel_speed.py --tp 2 --device cpu --shape tiny --concurrency 2
--input-len 64 --steps 8 --kv-memory 8000000
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

import hf_sparsekv as skv
from hf_sparsekv.bench.machine import provenance
from hf_sparsekv.bench.program import at_least, ended
from hf_sparsekv.bench.report import busy_share, rates
from hf_sparsekv.bench.shapes import SHAPES, dummy_model, shape_config
from hf_sparsekv.bench.sharded import sharded_dummy_model
from hf_sparsekv.bench.workload import Workload, run_closed_loop
from hf_sparsekv.cli.bench_options import check_writable
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.hf.sharding import check_tp_size
from hf_sparsekv.parallel.group import join_replica, leave_replica
from hf_sparsekv.parallel.place import Place

PREFILL_REQUESTS = 8
PROFILED_STEPS = 8
SETTLE_STEPS = 3
COLLECTIVES = ("nccl", "gloo:")


def main() -> None:
    """Run every case, or compare two files."""
    options = parse()
    if options.compare:
        print(comparison(*map(read, options.compare)))
        return
    check_writable(options.json)
    place = Place.of_environment(options.tp)
    if place.num_replicas > 1:
        sys.exit(f"start {options.tp} processes for --tp {options.tp}: got {place.world_size}")
    mesh = join_replica(place, options.device)
    device = torch.device(options.device, place.local_rank) if options.device == "cuda" else torch.device("cpu")
    report: dict[str, Any] = {"kind": "parallel", "tp": options.tp, **provenance(device), "runs": []}
    for shape in options.shape:
        for run in runs_of(shape, options, place, mesh, device):
            report["runs"].append(run)
            if place.rank == 0:
                print(summary(run), flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        free(device)
    leave_replica()


def runs_of(shape: str, options: argparse.Namespace, place: Place, mesh: Any, device: torch.device) -> Any:
    """Figures of one model: every kind and concurrency."""
    config = shape_config(shape)
    begin = time.perf_counter()
    try:
        check_tp_size(config, options.tp)
        if mesh is None:
            model = dummy_model(config, dtype=options.dtype, device=str(device))
        else:
            model = sharded_dummy_model(config, mesh, dtype=options.dtype, device=device)
    except (torch.OutOfMemoryError, skv.SparseKVError) as error:
        yield {"shape": shape, "error": first_line(error)}
        return
    facts = {
        "shape": shape,
        "made_in_s": time.perf_counter() - begin,
        "weight_bytes_of_rank": sum(local(p).nbytes for p in model.parameters()),
    }
    for kind in options.kind:
        for run in cases_of(model, kind, options, place, device):
            yield {**facts, "kind": kind, **run}
        free(device)


def cases_of(model: Any, kind: str, options: argparse.Namespace, place: Place, device: torch.device) -> Any:
    """Figures of one kind of cache; on ranks other than 0 there are none, they take part."""
    method = skv.SparseKVConfig(num_full_layers=options.num_full_layers, budget=options.budget)
    if kind == "dense":
        method = skv.SparseKVConfig(num_full_layers=model_shape(model.config).num_layers)
    longest = max(options.concurrency) * 2 + options.steps + PROFILED_STEPS + 64
    engine_options = skv.EngineConfig(
        kv_memory_bytes=options.kv_memory,
        max_num_seqs=max(options.concurrency),
        max_batch_tokens=max(options.input_len, options.max_batch_tokens),
        max_model_len=options.input_len + longest,
        cuda_graphs=False if options.no_cuda_graphs else None,
        compile=False if options.no_compile else None,
    )
    try:
        engine = skv.Engine(model, method, engine_options)
    except (torch.OutOfMemoryError, skv.SparseKVError) as error:
        yield {"error": first_line(error)}
        return
    with engine:
        if place.rank:
            engine.follow()  # type: ignore[attr-defined]  # a follower's
            return
        shared = {"method": method.to_dict(), "engine_options": asdict(engine_options), "memory": sizes(engine)}
        for concurrency in options.concurrency:
            try:
                yield {**shared, "concurrency": concurrency, **measured(engine, options, concurrency, longest, device)}
            except skv.RequestError as error:
                yield {**shared, "concurrency": concurrency, "error": first_line(error)}
            except Exception:
                traceback.print_exc()
                if place.world_size > 1:
                    os._exit(1)  # the others wait in a collective: let the launcher end them
                raise


def measured(
    engine: skv.Engine, options: argparse.Namespace, concurrency: int, longest: int, device: torch.device
) -> dict[str, Any]:
    """Prefill, then decode, of one concurrency."""
    vocab_size = engine.model.config.vocab_size
    prompts = Workload(input_len=options.input_len, output_len=1, vocab_size=vocab_size)
    run_closed_loop(engine, prompts.warmup, concurrency=2, num_requests=2)
    engine.forget_prefixes()  # of an earlier case, whose prompts were the same
    prefill = run_closed_loop(engine, prompts, concurrency=concurrency, num_requests=max(PREFILL_REQUESTS, concurrency))
    long = Workload(input_len=options.input_len, output_len=longest, vocab_size=vocab_size)
    names = [engine.add_request(long.prompt(index), long.params) for index in range(concurrency)]
    decoding: set[str] = set()
    idle = 0
    while len(decoding) < concurrency and idle < SETTLE_STEPS + options.input_len // engine.options.max_batch_tokens:
        before = len(decoding)
        decoding |= {output.request_id for output in engine.step()}
        idle = idle + 1 if decoding and len(decoding) == before else 0
    for _ in range(SETTLE_STEPS):
        engine.step()
    synchronize(device)
    begin, tokens = time.perf_counter(), 0
    for _ in range(options.steps):
        tokens += sum(len(output.new_token_ids) for output in engine.step())
    synchronize(device)
    seconds = time.perf_counter() - begin
    share = collective_share(engine, device)
    for name in names:
        engine.abort(name)
    while engine.has_unfinished:
        engine.step()
    rate = rates(prefill, prefill.begin_s, prefill.end_s)
    return {
        "prefill_tokens_per_s": rate["prompt_tokens_per_s"],
        "prefill_requests": len(prefill.requests),
        "num_decoding": len(decoding),
        "decode_tokens_per_s": tokens / seconds,
        "decode_step_s": seconds / options.steps,
        "decode_steps": options.steps,
        "preemptions": engine.metrics.snapshot()["preemptions"],
        "collectives": share,
    }


def collective_share(engine: skv.Engine, device: torch.device) -> dict[str, Any] | None:
    """Part of some decode steps in which a collective runs on this rank; None without any event."""
    on_gpu = device.type == "cuda"
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.step()
        synchronize(device)
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if not on_gpu or (event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False))
    ]
    if not events:
        return None
    begin, end = min(start for _, start, _ in events), max(stop for _, _, stop in events)
    ours = [(start, stop) for name, start, stop in events if name.lower().startswith(COLLECTIVES)]
    return {
        "share": busy_share(ours, begin, end),
        "busy_share": busy_share([(start, stop) for _, start, stop in events], begin, end),
        "step_s": (end - begin) / 1e6 / PROFILED_STEPS,
        "per_step": len(ours) / PROFILED_STEPS,
        "num_steps": PROFILED_STEPS,
    }


def sizes(engine: skv.Engine) -> dict[str, int]:
    """The memory plan of a rank, in numbers."""
    memory = engine.memory
    return {
        "num_blocks": memory.num_blocks,
        "block_bytes": memory.block_bytes,
        "num_rows": memory.num_rows,
        "row_bytes": memory.row_bytes,
        "requests_that_fit": min(memory.num_rows, memory.concurrent(memory.layers, memory.max_model_len)),
    }


def summary(run: dict[str, Any]) -> str:
    """One line about a case."""
    name = f"{run['shape']} {run.get('kind', '')} c={run.get('concurrency', '-')}"
    if "error" in run:
        return f"{name}: {run['error']}"
    collectives = run["collectives"]
    share = "-" if collectives is None else f"{collectives['share']:.0%}"
    return (
        f"{name}: prefill {run['prefill_tokens_per_s']:,.0f} tok/s, decode {run['decode_tokens_per_s']:,.0f} tok/s "
        f"({run['num_decoding']} at {1000 * run['decode_step_s']:.2f} ms a step, {share} in collectives)"
    )


def comparison(*reports: dict[str, Any]) -> str:
    """Cases of several files side by side, in tokens per second."""
    lines = ["shape, cache, c: " + " | ".join(f"tp={report['tp']} prefill, decode" for report in reports)]
    by_case: dict[tuple[Any, ...], list[str]] = {}
    for place, report in enumerate(reports):
        for run in report["runs"]:
            if "concurrency" not in run:
                lines.append(f"tp={report['tp']}: {summary(run)}")
                continue
            case = (run["shape"], run["kind"], run["concurrency"])
            figures = (
                "-"
                if "error" in run
                else f"{run['prefill_tokens_per_s']:,.0f}, {run['decode_tokens_per_s']:,.0f} ({run['num_decoding']})"
            )
            by_case.setdefault(case, ["-"] * len(reports))[place] = figures
    return "\n".join([*lines, *(f"{', '.join(map(str, case))}: {' | '.join(row)}" for case, row in by_case.items())])


def read(path: Path) -> dict[str, Any]:
    """A file of `--json`."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if report["kind"] == "parallel":
            return report
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise skv.InputError(f"cannot read {path} as figures of this program: {error}") from error
    raise skv.InputError(f"{path} has figures of another program: give a file of its --json")


def local(tensor: Any) -> torch.Tensor:
    """A parameter's part on this rank."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def free(device: torch.device) -> None:
    """Give back what the last model or engine left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=at_least(1), default=1, help="processes that share the model")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="default: llama3-8b and llama3-70b")
    parser.add_argument("--kind", action="append", choices=["sparse", "dense"], help="default: both")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[10, 20, 64])
    parser.add_argument("--input-len", type=at_least(1), default=4000)
    parser.add_argument("--steps", type=at_least(1), default=64, help="decode steps that are timed")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--num-full-layers", type=int, default=3)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--kv-memory", type=int, help="bytes of the cache on each GPU; default what is free")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE")
    options = parser.parse_args()
    options.shape = options.shape or ["llama3-8b-shape", "llama3-70b-shape"]
    options.kind = options.kind or ["sparse", "dense"]
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return options


if __name__ == "__main__":
    sys.exit(ended(main))
