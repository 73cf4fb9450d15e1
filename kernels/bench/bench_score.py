"""Times score, lse_tail and key_anchor against PyTorch scoring, in one run on one GPU.

    python kernels/bench/bench_score.py --json score.json

Heads of Llama-3-8B (H 32, K 8, D 128), bf16. `us` is the median of single launches with the L2 flushed before each,
between two events, which adds their overhead (the `empty` line shows how much); `graph us` is the mean inside one CUDA
graph that walks over enough inputs to keep the L2 cold; `warm us` the mean in a graph that repeats one input, whose
keys stay in the L2 if they fit (60 MB on an H200), as they do right after their projection. Bytes are what the
algorithm must move: each input once, each output once. `copy %` relates bytes / graph us to a large device copy
measured in the same run.

The alternatives are PyTorch, eager, both from the same inputs:
    softmax: as SnapKV does it: repeat_kv, logits of the last A rows over all keys, causal mask, softmax in fp32,
        mean over rows, mean over the group;
    lse: what PyTorch can do given the LSE: no repeat_kv, exp(logits - lse) instead of the softmax.

Shapes: B request, H query head, K KV head, A scored rows, N keys, D head dim.
"""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from timing import COLD_BYTES, Machine, cold_us, in_graph_us, load_ops, new_parser, start
from torch import Tensor

HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
TARGET_US = {(1, 5000, 32): 8.0, (1, 5000, 256): 30.0, (1, 32768, 32): 25.0}
"""By (B, N, A), for one H200: with keys in the L2 for 5000 of them, from device memory for 32,768."""

PROBLEMS = [(1, n, a) for n in (5000, 32768) for a in (8, 32, 64, 256)] + [(8, 5000, 32), (1, 1000, 32)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One set of tensors, dense or paged (16 slots, shuffled)."""

    q: Tensor
    keys: Tensor
    table: Tensor | None
    lengths: Tensor
    lse: Tensor
    score: Tensor
    cosine: Tensor
    anchor: Tensor
    workspace: Tensor

    @property
    def max_length(self) -> int:
        return self.score.shape[-1]

    def run_score(self) -> None:
        tensors = (self.score, None, self.q, self.keys, self.lse, self.lengths, self.table, None, None)
        load_ops().score(*tensors, SCALE, self.max_length, 0, 0)

    def run_score_with_cosine(self) -> None:
        tensors = (self.score, self.cosine, self.q, self.keys, self.lse, self.lengths, self.table, None, self.anchor)
        load_ops().score(*tensors, SCALE, self.max_length, 0, 0)

    def run_lse_tail(self) -> None:
        keys = (self.keys, self.lengths, self.table)
        load_ops().lse_tail(self.lse, self.workspace, self.q, *keys, SCALE, self.max_length)

    def run_key_anchor(self) -> None:
        load_ops().key_anchor(self.anchor, self.workspace, self.keys, self.lengths, self.table, self.max_length)

    def run_softmax(self) -> Tensor:
        return softmax_score(self.q, self.keys)

    def run_lse(self) -> Tensor:
        return lse_score(self.q, self.keys, self.lse)


@functools.cache
def future_keys(num_rows: int, num_keys: int) -> Tensor:
    """bool [A, N]: keys later than the row; made once, so that the alternatives do not pay for it."""
    position = num_keys - num_rows + torch.arange(num_rows, device="cuda")
    return torch.arange(num_keys, device="cuda")[None] > position[:, None]


def softmax_score(q: Tensor, keys: Tensor) -> Tensor:
    """SnapKV's window scores before pooling (arXiv 2404.14469, section 4), for requests of equal length."""
    repeated = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
    logits = torch.matmul(q, repeated.transpose(-1, -2)) * SCALE
    logits.masked_fill_(future_keys(q.shape[2], keys.shape[2]), float("-inf"))
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32)
    per_head = weights.mean(dim=2)
    return per_head.view(q.shape[0], KV_HEADS, -1, keys.shape[2]).mean(dim=2)


def lse_score(q: Tensor, keys: Tensor, lse: Tensor) -> Tensor:
    """The same from the LSE."""
    batch, _, num_rows, _ = q.shape
    packed = q.reshape(batch, KV_HEADS, -1, DIM)
    logits = torch.matmul(packed, keys.transpose(-1, -2)).float() * SCALE
    weights: Tensor = (logits - lse.reshape(batch, KV_HEADS, -1, 1)).exp_()
    weights = weights.view(batch, KV_HEADS, -1, num_rows, keys.shape[2])
    weights.masked_fill_(future_keys(num_rows, keys.shape[2]), 0.0)
    return weights.mean(dim=(2, 3))


