"""Times write_kv and write_kv_packed against PyTorch's indexed assignment.

    python kernels/bench/bench_write.py --json write.json

K 8, D 128, bf16, pages of 16 slots. See `timing` for the columns.
"""

from dataclasses import dataclass

import torch
from timing import Row, load_ops, measure, run
from torch import Tensor

KV_HEADS, DIM, PAGE_SIZE = 8, 128, 16
NUM_PAGES = 16384
SLOTS_PER_REQUEST = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """New tokens and where they go."""

    k_pool: Tensor
    v_pool: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    slots: Tensor
    mapping: Tensor

    def write(self) -> None:
        load_ops().write_kv(self.k_pool, self.v_pool, self.k, self.v, self.slots, self.table)

    def write_packed(self) -> None:
        load_ops().write_kv_packed(self.k_pool, self.v_pool, self.k, self.v, self.mapping)

    def torch_write_packed(self) -> None:
        pages, offsets = self.mapping // PAGE_SIZE, self.mapping % PAGE_SIZE
        self.k_pool[pages, :, offsets] = self.k
        self.v_pool[pages, :, offsets] = self.v


def make_inputs(num_tokens: int, pools: tuple[Tensor, Tensor]) -> Inputs:
    pages = SLOTS_PER_REQUEST // PAGE_SIZE
    num_requests = min(num_tokens, NUM_PAGES // pages)
    table = torch.randperm(NUM_PAGES, device="cuda")[: num_requests * pages].to(torch.int32).view(num_requests, pages)
    rows = (num_tokens, KV_HEADS, DIM)
    return Inputs(
        k_pool=pools[0],
        v_pool=pools[1],
        k=torch.randn(rows, dtype=torch.bfloat16, device="cuda"),
        v=torch.randn(rows, dtype=torch.bfloat16, device="cuda"),
        table=table,
        slots=torch.randint(SLOTS_PER_REQUEST, (num_tokens, KV_HEADS), device="cuda"),
        mapping=torch.randperm(NUM_PAGES * PAGE_SIZE, device="cuda")[:num_tokens],
    )


def rows_of() -> list[Row]:
    pool_shape = (NUM_PAGES, KV_HEADS, PAGE_SIZE, DIM)
    k_pool, v_pool = (torch.empty(pool_shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rows = []
    for num_tokens in (1, 64, 256, 8192):
        sets = [make_inputs(num_tokens, (k_pool, v_pool)) for _ in range(8)]
        num_bytes = num_tokens * KV_HEADS * DIM * 8
        problem = f"{num_tokens} tokens"
        alternatives = [s.torch_write_packed for s in sets]
        if num_tokens <= sets[0].table.shape[0]:
            rows.append(measure("write_kv", problem, [s.write for s in sets], num_bytes, alternatives))
        rows.append(measure("write_kv_packed", problem, [s.write_packed for s in sets], num_bytes, alternatives))
    return rows


if __name__ == "__main__":
    run("Benchmark the write kernels.", rows_of)
