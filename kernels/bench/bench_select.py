"""Times select and compact, alone and one after the other, against PyTorch.

    python kernels/bench/bench_select.py --json select.json

K 8, D 128, bf16 keys and values in pages of 16 slots, 4 sinks and 32 recent tokens. The alternative is what one would
write without kernels: avg_pool1d, topk and sort; two gathers from dense keys and values. See `timing` for the columns;
in the graphs the scores stay in the L2, as they do right after the score kernel.
"""

import functools
from dataclasses import dataclass

import torch
from timing import COLD_BYTES, Row, load_ops, measure, run
from torch import Tensor

KV_HEADS, DIM, PAGE_SIZE = 8, 128, 16
NUM_SINKS, NUM_RECENT = 4, 32
AVERAGE, MAXIMUM = 1, 2

PROBLEMS = [(1, 5000, 512, 7), (1, 5000, 512, 41), (16, 5000, 512, 7), (64, 5000, 512, 7), (1, 32768, 1024, 7)]
"""(B, N, C, pool width)."""
LONG_PROBLEM = (1, 131072, 4096, 7)
"""A row that shared memory does not hold; only `select`, its keys and values would say nothing new."""
TARGET_US = {(1, 5000, 512, 7): 10.0}
"""Of select and compact together, for one H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The tensors of one layer after a prompt."""

    scores: Tensor
    secondary: Tensor
    lengths: Tensor
    budgets: Tensor
    width: int
    index: Tensor
    count: Tensor
    retained: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    k_out: Tensor
    v_out: Tensor

    def select(self) -> None:
        outputs = (self.index, self.count, self.retained)
        inputs = (self.scores, self.lengths, self.budgets, NUM_SINKS, NUM_RECENT)
        load_ops().select(*outputs, *inputs, AVERAGE, self.width)

    def select_two_lists(self) -> None:
        outputs = (self.index, self.count, self.retained)
        inputs = (self.scores, self.lengths, self.budgets, NUM_SINKS, NUM_RECENT, AVERAGE, self.width)
        load_ops().select(*outputs, *inputs, self.secondary, MAXIMUM, 3, 0.5)

    def compact(self) -> None:
        load_ops().compact(self.k_out, self.v_out, self.k_pool, self.v_pool, self.index, self.table)

    def select_and_compact(self) -> None:
        self.select()
        self.compact()

    def torch_select(self) -> Tensor:
        pooled = torch.nn.functional.avg_pool1d(
            self.scores, self.width, stride=1, padding=self.width // 2, count_include_pad=False
        )
        pooled[..., :NUM_SINKS] = float("inf")
        pooled[..., -NUM_RECENT:] = float("inf")
        return pooled.topk(self.index.shape[-1], dim=-1, sorted=False).indices.sort(dim=-1).values

    def torch_compact(self) -> tuple[Tensor, Tensor]:
        """From dense [B, K, N, D] of the same size; reads other rows, in the same number."""
        where = self.index[..., None].expand(*self.index.shape, DIM)
        shape = (self.scores.shape[0], KV_HEADS, -1, DIM)
        return self.k_pool.reshape(shape).gather(2, where), self.v_pool.reshape(shape).gather(2, where)

    def torch_select_and_compact(self) -> None:
        self.torch_select()
        self.torch_compact()


def make_inputs(batch: int, num_keys: int, capacity: int, width: int, has_keys: bool) -> Inputs:
    pages = -(-num_keys // PAGE_SIZE) if has_keys else 0
    pool_shape = (batch * pages, KV_HEADS, PAGE_SIZE, DIM)
    rows = (batch, KV_HEADS, capacity)
    int32 = functools.partial(torch.full, (batch,), dtype=torch.int32, device="cuda")
    inputs = Inputs(
        scores=(3 * torch.randn(batch, KV_HEADS, num_keys, device="cuda")).softmax(-1),
        secondary=torch.randn(batch, KV_HEADS, num_keys, device="cuda"),
        lengths=int32(fill_value=num_keys),
        budgets=int32(fill_value=capacity),
        width=width,
        index=torch.empty(rows, dtype=torch.int64, device="cuda"),
        count=int32(fill_value=0),
        retained=torch.empty(rows, device="cuda"),
        k_pool=torch.randn(pool_shape, dtype=torch.bfloat16, device="cuda"),
        v_pool=torch.randn(pool_shape, dtype=torch.bfloat16, device="cuda"),
        table=torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages),
        k_out=torch.empty(*rows, DIM, dtype=torch.bfloat16, device="cuda"),
        v_out=torch.empty(*rows, DIM, dtype=torch.bfloat16, device="cuda"),
    )
    inputs.select()
    return inputs


def rows_of() -> list[Row]:
    rows = []
    for batch, num_keys, capacity, width in PROBLEMS:
        problem = f"B {batch}, {num_keys} -> {capacity}, width {width}"
        score_bytes = batch * KV_HEADS * (4 * num_keys + 12 * capacity)
        row_bytes = batch * KV_HEADS * capacity * (8 * DIM + 8)
        key_bytes = 4 * batch * KV_HEADS * num_keys * DIM
        # Enough copies that the rows which compact reads are not in the L2 from the last time around.
        num_sets = max(2, min(16, -(-COLD_BYTES // key_bytes)))
        sets = [make_inputs(batch, num_keys, capacity, width, has_keys=True) for _ in range(num_sets)]
        target = TARGET_US.get((batch, num_keys, capacity, width))
        rows += [
            measure("select", problem, [s.select for s in sets], score_bytes, [s.torch_select for s in sets]),
            measure("select two lists", problem, [s.select_two_lists for s in sets], 2 * score_bytes),
            measure("compact", problem, [s.compact for s in sets], row_bytes, [s.torch_compact for s in sets]),
            measure(
                "select + compact",
                problem,
                [s.select_and_compact for s in sets],
                score_bytes + row_bytes,
                [s.torch_select_and_compact for s in sets],
                target,
            ),
        ]
        del sets
        torch.cuda.empty_cache()
    batch, num_keys, capacity, width = LONG_PROBLEM
    sets = [make_inputs(batch, num_keys, capacity, width, has_keys=False) for _ in range(8)]
    problem = f"B {batch}, {num_keys} -> {capacity}, width {width}"
    score_bytes = batch * KV_HEADS * (4 * num_keys + 12 * capacity)
    rows.append(measure("select", problem, [s.select for s in sets], score_bytes, [s.torch_select for s in sets]))
    return rows


if __name__ == "__main__":
    run("Benchmark the select and compact kernels.", rows_of)
