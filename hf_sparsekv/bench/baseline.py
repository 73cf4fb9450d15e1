"""Transformers' own continuous batching on the same requests, called once: a figure to compare with.

`generate_batch` takes all requests at once, so its closed loop is reconstructed: at most c requests leave the queue
before others end, in an order of its own, and the one that leaves it as number i + c counts as handed in when the i-th
end freed its place. What a call sets up anew (cache, graphs) is in the time of the whole run, not of the steady part.
"""

import time
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_sparsekv.bench.workload import Finished, LoopRun, RequestTimes, Workload

NOTES = (
    "transformers: one call of generate_batch without warm-up; the whole run includes its own setup",
    "transformers: all requests are given at once; one counts as handed in when an earlier one's end makes room for it",
)


def run_generate_batch(
    model: PreTrainedModel,
    workload: Workload,
    *,
    concurrency: int,
    num_requests: int,
    kv_memory_bytes: int | None,
    memory_fraction: float,
    dense_bytes_per_token: int,
    max_batch_tokens: int,
    on_finish: Finished | None = None,
) -> LoopRun:
    """The same requests through `model.generate_batch`.

    Args:
        model: with an attention implementation of transformers' own.
        workload: what is asked.
        concurrency: requests that run at once, at most.
        num_requests: requests in all.
        kv_memory_bytes: of its cache, rounded down to its blocks; None = `memory_fraction` of what is free.
        memory_fraction: of the free memory.
        dense_bytes_per_token: keys and values of one token in all layers.
        max_batch_tokens: of one forward pass.
        on_finish: called for each request, once all have ended.
    """
    prompts = [workload.prompt(index) for index in range(num_requests)]
    options = _batching(concurrency, kv_memory_bytes, memory_fraction, dense_bytes_per_token, max_batch_tokens)
    begin = time.perf_counter()
    outputs = model.generate_batch(  # type: ignore[operator]
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=workload.output_len, do_sample=False, eos_token_id=-1),
        continuous_batching_config=options,
        record_timestamps=True,
    )
    end = time.perf_counter()
    requests = closed_loop_times(list(outputs.values()), concurrency)
    missing = num_requests - len(requests)
    requests += [
        RequestTimes(prompt_tokens=workload.input_len, handed_in_s=begin, error="generate_batch returned no output")
        for _ in range(missing)
    ]
    for request in requests:
        if on_finish is not None:
            on_finish(len(request.token_s))
    return LoopRun(
        concurrency=concurrency,
        output_len=workload.output_len,
        begin_s=begin,
        end_s=end,
        requests=requests,
        num_steps=None,
    )


def closed_loop_times(outputs: list[Any], concurrency: int) -> list[RequestTimes]:
    """Times as the clients of a closed loop would have seen them.

    Args:
        outputs: of `generate_batch`, with `timestamps`, in any order.
        concurrency: clients.
    """
    ends = sorted(output.timestamps[-1] for output in outputs if output.timestamps)
    requests = []
    for index, output in enumerate(sorted(outputs, key=lambda output: output.lifespan[0])):
        freed = index - concurrency
        # A request that left the queue was handed in by then, whatever became of the others.
        handed_in = min(ends[freed], output.lifespan[0]) if 0 <= freed < len(ends) else output.created_time
        requests.append(
            RequestTimes(
                prompt_tokens=len(output.prompt_ids),
                handed_in_s=handed_in,
                token_s=list(output.timestamps or ()),
                error=output.error,
            )
        )
    return requests


def _batching(
    concurrency: int,
    kv_memory_bytes: int | None,
    memory_fraction: float,
    dense_bytes_per_token: int,
    max_batch_tokens: int,
) -> ContinuousBatchingConfig:
    options = ContinuousBatchingConfig(
        max_requests_per_batch=concurrency, max_batch_tokens=max_batch_tokens, max_memory_percent=memory_fraction
    )
    if kv_memory_bytes is not None:
        # Older releases call it block_size; newer ones keep that name with None.
        block_tokens = int(getattr(options, "page_size", None) or options.block_size or 0)
        options.num_blocks = max(1, kv_memory_bytes // (dense_bytes_per_token * block_tokens))
    return options
