"""A paged pool is a layout and nothing else: every op gives what it gives on plain rows.

Tables are shuffled; pages and slots that hold nothing are NaN; unused table entries are -1 or past every pool.
"""

import pytest
import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_close_fp32, assert_same_selection

DIM, ROWS, KEYS = 8, 4, 12
LENGTHS = (0, 1, 3, 4, 5, KEYS)
SCALE = 0.4
NAN = float("nan")
POISON = (-1, 2**31 - 1)
PAGE_SIZES = [1, 3, 4, 5, 16]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(kv_heads: int, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    rows = torch.randn(len(lengths), kv_heads, KEYS, DIM)
    for b, length in enumerate(lengths):
        rows[b, :, length:] = NAN
    return rows


def page_table(lengths: tuple[int, ...], page_size: int) -> tuple[int, Tensor]:
    """Number of pages and int32 [B, M]: shuffled, two pages unused, poison behind each request's last page."""
    used = [-(-length // page_size) for length in lengths]
    pages = (torch.randperm(sum(used) + 2) if sum(used) else torch.arange(2)).tolist()
    table = torch.tensor([POISON * (KEYS // page_size + 2)] * len(lengths), dtype=torch.int32)[
        :, : KEYS // page_size + 2
    ]
    for b, count in enumerate(used):
        for m in range(count):
            table[b, m] = pages.pop()
    return sum(used) + 2, table


def into_pages(rows: Tensor, page_size: int, num_pages: int, table: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The pool [P, K, S, D] that holds `rows` [B, K, N, D]."""
    pool = torch.full((num_pages, rows.shape[1], page_size, DIM), NAN)
    for b, length in enumerate(lengths):
        for j in range(length):
            pool[table[b, j // page_size], :, j % page_size] = rows[b, :, j]
    return pool


def out_of_pages(pool: Tensor, table: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The inverse of `into_pages`, [B, K, N, D]."""
    page_size = pool.shape[2]
    rows = torch.full((len(lengths), pool.shape[1], KEYS, DIM), NAN)
    for b, length in enumerate(lengths):
        for j in range(length):
            rows[b, :, j] = pool[table[b, j // page_size], :, j % page_size]
    return rows


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3), (4, 4)])
def test_scoring_reads_pages_as_it_reads_rows(page_size, heads, kv_heads):
    q, k, lengths = torch.randn(len(LENGTHS), heads, ROWS, DIM), poisoned(kv_heads), int32(*LENGTHS)
    num_pages, table = page_table(LENGTHS, page_size)
    pool = into_pages(k, page_size, num_pages, table, LENGTHS)
    lse = ops.window_lse(q, k, lengths, SCALE, KEYS)
    anchor = ops.key_anchor(k, lengths, KEYS)
    assert_close_fp32(ops.window_lse(q, pool, lengths, SCALE, KEYS, table), lse)
    assert_close_fp32(ops.key_anchor(pool, lengths, KEYS, table), anchor)
    expected = ops.window_score(q, k, lse, lengths, SCALE, KEYS, anchor=anchor)
    actual = ops.window_score(q, pool, lse, lengths, SCALE, KEYS, block_table=table, anchor=anchor)
    for paged, plain in zip(actual, expected, strict=True):
        assert_close_fp32(paged, plain)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_compaction_gathers_from_pages_as_from_rows(page_size):
    k, v = poisoned(3), poisoned(3)
    num_pages, table = page_table(LENGTHS, page_size)
    index, _, _ = ops.select(torch.rand(len(LENGTHS), 3, KEYS), int32(*LENGTHS), int32(*[4] * 6), 5, 1, 1, "none", 1)
    pools = [into_pages(t, page_size, num_pages, table, LENGTHS) for t in (k, v)]
    for paged, plain in zip(ops.compact(*pools, index, table), ops.compact(k, v, index), strict=True):
        assert_bitwise_equal(paged, plain)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3), (4, 4)])
def test_decode_attention_reads_pages_as_it_reads_rows(page_size, heads, kv_heads):
    q, k, v = torch.randn(len(LENGTHS), heads, DIM), poisoned(kv_heads), poisoned(kv_heads)
    num_pages, table = page_table(LENGTHS, page_size)
    pools = [into_pages(t, page_size, num_pages, table, LENGTHS) for t in (k, v)]
    expected = ops.decode_attention(q, k, v, int32(*LENGTHS), SCALE, KEYS)
    actual = ops.decode_attention(q, *pools, int32(*LENGTHS), SCALE, KEYS, table)
    for paged, plain in zip(actual, expected, strict=True):
        assert_close_fp32(paged, plain)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_writing_to_pages_changes_the_slots_asked_for_and_no_other(page_size):
    lengths = LENGTHS[1:]
    k, v = poisoned(2, lengths), poisoned(2, lengths)
    num_pages, table = page_table(lengths, page_size)
    slots = torch.tensor([[0, -1], [2, 0], [-1, -1], [4, 3], [11, 5]])
    pools = [into_pages(t, page_size, num_pages, table, lengths) for t in (k, v)]
    new_k, new_v = torch.randn(5, 2, DIM), torch.randn(5, 2, DIM)
    ops.write_slots(*pools, new_k, new_v, slots, table)
    for rows, new in ((k, new_k), (v, new_v)):
        for b, head in (slots >= 0).nonzero().tolist():
            rows[b, head, slots[b, head]] = new[b, head]
    for pool, rows in zip(pools, (k, v), strict=True):
        assert_bitwise_equal(pool, into_pages(rows, page_size, num_pages, table, lengths))


@pytest.mark.parametrize("poison", POISON)
def test_a_request_that_writes_nothing_needs_no_page(poison):
    k_pool, v_pool = torch.zeros(2, 1, 3, DIM), torch.zeros(2, 1, 3, DIM)
    table = torch.tensor([[1], [poison]], dtype=torch.int32)
    ones = torch.ones(2, 1, DIM)
    ops.write_slots(k_pool, v_pool, ones, ones, torch.tensor([[0], [-1]]), table)
    expected = torch.zeros(2, 1, 3, DIM)
    expected[1, 0, 0] = 1.0
    assert_bitwise_equal(k_pool, expected)
    assert_bitwise_equal(v_pool, expected)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("is_ring", [False, True])
def test_decode_steps_in_pages_are_decode_steps_in_rows(page_size, is_ring):
    lengths, budgets = (KEYS, 5, 1), (KEYS, 7, 6)
    k, v = poisoned(2, lengths), poisoned(2, lengths)
    num_pages, table = page_table(budgets, page_size)  # pages for the whole budget, as at admission
    pools = [into_pages(t, page_size, num_pages, table, lengths) for t in (k, v)]
    positions = torch.arange(KEYS, dtype=torch.int32).expand(3, 2, KEYS).contiguous()
    scores = positions.float() if is_ring else torch.rand(3, 2, KEYS)
    state = [positions, scores, int32(*lengths), int32(*budgets)]
    next_position = int32(*lengths)
    victims = ops.find_victim(scores, positions, state[2], state[3], next_position, 1, 2)
    plain = [t.clone() for t in (k, v, *state, victims, next_position)]
    paged = [*pools, *(t.clone() for t in (*state, victims, next_position))]
    for _ in range(9):
        new = (torch.randn(3, 4, DIM), torch.randn(3, 2, DIM), torch.randn(3, 2, DIM))
        expected = ops.decode_step(*new, *plain, SCALE, 0.8, 0.2, 1, 2, is_ring)
        assert_close_fp32(ops.decode_step(*new, *paged, SCALE, 0.8, 0.2, 1, 2, is_ring, table), expected)
        for i in (2, 4, 5, 6, 7):  # positions, lengths, budgets, victims, next positions
            assert_same_selection(paged[i], plain[i])
        assert_close_fp32(paged[3], plain[3])
        used = tuple(plain[4].tolist())
        for pool, rows in zip(paged[:2], plain[:2], strict=True):
            assert_bitwise_equal(out_of_pages(pool, table, used), rows)
    assert used == budgets
