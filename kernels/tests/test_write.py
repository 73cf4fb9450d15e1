"""The write kernels against their definition: per request and packed, skipped rows, positions, bad arguments."""

from typing import Any

import pytest
import torch
from helpers import capture, int32, load_ops, make_pool, needs_cuda, padded_rows
from torch import Tensor

from hf_sparsekv.ops import reference
from hf_sparsekv.testing.compare import assert_bitwise_equal

pytestmark = needs_cuda

HEADS = 3
CAPACITY = 50


@pytest.fixture(scope="module")
def ops() -> Any:
    return load_ops()


def copied(pool: Tensor) -> Tensor:
    """The same values in the same layout, in memory of its own."""
    return torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=pool.device).copy_(pool)


def readable(table: Tensor | None, pool: Tensor) -> Tensor | None:
    """The definition reads slot 0 also where it writes nothing: lead unused entries to a page that nobody uses."""
    if table is None:
        return None
    used = set(table.flatten().tolist())
    spare = next(page for page in range(pool.shape[0]) if page not in used)
    return torch.where((table < 0) | (table >= pool.shape[0]), spare, table)


def slots_of(lengths: list[int], seed: int) -> Tensor:
    """int64 [B, K]: a slot below each length, another per head; -1 for empty requests and now and then."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.full((len(lengths), HEADS), -1, dtype=torch.int64)
    for b, length in enumerate(lengths):
        for head in range(HEADS):
            slots[b, head] = -1 if length == 0 else int(torch.randint(-1, length, (), generator=generator))
    return slots.cuda()


@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 32])
@pytest.mark.parametrize("dim", [64, 128, 72])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_head_writes_its_own_slot(ops: Any, page_size: int | None, dim: int, dtype: torch.dtype) -> None:
    lengths = [0, 1, 16, 17, 50]
    k_pool, v_pool, table, _, _ = make_pool(lengths, HEADS, dim, page_size, dtype, "cuda", seed=1)
    expected_k, expected_v = copied(k_pool), copied(v_pool)
    k, v = (padded_rows((len(lengths), HEADS, dim), dtype, "cuda", seed) for seed in (2, 3))
    slots = slots_of(lengths, seed=4)
    ops.write_kv(k_pool, v_pool, k, v, slots, table)
    reference.write_slots(expected_k, expected_v, k, v, slots, readable(table, k_pool))
    assert_bitwise_equal(k_pool, expected_k)
    assert_bitwise_equal(v_pool, expected_v)


def test_positions_follow_the_slots(ops: Any) -> None:
    lengths = [0, 1, 16, 17, 50]
    k_pool, v_pool, table, _, _ = make_pool(lengths, HEADS, 64, 16, torch.bfloat16, "cuda", seed=1)
    k, v = (padded_rows((len(lengths), HEADS, 64), torch.bfloat16, "cuda", seed) for seed in (2, 3))
    slots = slots_of(lengths, seed=5)
    positions = torch.full((len(lengths), HEADS, CAPACITY + 2), -7, dtype=torch.int32, device="cuda")[..., :CAPACITY]
    new_positions = int32([10, 11, 12, 13, 14], "cuda")
    ops.write_kv(k_pool, v_pool, k, v, slots, table, positions, new_positions)
    expected = torch.full_like(positions, -7)
    for b in range(len(lengths)):
        for head in range(HEADS):
            if slots[b, head] >= 0:
                expected[b, head, slots[b, head]] = new_positions[b]
    assert torch.equal(positions, expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_packed_tokens_go_to_their_pages(ops: Any, num_tokens: int, page_size: int) -> None:
    num_pages, dim = 330, 128
    shape = (num_pages, HEADS, page_size, dim)
    k_pool, v_pool = (torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    # A pool that keeps the heads of a token together, seen in the kernel's order of dimensions.
    k_pool = k_pool.transpose(1, 2).contiguous().transpose(1, 2)
    expected_k, expected_v = copied(k_pool), copied(v_pool)
    k, v = (padded_rows((num_tokens, HEADS, dim), torch.bfloat16, "cuda", seed) for seed in (6, 7))
    order = torch.randperm(num_pages * page_size, generator=torch.Generator().manual_seed(8))[:num_tokens]
    mapping = torch.where(torch.arange(num_tokens) % 5 == 3, -1, order).cuda()
    positions = torch.full(shape[:3], -7, dtype=torch.int32, device="cuda")
    new_positions = torch.arange(1000, 1000 + num_tokens, dtype=torch.int32, device="cuda")
    ops.write_kv_packed(k_pool, v_pool, k, v, mapping, positions, new_positions)
    expected_positions = torch.full_like(positions, -7)
    kept = mapping >= 0
    pages, offsets = mapping[kept] // page_size, mapping[kept] % page_size
    expected_k[pages, :, offsets] = k[kept]
    expected_v[pages, :, offsets] = v[kept]
    expected_positions[pages, :, offsets] = new_positions[kept][:, None]
    assert_bitwise_equal(k_pool, expected_k)
    assert_bitwise_equal(v_pool, expected_v)
    assert torch.equal(positions, expected_positions)


def test_offsets_beyond_two_to_the_31_elements(ops: Any) -> None:
    page_size, dim, num_pages = 16, 128, 2**31 // (16 * 128) + 2
    pool = torch.empty(num_pages, 1, page_size, dim, dtype=torch.bfloat16, device="cuda")
    pool[-1] = 0
    row = torch.randn(1, 1, dim, device="cuda").bfloat16()
    slot = torch.tensor([num_pages * page_size - 2], device="cuda")
    ops.write_kv_packed(pool, pool, row, row, slot)
    assert_bitwise_equal(pool[-1, 0, -2], row[0, 0])
    assert not pool[-1, 0, -1].any()


def test_graph_replay_follows_slots_and_table(ops: Any) -> None:
    lengths = [5, 16, 50]
    k_pool, v_pool, table, _, _ = make_pool(lengths, HEADS, 64, 16, torch.bfloat16, "cuda", seed=9)
    k, v = (padded_rows((3, HEADS, 64), torch.bfloat16, "cuda", seed) for seed in (10, 11))
    slots = slots_of(lengths, seed=12)
    graph = capture(lambda: ops.write_kv(k_pool, v_pool, k, v, slots, table))
    expected_k, expected_v = copied(k_pool), copied(v_pool)
    slots.copy_(slots_of(lengths, seed=13))
    k.mul_(2)
    graph.replay()
    reference.write_slots(expected_k, expected_v, k, v, slots, readable(table, k_pool))
    assert_bitwise_equal(k_pool, expected_k)
    assert_bitwise_equal(v_pool, expected_v)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("slots", lambda t: t.int(), "`slots` must be int64"),
        ("slots", lambda t: t[:1], "`slots` has the wrong shape"),
        ("k", lambda t: t.half(), "`k` must have the dtype"),
        ("v", lambda t: t.cpu(), "`v` must be on CUDA device"),
        ("v", lambda t: t[:, :2], "`v` has the wrong shape"),
        ("block_table", lambda t: t.long(), "`block_table` must be int32"),
        ("positions", lambda t: t.long(), "`positions` must be int32"),
        ("new_positions", lambda _: None, "`new_positions` must be given exactly when"),
    ],
)
def test_a_bad_argument_is_named(ops: Any, name: str, wrong: Any, message: str) -> None:
    k_pool, v_pool, table, _, _ = make_pool([20, 30], HEADS, 64, 16, torch.bfloat16, "cuda", seed=14)
    arguments = {
        "k_pool": k_pool,
        "v_pool": v_pool,
        "k": torch.zeros(2, HEADS, 64, dtype=torch.bfloat16, device="cuda"),
        "v": torch.zeros(2, HEADS, 64, dtype=torch.bfloat16, device="cuda"),
        "slots": slots_of([20, 30], seed=15),
        "block_table": table,
        "positions": torch.zeros(2, HEADS, 30, dtype=torch.int32, device="cuda"),
        "new_positions": int32([1, 2], "cuda"),
    }
    arguments[name] = wrong(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        ops.write_kv(*arguments.values())
