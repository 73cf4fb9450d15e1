"""decode_attention against hf_sparsekv.ops.reference, on inputs that punish stray reads.

Shapes: B request, T query row, H query head, K KV head, G = H / K, D head dim.
"""

from typing import Any

import pytest
import torch
from decode_cases import COUNTER_BYTES, DEVICE, check_attention, nan_like, new_workspace
from helpers import capture, int32, load_ops, make_pool, needs_cuda, padded_rows
from torch import Tensor

from hf_sparsekv.ops.reference.pool import dense_rows
from hf_sparsekv.testing.compare import assert_census, assert_repeatable

pytestmark = needs_cuda

LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 300)


@pytest.fixture(scope="module")
def ops() -> Any:
    return load_ops()


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("page_size", [None, 16, 32, 48, 5, 1])
@pytest.mark.parametrize(
    ("dtype", "dim", "group"),
    [
        (torch.bfloat16, 128, 4),
        (torch.float16, 128, 8),
        (torch.bfloat16, 64, 3),
        (torch.float16, 64, 1),
        (torch.bfloat16, 128, 7),
    ],
)
def test_attention_equals_the_reference(
    ops: Any, dtype: torch.dtype, dim: int, group: int, page_size: int | None, num_splits: int
) -> None:
    lengths, scale = LENGTHS, 1.2 * dim**-0.5
    k_pool, v_pool, table, dense_k, dense_v = make_pool(lengths, 2, dim, page_size, dtype, DEVICE, seed=dim + group)
    q = padded_rows((len(lengths), 2 * group, dim), dtype, DEVICE, seed=1)
    out, lse = nan_like(q), torch.full(q.shape[:2], float("nan"), device=DEVICE)
    workspace = new_workspace()

    ops.decode_attention(
        out, lse, workspace, q, k_pool, v_pool, int32(lengths, DEVICE), table, scale, max(lengths), num_splits
    )

    check_attention(out[:, None], lse[:, None], q[:, None], dense_k, dense_v, lengths, scale)
    assert not workspace[:COUNTER_BYTES].any(), "a launch must leave its counters zero"


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    ("num_rows", "group", "dim"), [(2, 4, 128), (8, 8, 128), (5, 3, 64), (8, 1, 64), (3, 5, 128), (7, 7, 64)]
)
def test_query_rows_are_causal_from_the_bottom_right(
    ops: Any, num_rows: int, group: int, dim: int, page_size: int | None, num_splits: int
) -> None:
    lengths, scale = (0, 1, num_rows - 1, num_rows, num_rows + 1, 64, 200, 513), dim**-0.5
    k_pool, v_pool, table, dense_k, dense_v = make_pool(lengths, 2, dim, page_size, torch.bfloat16, DEVICE, seed=3)
    q = padded_rows((len(lengths), num_rows, 2 * group, dim), torch.bfloat16, DEVICE, seed=4)
    out, lse = nan_like(q), torch.full(q.shape[:3], float("nan"), device=DEVICE)

    ops.decode_attention(
        out, lse, new_workspace(), q, k_pool, v_pool, int32(lengths, DEVICE), table, scale, max(lengths), num_splits
    )

    check_attention(out, lse, q, dense_k, dense_v, lengths, scale)


@pytest.mark.parametrize(("batch", "length", "capacity"), [(1, 4096, 4096), (1, 3001, 16384), (3, 4097, 4100)])
def test_attention_over_thousands_of_slots(ops: Any, batch: int, length: int, capacity: int) -> None:
    lengths = [length - 17 * b for b in range(batch)]
    k_pool, v_pool, table, dense_k, dense_v = make_pool(
        lengths, 4, 128, None, torch.bfloat16, DEVICE, seed=5, capacity=capacity
    )
    q = padded_rows((batch, 16, 128), torch.bfloat16, DEVICE, seed=6)
    out, lse = nan_like(q), torch.full(q.shape[:2], float("nan"), device=DEVICE)

    ops.decode_attention(
        out, lse, new_workspace(), q, k_pool, v_pool, int32(lengths, DEVICE), table, 128**-0.5, capacity
    )

    check_attention(out[:, None], lse[:, None], q[:, None], dense_k, dense_v, lengths, 128**-0.5)


@pytest.mark.parametrize("num_splits", [1, 5])
def test_with_a_query_of_zeros_the_lse_counts_the_slots(ops: Any, num_splits: int) -> None:
    lengths = (1, 2, 17, 64, 65, 511, 512)
    k_pool, v_pool, table, _, _ = make_pool(lengths, 2, 128, 16, torch.bfloat16, DEVICE, seed=7)
    q = torch.zeros(len(lengths), 8, 128, dtype=torch.bfloat16, device=DEVICE)
    out, lse = nan_like(q), torch.full(q.shape[:2], float("nan"), device=DEVICE)

    ops.decode_attention(
        out, lse, new_workspace(), q, k_pool, v_pool, int32(lengths, DEVICE), table, 1.0, 512, num_splits
    )

    assert_census(lse, int32(lengths, DEVICE)[:, None])