def make_inputs(batch: int, num_keys: int, num_rows: int, paged: bool) -> Inputs:
    randn = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    table = None
    keys = randn(batch, KV_HEADS, num_keys, DIM)
    if paged:
        pages = -(-num_keys // 16)
        table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
        keys = randn(batch * pages, KV_HEADS, 16, DIM)
    # The last rows of a projection's output [B, N, H, D]: strided, as attention sees them.
    q = randn(batch, num_rows, HEADS, DIM).transpose(1, 2)
    lse = torch.empty(batch, HEADS, num_rows, device="cuda")
    splits = min(64, -(-num_keys // 128))
    inputs = Inputs(
        q=q,
        keys=keys,
        table=table,
        lengths=torch.full((batch,), num_keys, dtype=torch.int32, device="cuda"),
        lse=lse,
        score=torch.empty(batch, KV_HEADS, num_keys, device="cuda"),
        cosine=torch.empty(batch, KV_HEADS, num_keys, device="cuda"),
        anchor=torch.empty(batch, KV_HEADS, DIM, device="cuda"),
        workspace=torch.empty(splits * batch * max(2 * HEADS * num_rows, KV_HEADS * DIM), device="cuda"),
    )
    inputs.run_lse_tail()
    inputs.run_key_anchor()
    return inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; times in microseconds."""

    op: str
    batch: int
    num_keys: int
    num_rows: int
    us: float
    graph_us: float
    warm_us: float
    num_bytes: int
    copy_percent: float
    target_us: float | None
    softmax_us: float | None
    lse_us: float | None
    max_error: float | None
    """Largest difference from the softmax alternative in fp32, relative to its largest score."""

    @property
    def speedup(self) -> float | None:
        """Against the faster alternative."""
        alternatives = [us for us in (self.softmax_us, self.lse_us) if us is not None]
        return min(alternatives) / self.us if alternatives else None


def relative_error(inputs: Inputs) -> float:
    inputs.run_score()
    actual = inputs.score.clone()
    expected = softmax_score(inputs.q.float(), inputs.keys.float())
    return float((actual - expected).abs().max() / expected.max())


def measure(batch: int, num_keys: int, num_rows: int, machine: Machine) -> list[Row]:
    """All ops on one problem."""
    num_sets = max(2, -(-COLD_BYTES // (batch * num_keys * KV_HEADS * DIM * 2)))
    dense = [make_inputs(batch, num_keys, num_rows, paged=False) for _ in range(num_sets)]
    paged = [make_inputs(batch, num_keys, num_rows, paged=True) for _ in range(num_sets)]
    key_bytes = batch * num_keys * KV_HEADS * DIM * 2
    row_bytes = batch * HEADS * num_rows * (DIM * 2 + 4)
    per_key_bytes = batch * num_keys * KV_HEADS * 4
    anchor_bytes = batch * KV_HEADS * DIM * 4
    ops = [
        ("score", dense, Inputs.run_score, key_bytes + row_bytes + per_key_bytes),
        ("score paged", paged, Inputs.run_score, key_bytes + row_bytes + per_key_bytes),
        ("score + cosine", dense, Inputs.run_score_with_cosine, key_bytes + row_bytes + 2 * per_key_bytes),
        ("lse_tail", dense, Inputs.run_lse_tail, key_bytes + row_bytes),
        ("key_anchor", dense, Inputs.run_key_anchor, key_bytes + anchor_bytes),
    ]
    softmax_us, lse_us = cold_us(dense[0].run_softmax), cold_us(dense[0].run_lse)
    rows = []
    for name, sets, method, num_bytes in ops:
        us = cold_us(functools.partial(method, sets[0]))
        in_graph = in_graph_us([functools.partial(method, inputs) for inputs in sets])
        warm_us = in_graph_us([functools.partial(method, sets[0])] * len(sets))
        is_score = name == "score"
        rows.append(
            Row(
                op=name,
                batch=batch,
                num_keys=num_keys,
                num_rows=num_rows,
                us=us,
                graph_us=in_graph,
                warm_us=warm_us,
                num_bytes=num_bytes,
                copy_percent=machine.copy_percent(num_bytes, in_graph),
                target_us=TARGET_US.get((batch, num_keys, num_rows)) if name.startswith("score") else None,
                softmax_us=softmax_us if is_score else None,
                lse_us=lse_us if is_score else None,
                max_error=relative_error(sets[0]) if is_score else None,
            )
        )
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    print(
        f"{'op':15}{'B':>4}{'N':>7}{'A':>5}{'us':>9}{'graph us':>10}{'warm us':>9}{'target':>8}{'MB':>8}{'copy %':>8}"
        f"{'softmax us':>12}{'lse us':>9}{'speedup':>9}{'error':>10}"
    )
    for row in rows:
        print(
            f"{row.op:15}{row.batch:>4}{row.num_keys:>7}{row.num_rows:>5}{row.us:>9.1f}{row.graph_us:>10.1f}"
            f"{row.warm_us:>9.1f}"
            f"{cell(row.target_us, '.0f'):>8}{row.num_bytes / 1e6:>8.1f}{row.copy_percent:>8.1f}"
            f"{cell(row.softmax_us, '.1f'):>12}{cell(row.lse_us, '.1f'):>9}{cell(row.speedup, '.1f'):>9}"
            f"{cell(row.max_error, '.1e'):>10}"
        )


def main() -> None:
    """Command line, see this module's docstring."""
    options = new_parser("Benchmark the score kernels.").parse_args()
    machine = start()
    rows = []
    for batch, num_keys, num_rows in PROBLEMS:
        rows += measure(batch, num_keys, num_rows, machine)
        torch.cuda.empty_cache()
    print_rows(rows)
    if options.json is not None:
        machine.write_json(options.json, [asdict(row) | {"speedup": row.speedup} for row in rows])


if __name__ == "__main__":
    main()
