"""Serving figures of many engines on one model with random weights, in one process; what is there is not run again.

    python evals/serving_grid.py --list
    python evals/serving_grid.py results/ --time-limit 1500

There is a file for each method and workload, in the format of `hf-sparsekv bench --json`, so `evals/tables.py` and
`evals/plot_serving.py` read it; it is written after each of its cases. Stop it at any time: the same command goes on
where it was, and runs again only what failed. Every case makes an engine of its own, so `start` in its figures is the
time of another start in a process that has compiled the layers before, but for the first (`engines_before` is 0).

On a CPU: python evals/serving_grid.py results/ --shape tiny --device cpu --input-len 64 --output-len 4 --num-requests 2
--concurrency 2 --max-batch-tokens 512
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

import hf_sparsekv as skv
from hf_sparsekv.bench.cases import BenchPlan, describe, run_cases
from hf_sparsekv.bench.program import at_least, ended
from hf_sparsekv.bench.shapes import SHAPES, dummy_model, shape_config
from hf_sparsekv.bench.workload import Finished
from hf_sparsekv.cli.loading import pick_device

GIB = 2**30
FAILED, USAGE_ERROR = 1, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine under one load."""

    file: str
    """Name of the report, without its ending: one for each method and workload."""
    kind: str
    concurrency: int
    preset: str = "published"
    budget: int = 512
    kv_memory: int | None = None
    """Bytes; None = 90 % of the GPU."""
    num_requests: int | None = None
    """None = four for each client."""
    num_warmup: int | None = None
    """None = one for each client."""
    output_len: int = 500
    input_len: int | None = None
    """None = that of the command line."""
    prefill: str = "exact"
    num_profile_steps: int = 0
    """Decode steps whose GPU busy share is measured afterwards."""

    @property
    def name(self) -> str:
        """What the run in the report is called."""
        memory = "90%" if self.kv_memory is None else f"{self.kv_memory / GIB:g}GiB"
        return f"{self.kind} c={self.concurrency} {memory}"


def long_prompt(input_len: int, prefill: str) -> Case:
    """One prompt at a time, its first token measured."""
    file = f"long_{prefill}_{input_len // 1024}k"
    lengths: dict[str, Any] = {"input_len": input_len - 32, "output_len": 32}
    return Case(file=file, kind="sparse", preset="balanced", concurrency=1, num_requests=3, prefill=prefill, **lengths)


THREE_ROUNDS: dict[str, Any] = {"num_requests": 192, "num_warmup": 16}
ONE_ROUND: dict[str, Any] = {"num_requests": 64, "num_warmup": 4}
CROWD: dict[str, Any] = {"concurrency": 256, "num_requests": 512, "num_warmup": 16}
PROMPTS_ONLY: dict[str, Any] = {"concurrency": 64, "num_requests": 64, "num_warmup": 8, "output_len": 1}
PUBLISHED, SMALL = "serving_published_512", 5 * GIB

