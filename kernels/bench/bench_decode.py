"""Times decode_step and decode_attention against torch's own FlashAttention-2, in one run on one GPU.

    python kernels/bench/bench_decode.py --json decode.json
    python kernels/bench/bench_decode.py --splits 1,2,4,8,16      also every case with these numbers of splits

Heads of Llama-3-8B (H 32, K 8, D 128), bf16, pages of 16 slots in shuffled order, every request at its full length.
`us` is the median of single launches with the L2 flushed before each, between two events, which adds their overhead
(the `empty` line shows how much). `graph us` is the mean inside one CUDA graph that walks over enough copies of the
inputs to keep the L2 cold. Bytes are what must move: K and V once, and 12 bytes per slot for a step's scores and
positions. `copy %` relates bytes / graph us to a large device copy of the same run.

The alternative is `aten._flash_attention_forward` with `seqused_k` over contiguous regions: attention alone, neither
pages nor the new token nor scores. `vs FA2` is its graph time over ours.

Shapes: B request, H query head, K KV head, n slots per request, D head dim.
"""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from timing import COLD_BYTES, Machine, cold_us, in_graph_us, load_ops, new_parser, start
from torch import Tensor

HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
SCALE = DIM**-0.5

CASES = [(batch, slots) for slots in (512, 1024, 4096) for batch in (1, 8, 16, 64)] + [(256, 512)]

TARGET_US = {
    ("step", 64, 512): 42.0,
    ("step", 256, 512): 140.0,
    ("step", 64, 4096): 265.0,
    ("attention", 64, 4096): 265.0,
}
"""By (op, B, n), for one H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The tensors of one layer of B requests, all with n slots in use."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    positions: Tensor
    scores: Tensor
    lengths: Tensor
    budgets: Tensor
    victims: Tensor
    next_position: Tensor
    workspace: Tensor

    @property
    def num_slots(self) -> int:
        return self.scores.shape[2]

    def run_step(self, num_splits: int) -> None:
        changed = (self.out, self.k_pool, self.v_pool, self.positions, self.scores, self.lengths, self.victims)
        token = (self.q, self.k, self.v, self.budgets, self.table)
        rule = (SCALE, 31 / 32, 1 / 32, 4, 32, False, num_splits)
        load_ops().decode_step(*changed, self.next_position, self.workspace, *token, *rule)

    def run_attention(self, num_splits: int) -> None:
        stored = (self.q, self.k_pool, self.v_pool, self.lengths, self.table)
        load_ops().decode_attention(self.out, None, self.workspace, *stored, SCALE, self.num_slots, num_splits)

    def run_flash(self) -> Tensor:
        """FlashAttention-2 on the pools' memory, read as one contiguous region of tokens per request."""
        keys, values = (pool.view(-1, KV_HEADS, DIM) for pool in (self.k_pool, self.v_pool))
        bounds = bounds_of(self.q.shape[0], 1), bounds_of(self.q.shape[0], self.num_slots)
        flash = torch.ops.aten._flash_attention_forward
        # Without a causal mask, so that the op treats the group as query rows and splits over the keys.
        result = flash(
            self.q, keys, values, *bounds, 1, self.num_slots, 0.0, False, False, scale=SCALE, seqused_k=self.lengths
        )
        output: Tensor = result[0]
        return output


@functools.cache
def bounds_of(batch: int, length: int) -> Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device="cuda")


@functools.cache
def workspace() -> Tensor:
    """One for all launches, as a model would keep it."""
    return torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")


