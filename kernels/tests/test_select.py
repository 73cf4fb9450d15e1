"""The select kernel against its definition: forced tokens, pooling, ties, two lists, long rows, bad arguments."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import capture, int32, load_ops, needs_cuda
from select_cases import Case, make_case, score_rows
from torch import Tensor

from hf_sparsekv.ops import reference
from hf_sparsekv.testing.compare import (
    assert_close_fp32,
    assert_repeatable,
    assert_same_selection,
    assert_same_selection_up_to_near_ties,
)

pytestmark = needs_cuda

TILE = 5120
"""Positions that the kernel pools at a time; rows of other lengths end inside a tile."""


@pytest.fixture(scope="module")
def ops() -> Any:
    return load_ops()


def assert_equals_definition(case: Case, ops: Any) -> None:
    """Index, count and retained scores to the last bit: for rows whose sums are exact."""
    index, count, retained = case.run(ops)
    expected_index, expected_count, expected_retained = case.run_reference()
    assert_same_selection(index, expected_index)
    assert torch.equal(count, expected_count)
    assert torch.equal(retained, expected_retained)


@pytest.mark.parametrize("width", [1, 3, 5, 7, 21, 41])
@pytest.mark.parametrize("pooling", ["none", "avg", "max", "forward"])
def test_pooling_of_every_kind_and_width(ops: Any, pooling: str, width: int) -> None:
    case = make_case(
        "exact",
        [700, 333, 40, 1],
        [64, 50, 20, 5],
        700,
        width,
        num_sinks=4,
        num_recent=8,
        pooling=pooling,
        pool_width=width,
    )
    assert_equals_definition(case, ops)


@pytest.mark.parametrize("kind", ["exact", "ties", "equal", "signs"])
@pytest.mark.parametrize("budget", [1, 2, 31, 32, 33, 512, 1023])
def test_ties_go_to_the_lower_position(ops: Any, kind: str, budget: int) -> None:
    case = make_case(kind, [1024, 1000, 65], [budget, max(1, budget - 1), budget], 1024, budget)
    assert_equals_definition(case, ops)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65])
@pytest.mark.parametrize(("num_sinks", "num_recent"), [(0, 0), (4, 0), (0, 16), (4, 16), (32, 32)])
def test_sinks_and_recent_tokens_are_kept(ops: Any, length: int, num_sinks: int, num_recent: int) -> None:
    options = {"num_sinks": num_sinks, "num_recent": num_recent, "pooling": "avg", "pool_width": 7}
    case = make_case("exact", [length, 200], [64, 64], 200, length, capacity=70, **options)
    assert_equals_definition(case, ops)
    index, count, _ = case.run(ops)
    kept = set(index[1, 0].tolist())
    assert set(range(num_sinks)) | set(range(200 - num_recent, 200)) <= kept
    assert int(count[0]) == min(length, 64)


@pytest.mark.parametrize("num_keys", [TILE - 1, TILE, TILE + 1, TILE + 33, 3 * TILE + 7])
@pytest.mark.parametrize("pooling", ["avg", "forward"])
def test_rows_of_several_tiles(ops: Any, num_keys: int, pooling: str) -> None:
    lengths = [num_keys, num_keys - 1, 600]
    case = make_case(
        "exact", lengths, [512] * 3, num_keys, 3, num_sinks=4, num_recent=32, pooling=pooling, pool_width=41
    )
    assert_equals_definition(case, ops)


@pytest.mark.parametrize("num_keys", [65_536, 131_072])
@pytest.mark.parametrize("secondary", [False, True])
def test_rows_that_shared_memory_cannot_hold(ops: Any, num_keys: int, secondary: bool) -> None:
    options = {"pooling": "avg", "pool_width": 7, "secondary": secondary, "share": 0.5}
    case = make_case(
        "ties", [num_keys, num_keys - 77], [4096, 1000], num_keys, 5, num_sinks=4, num_recent=32, **options
    )
    assert_equals_definition(case, ops)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["exact", "ties", "equal"])
def test_two_lists_share_the_budget(ops: Any, kind: str, share: float) -> None:
    options = {"secondary": True, "secondary_pooling": "max", "secondary_width": 9, "share": share}
    case = make_case(
        kind,
        [900, 513, 512, 30],
        [512, 512, 512, 64],
        900,
        7,
        num_sinks=4,
        num_recent=32,
        pooling="avg",
        pool_width=7,
        **options,
    )
    assert_equals_definition(case, ops)


@pytest.mark.parametrize("budget", [37, 38, 39, 100])
def test_two_lists_with_few_free_places(ops: Any, budget: int) -> None:
    case = make_case(
        "exact", [300, 38], [budget, budget], 300, budget, num_sinks=4, num_recent=32, secondary=True, share=0.5
    )
    assert_equals_definition(case, ops)


def test_real_weights_differ_only_at_near_ties(ops: Any) -> None:
    lengths = [5000, 4999, 1200]
    case = make_case("softmax", lengths, [512] * 3, 5000, 1, num_sinks=4, num_recent=32, pooling="avg", pool_width=7)
    index, count, retained = case.run(ops)
    expected_index, expected_count, _ = case.run_reference()
    pooled = reference.pool_scores(case.scores, case.lengths, "avg", 7)
    assert torch.equal(count, expected_count)
    assert_same_selection_up_to_near_ties(index, expected_index, pooled)
    own = pooled.gather(-1, index.clamp_min(0)).masked_fill(index < 0, 0.0)
    assert_close_fp32(retained, own)


def test_huge_and_tiny_scores_are_ordered(ops: Any) -> None:
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 1.0, 1.0 + 2**-23, -1.0, 2**-126, 65504.0])
    scores = values[torch.randperm(values.numel() * 40, generator=torch.Generator().manual_seed(0)) % values.numel()]
    scores = scores.cuda()[None, None]
    for budget in (1, 40, 41, 79, 120, 240, 479):
        budgets = int32([budget], "cuda")
        case = Case(scores=scores, lengths=int32([480], "cuda"), budgets=budgets, capacity=budget)
        assert_equals_definition(case, ops)


def test_twenty_launches_give_the_same_bits(ops: Any) -> None:
    options = {"pooling": "avg", "pool_width": 7, "secondary": True, "share": 0.6}
    case = make_case("ties", [5000, 4000], [512, 400], 5000, 2, num_sinks=4, num_recent=32, **options)
    assert_repeatable(lambda: case.run(ops))


def test_graph_replay_follows_lengths_budgets_and_scores(ops: Any) -> None:
    case = make_case("exact", [800, 700], [100, 100], 800, 4, capacity=128, num_sinks=4, num_recent=16)
    index = torch.empty(2, 3, 128, dtype=torch.int64, device="cuda")
    count = torch.empty(2, dtype=torch.int32, device="cuda")
    retained = torch.empty(2, 3, 128, device="cuda")
    graph = capture(lambda: case.launch(ops, index, count, retained))
    for seed, lengths, budgets in ((10, [90, 800], [64, 128]), (11, [800, 1], [20, 30]), (12, [0, 129], [100, 128])):
        case.scores.copy_(score_rows("exact", 3, 800, lengths, seed))
        case.lengths.copy_(int32(lengths, "cuda"))
        case.budgets.copy_(int32(budgets, "cuda"))
        graph.replay()
        expected_index, expected_count, expected_retained = case.run_reference()
        assert_same_selection(index, expected_index)
        assert torch.equal(count, expected_count)
        assert torch.equal(retained, expected_retained)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(1, 3, 50, dtype=torch.float16)}, "`scores` must be float32"),
        ({"scores": torch.zeros(1, 3, 50).transpose(1, 2)}, "`scores` must be contiguous in its last"),
        ({"lengths": torch.zeros(1, dtype=torch.int64)}, "`lengths` must be int32"),
        ({"budgets": torch.zeros(2, dtype=torch.int32)}, "`budgets` has the wrong shape"),
        ({"pool_width": 4}, "`pool_width` must be odd"),
        ({"pool_width": 43}, "`pool_width` must be odd"),
        ({"num_sinks": -1}, "`num_sinks` must not be negative"),
        ({"share": 1.5}, "`share` must lie in"),
        ({"secondary": torch.zeros(1, 3, 49)}, "`secondary` has the wrong shape"),
    ],
)
def test_a_bad_argument_is_named(ops: Any, changes: dict[str, Any], message: str) -> None:
    case = make_case("exact", [50], [10], 50, 0)
    on_gpu: Any = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in changes.items()}
    wrong = replace(case, **on_gpu)
    index = torch.empty(1, 3, 10, dtype=torch.int64, device="cuda")
    count = torch.empty(1, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        wrong.launch(ops, index, count, torch.empty(1, 3, 10, device="cuda"))


def test_tensors_on_the_cpu_are_named(ops: Any) -> None:
    case = make_case("exact", [50], [10], 50, 0)
    wrong = replace(case, lengths=case.lengths.cpu())
    with pytest.raises(RuntimeError, match="`lengths` must be on CUDA device"):
        wrong.run(ops)


def test_two_lists_too_long_for_shared_memory_are_refused(ops: Any) -> None:
    case = make_case("exact", [60_000], [50_000], 60_000, 0, secondary=True)
    with pytest.raises(RuntimeError, match=r"argument `index`.*bytes of shared memory"):
        case.run(ops)