CASES = (
    Case(file="serving_balanced_512", kind="sparse", preset="balanced", concurrency=64, **THREE_ROUNDS),
    Case(file=PUBLISHED, kind="sparse", concurrency=64, num_profile_steps=40, **THREE_ROUNDS),
    Case(file="prefill_published_512", kind="sparse", **PROMPTS_ONLY),
    Case(file=PUBLISHED, kind="sparse", **CROWD),
    *(Case(file=PUBLISHED, kind="sparse", concurrency=c, num_warmup=4, num_profile_steps=40) for c in (10, 20)),
    *(Case(file=PUBLISHED, kind="sparse", concurrency=c, num_warmup=4, kv_memory=SMALL) for c in (10, 20)),
    Case(file=PUBLISHED, kind="sparse", concurrency=64, kv_memory=SMALL, **THREE_ROUNDS),
    *(
        Case(file=f"serving_published_{budget}", kind="sparse", budget=budget, concurrency=64, **THREE_ROUNDS)
        for budget in (256, 1024)
    ),
    *(Case(file="serving_balanced_512", kind="sparse", preset="balanced", concurrency=c) for c in (10, 20)),
    Case(file=PUBLISHED, kind="transformers", concurrency=64, num_requests=64),
    Case(file=PUBLISHED, kind="dense", concurrency=64, kv_memory=SMALL, **ONE_ROUND),
    Case(file=PUBLISHED, kind="dense", concurrency=64, **ONE_ROUND),
    Case(file=PUBLISHED, kind="dense", concurrency=10, num_requests=20, num_warmup=4),
    Case(file=PUBLISHED, kind="dense", concurrency=10, kv_memory=SMALL, num_requests=20, num_warmup=4),
    Case(file=PUBLISHED, kind="dense", concurrency=20, num_requests=40, num_warmup=4),
    Case(file=PUBLISHED, kind="dense", concurrency=20, kv_memory=SMALL, num_requests=40, num_warmup=4),
    Case(file="prefill_published_512", kind="dense", **PROMPTS_ONLY),
    Case(file=PUBLISHED, kind="dense", concurrency=256, num_requests=256, num_warmup=16),
    *(Case(file=f"serving_published_{n}", kind="sparse", budget=n, concurrency=20, num_warmup=4) for n in (256, 1024)),
    *(long_prompt(length, prefill) for length in (2**15, 2**17) for prefill in ("bounded", "exact")),
)
"""In the order in which they run."""


def main() -> None:
    """Run what is missing."""
    options = parse()
    if options.list:
        print("\n".join(f"{case.file:24} {case.name}" for case in CASES))
        return
    begin, is_missing = time.perf_counter(), False
    cases = [case for case in CASES if options.only is None or options.only in f"{case.file} {case.name}"]
    if not cases:
        refuse(f"--only {options.only!r} is in no line of --list")
    pick_device(options.device)
    options.folder.mkdir(parents=True, exist_ok=True)
    model = dummy_model(shape_config(options.shape), dtype=dtype_of(options.device), device=options.device)
    num_engines = 0
    facts = {"name": options.shape, "weights": "dummy"}
    try:
        plans = [plan_of(case, options) for case in cases]
    except skv.ConfigError as error:
        refuse(str(error))
    planned = list(zip(cases, plans, strict=True))
    reports = {case.file: read(options.folder, case, describe(model, plan, facts)) for case, plan in planned}
    for case, plan in planned:
        check_load(options.folder, case, plan, reports[case.file])
    for case, plan in planned:
        report = reports[case.file]
        if runs_of(case, report):
            print(f"{case.file}: {case.name}: there already", flush=True)
            continue
        seconds = time.perf_counter() - begin
        if options.time_limit is not None and seconds >= options.time_limit:
            print(f"{case.file}: {case.name}: not begun, {seconds:.0f} s are over", flush=True)
            is_missing = True
            continue
        run = run_case(model, plan, case) | {"engines_before": num_engines}
        num_engines += case.kind != "transformers"
        report["runs"] = [other for other in report["runs"] if other["case"] != case.name] + [run]
        write(options.folder / f"{case.file}.json", report)
        print(f"{case.file}: {case.name}: {figures_text(run)}", flush=True)
        is_missing |= "error" in run
    sys.exit(FAILED if is_missing else 0)


def plan_of(case: Case, options: argparse.Namespace) -> BenchPlan:
    """A bench of one case."""
    return BenchPlan(
        input_len=case.input_len or options.input_len,
        output_len=min(case.output_len, options.output_len),
        seed=0,
        kinds=(case.kind,),
        concurrencies=(options.concurrency or case.concurrency,),
        kv_memories=(case.kv_memory,),
        method=skv.SparseKVConfig(preset=case.preset, budget=case.budget, prefill=case.prefill),
        engine=skv.EngineConfig(max_batch_tokens=options.max_batch_tokens),
        num_requests=options.num_requests or case.num_requests,
        num_warmup=case.num_warmup,
        num_profile_steps=case.num_profile_steps,
    )


