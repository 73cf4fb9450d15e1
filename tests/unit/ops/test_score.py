"""`window_lse`, `window_score` and `key_anchor` against fp64, one query row and one key at a time."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hf_sparsekv import ops
from hf_sparsekv.errors import InputError
from hf_sparsekv.ops.reference import pool
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_census, assert_close_fp32

HEADS = [(8, 2), (9, 3), (4, 4)]
DIM, ROWS, KEYS = 8, 4, 11
LENGTHS = (0, 1, ROWS - 1, ROWS, ROWS + 1, KEYS)
SCALE = 0.6
NAN = float("nan")


@pytest.fixture(params=[False, True], ids=["one-tile", "key-by-key"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(pool, "TEMPORARY_BYTES", 1)


def int32(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def problem(heads: int, kv_heads: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Queries and keys, NaN wherever a length says that nothing is there."""
    q = torch.randn(len(lengths), heads, ROWS, DIM)
    k = torch.randn(len(lengths), kv_heads, KEYS, DIM)
    for b, length in enumerate(lengths):
        q[b, :, : max(0, ROWS - length)] = NAN
        k[b, :, length:] = NAN
    return q, k


def brute_weights(q: Tensor, k: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """fp64 weights [B, H, A, N], 0 where a row or key is absent, and LSE [B, H, A], -inf for absent rows."""
    batch, heads, num_rows, _ = q.shape
    p = torch.zeros(batch, heads, num_rows, k.shape[2], dtype=torch.float64)
    lse = torch.full((batch, heads, num_rows), float("-inf"), dtype=torch.float64)
    for b, length in enumerate(lengths):
        for h in range(heads):
            for row in range(num_rows):
                seen = length - num_rows + row + 1
                if seen <= 0:
                    continue
                logits = k[b, h // (heads // k.shape[1]), :seen].double() @ q[b, h, row].double() * SCALE
                lse[b, h, row] = logits.exp().sum().log()
                p[b, h, row, :seen] = logits.softmax(0)
    return p, lse


def brute_score(p: Tensor, lengths: tuple[int, ...], kv_heads: int, rows: str, groups: str) -> Tensor:
    """fp64 [B, K, N]: rows reduced first, over those that exist, then the group."""
    batch, heads, num_rows, num_keys = p.shape
    score = torch.zeros(batch, kv_heads, num_keys, dtype=torch.float64)
    group = heads // kv_heads
    for b, length in enumerate(lengths):
        existing = min(num_rows, length)
        for kv in range(kv_heads):
            own = p[b, kv * group : (kv + 1) * group]
            per_head = own.sum(dim=1) / max(1, existing) if rows == "mean" else own.amax(dim=1)
            score[b, kv] = per_head.sum(dim=0) / group if groups == "mean" else per_head.amax(dim=0)
    return score


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_the_lse_of_each_window_row_is_over_the_keys_up_to_it(heads, kv_heads):
    q, k = problem(heads, kv_heads)
    lse = ops.window_lse(q, k, int32(LENGTHS), SCALE, KEYS)
    assert lse.dtype == torch.float32
    assert_close_fp32(lse, brute_weights(q, k, LENGTHS)[1])


def test_a_query_of_zeros_counts_the_keys_up_to_its_row():
    lengths = (700, 3, 513)
    q, k = torch.zeros(3, 4, 5, DIM), torch.randn(3, 2, 700, DIM)
    counts = (torch.tensor(lengths)[:, None] - 4 + torch.arange(5)).clamp_min(0)
    assert_census(ops.window_lse(q, k, int32(lengths), SCALE, 700), counts[:, None])


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", ["mean", "max"])
@pytest.mark.parametrize("groups", ["mean", "max"])
def test_the_score_reduces_rows_then_the_group(heads, kv_heads, rows, groups):
    q, k = problem(heads, kv_heads)
    p, lse = brute_weights(q, k, LENGTHS)
    score, diversity = ops.window_score(q, k, lse.float(), int32(LENGTHS), SCALE, KEYS, rows, groups)
    assert_close_fp32(score, brute_score(p, LENGTHS, kv_heads, rows, groups))
    assert diversity.shape == (0,)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_the_mean_score_of_a_request_sums_to_one(heads, kv_heads):
    q, k = problem(heads, kv_heads)
    lse = ops.window_lse(q, k, int32(LENGTHS), SCALE, KEYS)
    score, _ = ops.window_score(q, k, lse, int32(LENGTHS), SCALE, KEYS)
    mass = torch.tensor([0.0 if length == 0 else 1.0 for length in LENGTHS])
    assert_close_fp32(score.sum(dim=-1), mass[:, None].expand(-1, kv_heads))


@pytest.mark.parametrize(("rows", "groups"), [("mean", "mean"), ("max", "max")])
def test_a_value_norm_multiplies_and_is_not_read_past_the_length(rows, groups):
    q, k = problem(8, 2)
    norm = torch.rand(len(LENGTHS), 2, KEYS) + 0.1
    for b, length in enumerate(LENGTHS):
        norm[b, :, length:] = NAN
    p, lse = brute_weights(q, k, LENGTHS)
    score, _ = ops.window_score(q, k, lse.float(), int32(LENGTHS), SCALE, KEYS, rows, groups, None, norm)
    assert_close_fp32(score, brute_score(p, LENGTHS, 2, rows, groups) * norm.double().nan_to_num(0.0))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_the_anchor_is_the_mean_direction_and_diversity_the_negative_cosine_to_it(heads, kv_heads):
    q, k = problem(heads, kv_heads)
    anchor = ops.key_anchor(k, int32(LENGTHS), KEYS)
    expected_anchor = torch.zeros(len(LENGTHS), kv_heads, DIM, dtype=torch.float64)
    expected = torch.zeros(len(LENGTHS), kv_heads, KEYS, dtype=torch.float64)
    for b, length in enumerate(LENGTHS[1:], start=1):
        unit = k[b, :, :length].double()
        unit = unit / unit.pow(2).sum(-1, keepdim=True).sqrt()
        expected_anchor[b] = unit.sum(dim=1) / length
        direction = expected_anchor[b] / expected_anchor[b].pow(2).sum(-1, keepdim=True).sqrt()
        expected[b, :, :length] = -(unit * direction[:, None]).sum(-1)
    lse = ops.window_lse(q, k, int32(LENGTHS), SCALE, KEYS)
    plain, _ = ops.window_score(q, k, lse, int32(LENGTHS), SCALE, KEYS)
    score, diversity = ops.window_score(q, k, lse, int32(LENGTHS), SCALE, KEYS, anchor=anchor)
    assert_close_fp32(anchor, expected_anchor)
    assert_close_fp32(diversity, expected)
    assert_bitwise_equal(score, plain)


def test_keys_of_zeros_have_no_direction_and_do_no_harm():
    k = torch.zeros(1, 2, KEYS, DIM)
    anchor = ops.key_anchor(k, int32((KEYS,)), KEYS)
    _, diversity = ops.window_score(
        torch.randn(1, 4, ROWS, DIM), k, torch.zeros(1, 4, ROWS), int32((KEYS,)), SCALE, KEYS, anchor=anchor
    )
    assert torch.equal(anchor, torch.zeros(1, 2, DIM))
    assert torch.equal(diversity, torch.zeros(1, 2, KEYS))


@pytest.mark.parametrize("rows", ["mean", "max"])
def test_more_rows_and_keys_than_one_tile_holds(rows, monkeypatch):
    """300 rows make two row tiles; 32 KiB of temporaries make many column tiles, a partial one included."""
    monkeypatch.setattr(pool, "TEMPORARY_BYTES", 2**15)
    q, k, lengths = torch.randn(2, 2, 300, DIM), torch.randn(2, 1, 331, DIM), (331, 290)
    q[1, :, :10] = k[1, :, 290:] = NAN
    p, expected_lse = brute_weights(q, k, lengths)
    lse = ops.window_lse(q, k, int32(lengths), SCALE, 331)
    score, _ = ops.window_score(q, k, lse, int32(lengths), SCALE, 331, rows)
    assert_close_fp32(lse, expected_lse)
    assert_close_fp32(score, brute_score(p, lengths, 1, rows, "mean"))


def test_half_precision_keys_are_scored_in_fp32():
    q, k = (t.to(torch.bfloat16) for t in problem(8, 2))
    p, expected_lse = brute_weights(q, k, LENGTHS)
    lse = ops.window_lse(q, k, int32(LENGTHS), SCALE, KEYS)
    score, _ = ops.window_score(q, k, lse, int32(LENGTHS), SCALE, KEYS)
    assert lse.dtype == score.dtype == torch.float32
    assert_close_fp32(lse, expected_lse)
    assert_close_fp32(score, brute_score(p, LENGTHS, 2, "mean", "mean"))


def test_the_lse_of_an_absent_row_is_never_read():
    q, k = problem(8, 2)
    lse = ops.window_lse(q, k, int32(LENGTHS), SCALE, KEYS)
    poisoned = lse.masked_fill(lse == float("-inf"), NAN)
    for rows in ("mean", "max"):
        expected, _ = ops.window_score(q, k, lse, int32(LENGTHS), SCALE, KEYS, rows)
        actual, _ = ops.window_score(q, k, poisoned, int32(LENGTHS), SCALE, KEYS, rows)
        assert_bitwise_equal(actual, expected)


def test_a_request_scores_the_same_with_any_bound_on_the_length():
    q, k = problem(8, 2)
    lse = ops.window_lse(q, k, int32(LENGTHS), SCALE, KEYS)
    wide = torch.cat([k, torch.full((len(LENGTHS), 2, 6, DIM), NAN)], dim=2)
    score, _ = ops.window_score(q, k, lse, int32(LENGTHS), SCALE, KEYS)
    wider, _ = ops.window_score(q, wide, lse, int32(LENGTHS), SCALE, KEYS + 6)
    assert_close_fp32(wider[..., :KEYS], score)
    assert torch.equal(wider[..., KEYS:], torch.zeros(len(LENGTHS), 2, 6))


def test_huge_logits_give_weights_between_zero_and_one():
    q, k = 1e12 * torch.randn(1, 4, ROWS, DIM), 1e12 * torch.randn(1, 2, KEYS, DIM)
    lse = ops.window_lse(q, k, int32((KEYS,)), 1.0, KEYS)
    score, _ = ops.window_score(q, k, lse, int32((KEYS,)), 1.0, KEYS, "max", "max")
    assert lse.isfinite().all()
    assert (score >= 0).all() and (score <= 1).all()


def peak_bytes(call) -> int:
    """The most memory that a call held at one time, by every allocation and release that torch made for it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("num_rows", [64, 256])
def test_long_prompts_are_scored_in_bounded_memory(num_rows):
    """256 rows x 8 heads x 20,000 keys are 164 MB of logits at once."""
    num_keys = 20_000
    q, k, lengths = torch.randn(1, 8, num_rows, 64), torch.randn(1, 2, num_keys, 64), int32((num_keys,))
    lse = torch.zeros(1, 8, num_rows)
    assert 8 * 2**20 <= peak_bytes(lambda: torch.empty(2**20).add(1)) < 9 * 2**20  # the ruler measures
    assert peak_bytes(lambda: ops.window_lse(q, k, lengths, 0.125, num_keys)) < 64e6
    assert peak_bytes(lambda: ops.window_score(q, k, lse, lengths, 0.125, num_keys)) < 64e6


@pytest.mark.parametrize("name", ["row_reduction", "group_reduction"])
def test_another_reduction_is_refused_by_name(name):
    """As the compiled kernels do, and not taken for the maximum."""
    q, k = problem(8, 2)
    lse = ops.window_lse(q, k, int32(LENGTHS), SCALE, KEYS)
    with pytest.raises(InputError, match=f"`{name}` is 'median': it must be one of mean, max"):
        ops.window_score(q, k, lse, int32(LENGTHS), SCALE, KEYS, **{name: "median"})
