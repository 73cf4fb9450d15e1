"""Times prefill attention with its LSE, per backend of hf_sparsekv/ops/prefill_table.py that this GPU has.

    PYTHONPATH=. python kernels/bench/bench_prefill.py --json prefill.json

One whole prompt, causal, Llama-3-8B shape (H 32, K 8, D 128), bf16, packed [N, heads, D]. The times are of the op's
own work on a stream: a backend's kernel, and what is copied around it (cuDNN: padding to a bucket). The alternative
is `scaled_dot_product_attention` with the backend of torch's choice, which returns no LSE. Attention is bound by
arithmetic: divide 2 N^2 H D operations by the time, as the second table does, and leave `copy %` aside. Backends that
hold all N^2 weights are left out: at the longest prompt they would not fit the GPU.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from timing import COLD_BYTES, Row, in_graph_us, measure, run
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_sparsekv.ops.prefill_backends import Packed
from hf_sparsekv.ops.prefill_table import BACKENDS, Backend, Problem

HEADS, KV_HEADS, DIM = 32, 8, 128
LENGTHS = (4000, 8192, 32768)
LEFT_OUT = {
    "sdpa": "is what the others are compared with",
    "eager": "holds all weights",
    "reference": "would take minutes",
}


def make_packed(num_tokens: int) -> Packed:
    q, k, v = (
        torch.randn(num_tokens, heads, DIM, dtype=torch.bfloat16, device="cuda")
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    return Packed(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_rows=num_tokens,
        max_keys=num_tokens,
        scale=DIM**-0.5,
        is_causal=True,
    )


def torch_attention(packed: Packed) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (packed.q, packed.k, packed.v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=packed.scale, enable_gqa=True)


def refusal(backend: Backend) -> str | None:
    problem = Problem(
        device="cuda",
        compute_capability=torch.cuda.get_device_capability()[0],
        dtype=torch.bfloat16,
        head_dim=DIM,
        is_causal=True,
        is_whole=True,
        has_mask=False,
        is_empty=False,
    )
    return LEFT_OUT.get(backend.name) or backend.refusal(problem)


def launches_of(call: Callable[[Packed], object], inputs: list[Packed]) -> list[Callable[[], object]]:
    return [functools.partial(call, packed) for packed in inputs]


def rows_of() -> list[Row]:
    able = []
    for backend in BACKENDS:
        reason = refusal(backend)
        if reason is None:
            able.append(backend)
        else:
            print(f"left out: {backend.name}: {reason}")
    rows = []
    for num_tokens in LENGTHS:
        num_bytes = num_tokens * (2 * DIM * (2 * HEADS + 2 * KV_HEADS) + 4 * HEADS)
        inputs = [make_packed(num_tokens) for _ in range(max(2, -(-COLD_BYTES // num_bytes)))]
        torch_us = in_graph_us(launches_of(torch_attention, inputs))
        for backend in able:
            row = measure(backend.name, f"N {num_tokens}", launches_of(backend.run, inputs), num_bytes)
            rows.append(replace(row, alternative_us=torch_us))
        torch.cuda.empty_cache()
    print_rates(rows)
    return rows


def print_rates(rows: list[Row]) -> None:
    """The same times as arithmetic: causal attention does half of 4 N^2 H D."""
    for row in rows:
        num_tokens = int(row.problem.removeprefix("N "))
        rate = 2 * num_tokens**2 * HEADS * DIM / (row.graph_us * 1e-6) / 1e12
        print(f"{row.op:18}{row.problem:12}{row.graph_us:>10.1f} us{rate:>8.0f} TFLOP/s")


if __name__ == "__main__":
    run("Benchmark prefill attention with its LSE.", rows_of)