def run_case(model: PreTrainedModel, plan: BenchPlan, case: Case) -> dict[str, Any]:
    """The figures of a case, or why there are none."""
    begin = time.perf_counter()
    try:
        (run,) = run_cases(model, plan, in_silence)
    except (RuntimeError, ValueError) as error:  # such as no memory: the next case may have enough
        run = {"engine": case.kind, "concurrency": case.concurrency, "error": f"{type(error).__name__}: {error}"}
    return {"case": case.name, **run, "case_s": time.perf_counter() - begin}


def figures_text(run: dict[str, Any]) -> str:
    """A line about a run."""
    if "error" in run:
        return f"FAILED: {run['error']}"
    rates, ttft, start = run["whole"], run["ttft_s"], run.get("start")
    begun = "" if start is None else f", engine made in {start['engine_s']:.1f} s, warm-up {start['warmup_s']:.1f} s"
    tokens = f"{rates['output_tokens_per_s']:,.0f} out, {rates['prompt_tokens_per_s']:,.0f} in tok/s"
    failed = f", {run['num_failed']} FAILED: {run['first_error']}" if run["num_failed"] else ""
    return f"{tokens}, TTFT p50 {ttft['p50'] if ttft else float('nan'):.3f} s{begun}, {run['case_s']:.0f} s{failed}"


def read(folder: Path, case: Case, fresh: dict[str, Any]) -> dict[str, Any]:
    """The report that a case belongs to, or a new one; nothing is run when it is about something else."""
    path = folder / f"{case.file}.json"
    if not path.exists():
        return fresh
    try:
        report: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"cannot read {path}: {error}: move it away, or give another folder")
    if not isinstance(report, dict) or not isinstance(report.get("runs"), list):
        refuse(f"{path} is no report of the bench: move it away, or give another folder")
    for part in ("model", "workload", "method", "engine_options", "device", "versions"):
        if report.get(part) != json.loads(json.dumps(fresh.get(part))):
            refuse(f"{path} has another {part}: {report.get(part)}, not {fresh.get(part)}: give another folder")
    return report


def runs_of(case: Case, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of a case that are there, none if it failed."""
    return [run for run in report["runs"] if run["case"] == case.name and "error" not in run]


def check_load(folder: Path, case: Case, plan: BenchPlan, report: dict[str, Any]) -> None:
    """Refuse to go on where figures of a case are of another load: a report says it of each run, not of all."""
    (concurrency,) = plan.concurrencies
    load = {"concurrency": concurrency, "num_requests": plan.requests_at(concurrency or 0)}
    for run in runs_of(case, report):
        for name, value in load.items():
            if run.get(name) != value:
                where = f"{folder / case.file}.json: {case.name}"
                refuse(f"{where} was run with {name}={run.get(name)}, not {value}: give another folder")


def refuse(message: str) -> NoReturn:
    """End the program over a mistake, before anything is run."""
    print(message)
    sys.exit(USAGE_ERROR)


def write(path: Path, report: dict[str, Any]) -> None:
    """Replace a report, all or nothing."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


@contextmanager
def in_silence(title: str, total: int) -> Iterator[Finished]:
    """A watch that shows nothing."""
    del title, total
    yield lambda tokens: None


def dtype_of(device: str) -> torch.dtype:
    """As `hf-sparsekv bench` has it."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"))
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    parser.add_argument("--only", help="cases whose line in --list has this text")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no case after this long")
    parser.add_argument("--shape", default="llama3-8b-shape", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--input-len", type=at_least(1), default=4000)
    parser.add_argument("--output-len", type=at_least(1), default=500, help="at most so many")
    parser.add_argument("--concurrency", type=at_least(1), help="in place of every case's own")
    parser.add_argument("--num-requests", type=at_least(1), help="in place of every case's own")
    parser.add_argument("--max-batch-tokens", type=int, default=skv.EngineConfig.max_batch_tokens)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(ended(main))
