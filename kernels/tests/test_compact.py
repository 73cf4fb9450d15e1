"""The compact kernel against its definition: dense and paged, in and out, absent tokens, bad arguments."""

from typing import Any

import pytest
import torch
from helpers import capture, int32, load_ops, make_pool, needs_cuda, poisoned_rows
from torch import Tensor

from hf_sparsekv.ops import reference
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_repeatable

pytestmark = needs_cuda

LENGTHS = [0, 1, 47, 48, 49, 200]
HEADS = 3


@pytest.fixture(scope="module")
def ops() -> Any:
    return load_ops()


def random_index(lengths: list[int], capacity: int, seed: int) -> Tensor:
    """int64 [B, K, C]: up to C ascending slots of each request, another choice per head, then -1."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.full((len(lengths), HEADS, capacity), -1, dtype=torch.int64)
    for b, length in enumerate(lengths):
        for head in range(HEADS):
            kept = torch.randperm(length, generator=generator)[:capacity].sort().values
            index[b, head, : len(kept)] = kept
    return index.cuda()


@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 32])
@pytest.mark.parametrize("dim", [64, 128, 72])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kept_rows_are_gathered(ops: Any, page_size: int | None, dim: int, dtype: torch.dtype) -> None:
    k_pool, v_pool, table, _, _ = make_pool(LENGTHS, HEADS, dim, page_size, dtype, "cuda", seed=1)
    index = random_index(LENGTHS, 48, seed=2)
    k_out, v_out = (poisoned_rows((len(LENGTHS), HEADS, 48, dim), dtype, "cuda") for _ in range(2))
    ops.compact(k_out, v_out, k_pool, v_pool, index, table)
    expected_k, expected_v = reference.compact(k_pool, v_pool, index, table)
    assert_bitwise_equal(k_out, expected_k)
    assert_bitwise_equal(v_out, expected_v)


@pytest.mark.parametrize("in_page", [None, 16])
@pytest.mark.parametrize("out_page", [5, 16])
def test_rows_go_straight_into_pages(ops: Any, in_page: int | None, out_page: int) -> None:
    dtype, dim, capacity = torch.bfloat16, 128, 40
    k_pool, v_pool, table, _, _ = make_pool(LENGTHS, HEADS, dim, in_page, dtype, "cuda", seed=3)
    index = random_index(LENGTHS, capacity, seed=4)
    kept = [min(length, capacity) for length in LENGTHS]
    # A pool of the right shape, whose pages are then wiped: only the kernel's rows may appear in them.
    k_out, v_out, out_table, _, _ = make_pool(kept, HEADS, dim, out_page, dtype, "cuda", seed=5, capacity=capacity)
    assert out_table is not None
    for pool in (k_out, v_out):
        pool.fill_(float("nan"))
    ops.compact(k_out, v_out, k_pool, v_pool, index, table, out_table)
    expected = reference.compact(k_pool, v_pool, index, table)
    num_written = 0
    for pool, rows in zip((k_out, v_out), expected, strict=True):
        for b, count in enumerate(kept):
            for slot in range(count):
                page = int(out_table[b, slot // out_page])
                assert_bitwise_equal(pool[page, :, slot % out_page], rows[b, :, slot])
                num_written += HEADS * dim
    written = sum(int((~pool.isnan()).sum()) for pool in (k_out, v_out))
    assert written == num_written, "rows without a token were written"


def test_twenty_launches_give_the_same_bits(ops: Any) -> None:
    k_pool, v_pool, table, _, _ = make_pool(LENGTHS, HEADS, 64, 16, torch.bfloat16, "cuda", seed=6)
    index = random_index(LENGTHS, 48, seed=7)

    def launch() -> list[Tensor]:
        out = [poisoned_rows((len(LENGTHS), HEADS, 48, 64), torch.bfloat16, "cuda") for _ in range(2)]
        ops.compact(*out, k_pool, v_pool, index, table)
        return out

    assert_repeatable(launch)


def test_graph_replay_follows_index_and_table(ops: Any) -> None:
    k_pool, v_pool, table, _, _ = make_pool(LENGTHS, HEADS, 64, 16, torch.bfloat16, "cuda", seed=8)
    assert table is not None
    index = random_index(LENGTHS, 48, seed=9)
    k_out, v_out = (poisoned_rows((len(LENGTHS), HEADS, 48, 64), torch.bfloat16, "cuda") for _ in range(2))
    graph = capture(lambda: ops.compact(k_out, v_out, k_pool, v_pool, index, table))
    table[5, :3] = table[5, :3].flip(0)
    index.copy_(random_index([0, 0, 40, 1, 49, 33], 48, seed=10))
    graph.replay()
    expected_k, expected_v = reference.compact(k_pool, v_pool, index, table)
    assert_bitwise_equal(k_out, expected_k)
    assert_bitwise_equal(v_out, expected_v)


def test_offsets_beyond_two_to_the_31_elements(ops: Any) -> None:
    page_size, dim, num_pages = 16, 128, 2**31 // (16 * 128) + 2
    pool = torch.empty(num_pages, 1, page_size, dim, dtype=torch.bfloat16, device="cuda")
    pool[-1] = torch.randn(page_size, dim, device="cuda")
    table = int32([num_pages - 1], "cuda")[None]
    index = torch.tensor([[[3, 15]]], device="cuda")
    k_out, v_out = (torch.empty(1, 1, 2, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ops.compact(k_out, v_out, pool, pool, index, table)
    assert_bitwise_equal(k_out[0, 0], pool[-1, 0, [3, 15]])
    assert_bitwise_equal(v_out, k_out)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("index", lambda t: t.int(), "`index` must be int64"),
        ("index", lambda t: t[:, :2], "`index` has the wrong shape"),
        ("index", lambda t: t.cpu(), "`index` must be on CUDA device"),
        ("k_out", lambda t: t.half(), "`k_out` must have the dtype"),
        ("k_out", lambda t: t[:, :, :4], "`v_out` has the wrong shape"),
        ("v_pool", lambda t: t[..., :56], "`v_pool` has the wrong shape"),
        ("k_pool", lambda t: t.transpose(2, 3), "`k_pool` must be contiguous in its last"),
        ("k_pool", lambda t: torch.empty(3, HEADS, 32, 65, dtype=t.dtype, device="cuda")[..., 1:], "16-byte"),
        ("in_table", lambda t: t.long(), "`in_table` must be int32"),
        ("in_table", lambda _: None, "`k_pool` must have one page per request"),
    ],
)
def test_a_bad_argument_is_named(ops: Any, name: str, wrong: Any, message: str) -> None:
    k_pool, v_pool, table, _, _ = make_pool([20, 30], HEADS, 64, 16, torch.bfloat16, "cuda", seed=11)
    arguments = {
        "k_out": torch.empty(2, HEADS, 8, 64, dtype=torch.bfloat16, device="cuda"),
        "v_out": torch.empty(2, HEADS, 8, 64, dtype=torch.bfloat16, device="cuda"),
        "k_pool": k_pool,
        "v_pool": v_pool,
        "index": random_index([20, 30], 8, seed=12),
        "in_table": table,
    }
    arguments[name] = wrong(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        ops.compact(*arguments.values())
