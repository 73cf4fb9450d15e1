"""How much of a decode step the GPU works, and how much it waits for the host.

Events around a step cannot tell: the next step is launched before the last one is read, so the time between two events
holds the gaps too. The profiler's list of kernels can; it slows kernels a little, hence a measurement of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_sparsekv.bench.report import busy_share
from hf_sparsekv.bench.workload import Workload
from hf_sparsekv.engine.engine import Engine

MAX_IDLE_STEPS = 8
"""Steps without a new first token, besides those that a prompt takes, after which the memory, not the ramp, is taken to
hold the others back."""
SETTLE_STEPS = 3


def decode_busy_share(engine: Engine, workload: Workload, *, concurrency: int, num_steps: int) -> dict[str, Any] | None:
    """Part of some pure decode steps in which the GPU had work; None when requests ended before they were seen.

    Args:
        engine: without live requests, on a GPU.
        workload: long enough outputs for every request to decode at the same time.
        concurrency: requests to have decoding; fewer where the memory holds fewer.
        num_steps: steps to look at.
    """
    device = engine.model.device
    ids = [engine.add_request(workload.prompt(index), workload.params) for index in range(concurrency)]
    try:
        max_idle = MAX_IDLE_STEPS + workload.input_len // engine.options.max_batch_tokens
        decoding, has_ended = _ramp_up(engine.step, concurrency, max_idle)
        if has_ended or not engine.has_unfinished:
            return None
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(num_steps):
                has_ended |= any(output.is_finished for output in engine.step())
            torch.cuda.synchronize(device)
    finally:
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_unfinished:
            engine.step()
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.profiler.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    if has_ended or not kernels:
        return None
    # From the first kernel on: what lies before is the profiler's own start.
    begin, end = min(first for first, _ in kernels), max(last for _, last in kernels)
    share = busy_share(kernels, begin, end)
    seconds_per_step = (end - begin) / 1e6 / num_steps
    return {"share": share, "step_s": seconds_per_step, "num_steps": num_steps, "num_requests": decoding}


def _ramp_up(step: Callable[[], Any], concurrency: int, max_idle: int) -> tuple[int, bool]:
    """Step until as many requests decode as can; their number, and whether one has ended already."""
    started: set[str] = set()
    idle = 0
    while len(started) < concurrency and idle < max_idle:
        before = len(started)
        outputs = step()
        started |= {output.request_id for output in outputs}
        idle = idle + 1 if len(started) == before and started else 0
        if any(output.is_finished for output in outputs):
            return len(started), True
    for _ in range(SETTLE_STEPS):
        if any(output.is_finished for output in step()):
            return len(started), True
    return len(started), False
