"""decode_step against hf_sparsekv.ops.reference: single steps, long runs, ties, protection, repeatability.

Shapes: B request, H query head, K KV head, G = H / K, D head dim, C slots per request.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_cases import (
    COUNTER_BYTES,
    DEVICE,
    adopt_victims,
    check_step,
    make_state,
    nan_like,
    new_token,
    new_workspace,
    run_reference,
    run_step,
)
from helpers import assert_bitwise_equal, capture, int32, load_ops, needs_cuda
from torch import Tensor

from hf_sparsekv.testing.compare import assert_repeatable

pytestmark = needs_cuda


@pytest.fixture(scope="module")
def ops() -> Any:
    return load_ops()


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "page_size"),
    [
        (torch.bfloat16, 128, 4, 16),
        (torch.bfloat16, 128, 8, None),
        (torch.float16, 128, 1, 32),
        (torch.float16, 64, 3, 16),
        (torch.bfloat16, 64, 4, 5),
        (torch.bfloat16, 128, 6, 24),
        (torch.float16, 64, 7, 8),
    ],
)
def test_steps_equal_the_reference(
    ops: Any, dtype: torch.dtype, dim: int, group: int, page_size: int | None, num_splits: int, by_position: bool
) -> None:
    lengths, budgets = (0, 1, 8, 15, 63, 64, 65, 299), (8, 9, 10, 16, 64, 64, 66, 300)
    state = make_state(lengths, budgets, 2, dim, page_size, dtype, seed=20 + group, capacity=307)
    exact, workspace = state.copy(), new_workspace()
    exact.scores.nan_to_num_(0.0)
    for step in range(4):
        token = new_token(state, 2 * group, seed=30 + 3 * step)

        out = run_step(ops, state, token, workspace, num_splits, by_position)
        expected = run_reference(exact, token, by_position)

        check_step(out, expected, token[0], state, exact)
        if by_position:
            assert torch.equal(state.victims, exact.victims)
        adopt_victims(state, exact)
        assert not workspace[:COUNTER_BYTES].any()
        free = torch.arange(307, device=DEVICE)[None] >= state.lengths[:, None]
        assert torch.isnan(state.scores[free[:, None].expand_as(state.scores)]).all(), "a free slot was scored"


@pytest.mark.parametrize(("capacity", "group", "num_splits"), [(1024, 4, 1), (4096, 4, 0), (4096, 4, 1), (2100, 8, 0)])
def test_steps_with_large_budgets(ops: Any, capacity: int, group: int, num_splits: int) -> None:
    lengths, budgets = (capacity, capacity - 3), (capacity, capacity)
    state = make_state(lengths, budgets, 2, 128, None, torch.bfloat16, seed=40)
    exact, workspace = state.copy(), new_workspace()
    exact.scores.nan_to_num_(0.0)
    for step in range(5):
        token = new_token(state, 2 * group, seed=50 + 3 * step)

        out = run_step(ops, state, token, workspace, num_splits)
        expected = run_reference(exact, token)

        check_step(out, expected, token[0], state, exact)
        adopt_victims(state, exact)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_two_hundred_steps_of_one_graph(ops: Any, num_splits: int) -> None:
    lengths, budgets = (96, 40, 5, 130), (96, 96, 64, 160)
    state = make_state(lengths, budgets, 3, 128, 16, torch.bfloat16, seed=60)
    start, workspace = state.copy(), new_workspace()
    token = new_token(state, 12, seed=61)
    out = nan_like(token[0])

    def launch() -> None:
        run_step(ops, state, token, workspace, num_splits, out=out)

    graph = capture(launch)
    for tensor, before in zip(state.changed(), start.changed(), strict=True):
        tensor.copy_(before)  # the warm-up of the capture was a step, too
    exact = start
    exact.scores.nan_to_num_(0.0)
    flips = 0
    for step in range(200):
        for tensor, values in zip(token, new_token(state, 12, seed=100 + 3 * step), strict=True):
            tensor.copy_(values)

        graph.replay()
        expected = run_reference(exact, token)

        check_step(out, expected, token[0], state, exact)
        flips += adopt_victims(state, exact)
    assert torch.equal(state.next_position, int32([n + 11 * b + 200 for b, n in enumerate(lengths)], DEVICE))
    assert flips <= 20, f"{flips} of 2400 victims differ from the reference"


@pytest.mark.parametrize("num_splits", [1, 3])
def test_ties_go_to_the_lower_slot(ops: Any, num_splits: int) -> None:
    state = make_state((200,), (200,), 2, 128, 16, torch.bfloat16, seed=70)
    state.positions.copy_(torch.arange(200, dtype=torch.int32, device=DEVICE).flip(0).expand(1, 2, 200))
    state.scores.zero_()
    state.victims.copy_(torch.tensor([[150, 3]], device=DEVICE))
    state.next_position.fill_(200)
    q, k, v = new_token(state, 8, seed=71)
    q.zero_()  # every slot gets the same weight

    run_step(ops, state, (q, k, v), new_workspace(), num_splits)

    # Positions 197 to 200 are recent; slots 0 to 2 hold 199 to 197, and slot 3 of head 1 holds the new token.
    assert state.victims.tolist() == [[3, 4]]


@pytest.mark.parametrize("num_splits", [1, 3])
def test_protected_and_infinite_scores_are_not_evicted(ops: Any, num_splits: int) -> None:
    state = make_state((150,), (150,), 1, 64, 16, torch.float16, seed=72)
    state.positions.copy_(torch.arange(150, dtype=torch.int32, device=DEVICE).expand(1, 1, 150))
    state.next_position.fill_(150)
    state.scores.fill_(float("inf"))
    state.scores[..., [0, 1, 77, 147, 148]] = 0.0  # sinks, one ordinary, recent
    state.victims.fill_(60)

    run_step(ops, state, new_token(state, 4, seed=73), new_workspace(), num_splits)

    assert state.victims.tolist() == [[77]]
    state.scores[..., [60, 147]] = float("inf")  # slot 77 takes the new token, and 147 is recent no longer
    run_step(ops, state, new_token(state, 4, seed=74), new_workspace(), num_splits)
    assert state.victims.tolist() == [[0]], "with nothing to choose the reference says slot 0"


def test_a_row_without_a_budget_changes_no_slot(ops: Any) -> None:
    state = make_state((64, 30), (64, 40), 2, 128, 16, torch.bfloat16, seed=75)
    assert state.table is not None
    state.budgets[0], state.lengths[0] = 0, 0
    state.table[0] = 2147480000
    state.victims[0] = -1
    before = state.copy()

    out = run_step(ops, state, new_token(state, 8, seed=76), new_workspace())

    assert not out[0].any()
    assert state.lengths.tolist() == [0, 31]
    assert_bitwise_equal(state.scores[0], before.scores[0])
    assert_bitwise_equal(state.positions[0], before.positions[0])
    changed = (state.k_pool.nan_to_num(7.0) != before.k_pool.nan_to_num(7.0)).any(dim=-1)
    assert int(changed.sum()) == 2, "one key per head of the other request"


@pytest.mark.parametrize("num_splits", [0, 1, 4])
def test_steps_are_repeatable(ops: Any, num_splits: int) -> None:
    start = make_state((512, 300, 511), (512, 512, 512), 4, 128, 16, torch.bfloat16, seed=80)
    token, workspace = new_token(start, 16, seed=81), new_workspace()

    def launch() -> list[Tensor]:
        state = start.copy()
        return [run_step(ops, state, token, workspace, num_splits), *state.changed()]

    assert_repeatable(launch)


def test_one_workspace_serves_launches_of_different_sizes(ops: Any) -> None:
    workspace = new_workspace()
    for batch, capacity, num_splits in ((1, 640, 8), (24, 64, 1), (2, 1500, 0), (24, 128, 2)):
        state = make_state([capacity] * batch, [capacity] * batch, 2, 64, None, torch.bfloat16, seed=90 + batch)
        exact = state.copy()
        token = new_token(state, 4, seed=91)

        out = run_step(ops, state, token, workspace, num_splits)
        expected = run_reference(exact, token)

        check_step(out, expected, token[0], state, exact)
        adopt_victims(state, exact)


@pytest.mark.parametrize(
    ("argument", "field", "change"),
    [
        ("scores", "scores", lambda t: t.double()),
        ("scores", "scores", lambda t: t[:, :1]),
        ("positions", "positions", lambda t: t.long()),
        ("victims", "victims", lambda t: t.int()),
        ("lengths", "lengths", lambda t: t[:1]),
        ("budgets", "budgets", lambda t: t.long()),
        ("next_position", "next_position", lambda t: t.cpu()),
        ("block_table", "table", lambda t: t[:1]),
        ("k_pool", "table", lambda t: t[:, :1]),
    ],
)
def test_a_wrong_argument_is_named(ops: Any, argument: str, field: str, change: Callable[[Tensor], Tensor]) -> None:
    state = make_state((40, 60), (64, 64), 2, 64, 16, torch.bfloat16, seed=85)
    token = new_token(state, 8, seed=86)
    setattr(state, field, change(getattr(state, field)))

    with pytest.raises(RuntimeError, match=f"`{argument}`"):
        run_step(ops, state, token, new_workspace(2**20))


def test_the_workspace_need_is_told_and_enough(ops: Any) -> None:
    need = ops.decode_workspace_bytes(2, 2, 4, 1, 128, 700, True, 3)
    state = make_state((700, 650), (700, 700), 2, 128, None, torch.bfloat16, seed=97)
    token = new_token(state, 8, seed=98)

    run_step(ops, state.copy(), token, new_workspace(need), 3)

    with pytest.raises(RuntimeError, match="`workspace`"):
        run_step(ops, state, token, new_workspace(need - 16), 3)