def make_inputs(batch: int, slots: int) -> Inputs:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    num_pages = batch * slots // PAGE_SIZE
    filled = torch.full((batch,), slots, dtype=torch.int32, device="cuda")
    order = torch.rand(batch, KV_HEADS, slots, device="cuda").argsort(dim=-1)
    return Inputs(
        q=normal(batch, HEADS, DIM),
        k=normal(batch, KV_HEADS, DIM),
        v=normal(batch, KV_HEADS, DIM),
        out=normal(batch, HEADS, DIM),
        k_pool=normal(num_pages, KV_HEADS, PAGE_SIZE, DIM),
        v_pool=normal(num_pages, KV_HEADS, PAGE_SIZE, DIM),
        table=torch.randperm(num_pages, device="cuda").int().view(batch, -1),
        positions=order.int(),
        scores=torch.rand(batch, KV_HEADS, slots, device="cuda"),
        lengths=filled.clone(),
        budgets=filled.clone(),
        victims=order.argmin(dim=-1),
        next_position=filled.clone(),
        workspace=workspace(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    op: str
    batch: int
    slots: int
    splits: str
    us: float
    graph_us: float
    megabytes: float
    copy_percent: float
    flash_us: float
    flash_graph_us: float
    target_us: float | None

    def line(self) -> str:
        target = f"{self.target_us:8.0f}" if self.target_us is not None else " " * 8
        return (
            f"{self.op:10}{self.batch:5}{self.slots:6}{self.splits:>7}{self.us:9.1f}{self.graph_us:10.1f}"
            f"{self.megabytes:9.1f}{self.copy_percent:8.1f}{self.flash_us:9.1f}{self.flash_graph_us:11.1f}"
            f"{self.flash_graph_us / self.graph_us:8.2f}{target}"
        )


HEADER = (
    f"{'op':10}{'B':>5}{'n':>6}{'splits':>7}{'us':>9}{'graph us':>10}{'MB':>9}{'copy %':>8}{'FA2 us':>9}"
    f"{'FA2 graph':>11}{'vs FA2':>8}{'target':>8}"
)


def time_case(batch: int, slots: int, splits: Sequence[int], machine: Machine) -> list[Row]:
    """Both ops of one size; `splits` besides the automatic choice."""
    kv_bytes = batch * KV_HEADS * slots * 4 * DIM
    copies = max(2, -(-COLD_BYTES // kv_bytes))
    inputs = [make_inputs(batch, slots) for _ in range(copies)]
    flash = cold_us(inputs[0].run_flash), in_graph_us([one.run_flash for one in inputs])
    rows = []
    for op in ("step", "attention"):
        num_bytes = kv_bytes + (12 * batch * KV_HEADS * slots if op == "step" else 0)
        for num_splits in (0, *splits):
            launches = [functools.partial(getattr(one, f"run_{op}"), num_splits) for one in inputs]
            inside_graph = in_graph_us(launches)
            rows.append(
                Row(
                    op=op,
                    batch=batch,
                    slots=slots,
                    splits=str(num_splits) if num_splits else "auto",
                    us=cold_us(launches[0]),
                    graph_us=inside_graph,
                    megabytes=num_bytes / 1e6,
                    copy_percent=machine.copy_percent(num_bytes, inside_graph),
                    flash_us=flash[0],
                    flash_graph_us=flash[1],
                    target_us=TARGET_US.get((op, batch, slots)),
                )
            )
    return rows


def main() -> None:
    """Command line, see this module's docstring."""
    parser = new_parser("Benchmark of decode_step and decode_attention.")
    parser.add_argument("--splits", default="", help="comma-separated numbers of splits to time besides the automatic")
    parser.add_argument("--cases", default="", help="comma-separated BxN, such as 64x512; default all")
    options = parser.parse_args()
    splits = [int(text) for text in options.splits.split(",") if text]
    chosen = [tuple(map(int, text.split("x"))) for text in options.cases.split(",") if text]
    machine = start()
    print(HEADER)
    rows = []
    for batch, slots in chosen or CASES:
        for row in time_case(batch, slots, splits, machine):
            print(row.line(), flush=True)
            rows.append(asdict(row))
        torch.cuda.empty_cache()
    if options.json is not None:
        machine.write_json(options.json, rows)


if __name__ == "__main__":
    main()