def test_attention_needs_neither_lse_nor_workspace(ops: Any) -> None:
    lengths = (5, 130)
    k_pool, v_pool, table, dense_k, dense_v = make_pool(lengths, 1, 64, 16, torch.float16, DEVICE, seed=8)
    q = padded_rows((2, 4, 64), torch.float16, DEVICE, seed=9)
    out, lse = nan_like(q), torch.empty(q.shape[:2], device=DEVICE)

    ops.decode_attention(out, None, None, q, k_pool, v_pool, int32(lengths, DEVICE), table, 0.125, 130)
    ops.decode_attention(nan_like(q), lse, None, q, k_pool, v_pool, int32(lengths, DEVICE), table, 0.125, 130)

    check_attention(out[:, None], lse[:, None], q[:, None], dense_k, dense_v, lengths, 0.125)


def test_a_captured_attention_follows_the_lengths(ops: Any) -> None:
    full = (400, 400, 400)
    k_pool, v_pool, table, dense_k, dense_v = make_pool(full, 2, 128, 16, torch.bfloat16, DEVICE, seed=10)
    q = padded_rows((3, 8, 128), torch.bfloat16, DEVICE, seed=11)
    out, lse, lengths = nan_like(q), torch.empty(q.shape[:2], device=DEVICE), int32((1, 1, 1), DEVICE)
    workspace = new_workspace()
    graph = capture(lambda: ops.decode_attention(out, lse, workspace, q, k_pool, v_pool, lengths, table, 0.1, 400, 4))
    for values in ((1, 64, 400), (0, 65, 399), (257, 1, 128)):
        lengths.copy_(int32(values, DEVICE))
        graph.replay()
        check_attention(out[:, None], lse[:, None], q[:, None], dense_k, dense_v, values, 0.1)


@pytest.mark.parametrize("num_splits", [1, 6])
def test_attention_is_repeatable(ops: Any, num_splits: int) -> None:
    lengths = (700, 33, 512, 1)
    k_pool, v_pool, table, _, _ = make_pool(lengths, 4, 128, 16, torch.bfloat16, DEVICE, seed=12)
    q = padded_rows((4, 16, 128), torch.bfloat16, DEVICE, seed=13)
    workspace = new_workspace()

    def launch() -> list[Tensor]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
        ops.decode_attention(
            out, lse, workspace, q, k_pool, v_pool, int32(lengths, DEVICE), table, 0.1, 700, num_splits
        )
        return [out, lse]

    assert_repeatable(launch)


def test_offsets_beyond_two_billion_elements(ops: Any) -> None:
    pages, kv_heads, page_size, dim = 140_000, 8, 16, 128
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of free GPU memory")
    k_pool, v_pool = (
        torch.empty(pages, kv_heads, page_size, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
    )
    used = torch.arange(pages - 8, pages, device=DEVICE)
    for pool in (k_pool, v_pool):
        pool[used] = torch.randn(8, kv_heads, page_size, dim, device=DEVICE, dtype=torch.bfloat16)
    table, lengths = used.int()[None], int32((128,), DEVICE)
    q = padded_rows((1, 32, dim), torch.bfloat16, DEVICE, seed=95)
    out, lse = nan_like(q), torch.empty(1, 32, device=DEVICE)

    ops.decode_attention(out, lse, None, q, k_pool, v_pool, lengths, table, 0.1, 128)

    dense_k, dense_v = (dense_rows(pool, table, 128) for pool in (k_pool, v_pool))
    check_attention(out[:, None], lse[:, None], q[:, None], dense_k, dense_v, (128,), 0.1)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", {"q": lambda t: t.float()}),
        ("k_pool", {"k_pool": lambda t: t.half()}),
        ("v_pool", {"v_pool": lambda t: t[:, :, :8]}),
        ("out", {"out": lambda t: t[..., :32]}),
        ("lengths", {"lengths": lambda t: t.long()}),
        ("lengths", {"lengths": lambda t: t.cpu()}),
        ("block_table", {"block_table": lambda t: t.long()}),
        ("lse", {"lse": lambda t: t.double()}),
        ("q", {"q": lambda t: t[:, :3], "out": lambda t: t[:, :3], "lse": lambda t: t[:, :3]}),
        ("v_pool", {"k_pool": lambda t: t[:, :1]}),
        ("k_pool", {"max_length": lambda n: 100 * n}),
        ("max_length", {"max_length": lambda n: 0}),
        ("num_splits", {"num_splits": lambda n: 65}),
        ("workspace", {"workspace": lambda t: None, "num_splits": lambda n: 2}),
        ("workspace", {"workspace": lambda t: t[:COUNTER_BYTES], "num_splits": lambda n: 2}),
        ("workspace", {"workspace": lambda t: t.float()}),
    ],
)
def test_a_wrong_argument_is_named(ops: Any, argument: str, change: dict[str, Any]) -> None:
    k_pool, v_pool, table, _, _ = make_pool((40, 100), 2, 64, 16, torch.bfloat16, DEVICE, seed=96)
    q = torch.zeros(2, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    arguments: dict[str, Any] = {
        "out": torch.zeros_like(q),
        "lse": torch.zeros(2, 8, device=DEVICE),
        "workspace": new_workspace(2**20),
        "q": q,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "lengths": int32((40, 100), DEVICE),
        "block_table": table,
        "scale": 0.1,
        "max_length": 100,
        "num_splits": 0,
    }
    arguments.update({name: edit(arguments[name]) for name, edit in change.items()})

    with pytest.raises(RuntimeError, match=f"`{argument}`"):
        ops.decode_attention(**arguments)
