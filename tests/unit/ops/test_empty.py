"""No keys, no rows, windows of no width, budgets without a place: what the definitions say where little is there."""

import pytest
import torch

from hf_sparsekv.errors import InputError
from hf_sparsekv.ops import reference
from hf_sparsekv.testing.compare import assert_bitwise_equal

BATCH, HEADS, KV_HEADS, DIM, SLOTS = 2, 4, 2, 8, 4
NONE = torch.zeros(BATCH, dtype=torch.int32)
BUDGETS = torch.full((BATCH,), 3, dtype=torch.int32)
SCORES = torch.zeros(BATCH, KV_HEADS, 0)
KEYS = torch.zeros(BATCH, KV_HEADS, 0, DIM)


@pytest.mark.parametrize("pooling", ["none", "avg", "max", "forward"])
@pytest.mark.parametrize("width", [1, 7, 41])
def test_pooling_no_keys_gives_none(pooling, width):
    assert reference.pool_scores(SCORES, NONE, pooling, width).shape == SCORES.shape


@pytest.mark.parametrize("has_second", [False, True])
@pytest.mark.parametrize("pooling", ["none", "avg", "forward"])
def test_selecting_from_no_keys_keeps_nothing(has_second, pooling):
    second = (SCORES, "avg", 7, 0.5) if has_second else ()
    index, count, retained = reference.select(SCORES, NONE, BUDGETS, SLOTS, 1, 1, pooling, 7, *second)
    assert_bitwise_equal(index, torch.full((BATCH, KV_HEADS, SLOTS), -1))
    assert_bitwise_equal(count, NONE)
    assert_bitwise_equal(retained, torch.zeros(BATCH, KV_HEADS, SLOTS))


@pytest.mark.parametrize("is_paged", [False, True])
def test_compacting_no_keys_gives_zeros(is_paged):
    index = torch.full((BATCH, KV_HEADS, SLOTS), -1)
    pool = torch.full((1, KV_HEADS, 16, DIM), torch.nan) if is_paged else KEYS
    table = torch.zeros(BATCH, 0, dtype=torch.int32) if is_paged else None
    for kept in reference.compact(pool, pool, index, table):
        assert_bitwise_equal(kept, torch.zeros(BATCH, KV_HEADS, SLOTS, DIM))


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize(("num_rows", "num_keys"), [(3, 0), (0, 5), (0, 0)])
def test_without_rows_or_keys_nothing_is_scored(reduction, num_rows, num_keys):
    q, keys = torch.randn(BATCH, HEADS, num_rows, DIM), torch.randn(BATCH, KV_HEADS, num_keys, DIM)
    lengths = torch.full((BATCH,), num_keys, dtype=torch.int32)
    lse = reference.window_lse(q, keys, lengths, 1.0, num_keys)
    assert_bitwise_equal(lse, torch.full((BATCH, HEADS, num_rows), float("-inf")))
    score, cosine = reference.window_score(
        q, keys, lse, lengths, 1.0, num_keys, reduction, reduction, None, None, torch.ones(BATCH, KV_HEADS, DIM)
    )
    assert_bitwise_equal(score, torch.zeros(BATCH, KV_HEADS, num_keys))
    assert cosine.shape == score.shape
    assert reference.key_anchor(keys, lengths, num_keys).isfinite().all()


def test_a_query_over_no_slots_gives_zero():
    q = torch.randn(BATCH, HEADS, DIM)
    output, lse, probs = reference.decode_attention(q, KEYS, KEYS, NONE, 1.0, 0)
    assert_bitwise_equal(output, torch.zeros_like(q))
    assert_bitwise_equal(lse, torch.full((BATCH, HEADS), float("-inf")))
    assert probs.shape == SCORES.shape


@pytest.mark.parametrize("width", [0, -1, 2, 4, 40, 42, 43])
@pytest.mark.parametrize("num_keys", [0, 20])
def test_windows_of_another_width_are_refused(width, num_keys):
    scores = torch.rand(BATCH, KV_HEADS, num_keys)
    lengths = torch.full((BATCH,), num_keys, dtype=torch.int32)
    for pooling in ("none", "avg", "max", "forward"):
        with pytest.raises(InputError, match=rf"odd, from 1 to 41: got {width}"):
            reference.pool_scores(scores, lengths, pooling, width)
    with pytest.raises(InputError, match=f"got {width}"):
        reference.select(scores, lengths, BUDGETS, SLOTS, 1, 1, "avg", width)
    with pytest.raises(InputError, match=f"got {width}"):
        reference.select(scores, lengths, BUDGETS, SLOTS, 1, 1, "avg", 7, scores, "avg", width, 0.5)


@pytest.mark.parametrize("length", [3, 4, 6, 8, 20])
@pytest.mark.parametrize("has_second", [False, True])
def test_a_budget_above_the_capacity_is_the_capacity(length, has_second):
    """Also where the whole row fits the budget, but not the places."""
    scores, lengths = torch.rand(1, KV_HEADS, length), torch.tensor([length], dtype=torch.int32)
    second = (torch.rand(1, KV_HEADS, length), "avg", 3, 0.5) if has_second else ()
    results = [
        reference.select(scores, lengths, torch.tensor([budget], dtype=torch.int32), SLOTS, 1, 2, "avg", 3, *second)
        for budget in (8, SLOTS)
    ]
    for given, capped in zip(*results, strict=True):
        assert_bitwise_equal(given, capped)
    index, count, _ = results[0]
    assert count.tolist() == [min(length, SLOTS)]
    assert index[0, :, : count[0]].min() == 0 and (index[0, :, count[0] - 1] == length - 1).all()
