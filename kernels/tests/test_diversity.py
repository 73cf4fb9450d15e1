"""kv_diversity against its definition in hf_sparsekv/ops/reference/diversity.py.

Shapes: B request, K KV head, N longest length, D head dim. Rows are not contiguous; tokens past a request's length and
what lies between rows are NaN, their positions far away; outputs and workspaces start as NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import capture, int32, load_ops, needs_cuda, poisoned_rows
from torch import Tensor

from hf_sparsekv.ops.reference import kv_diversity, pool_scores, select
from hf_sparsekv.testing.compare import (
    assert_bitwise_equal,
    assert_close_fp32,
    assert_repeatable,
    assert_same_selection_up_to_near_ties,
)

pytestmark = [needs_cuda, pytest.mark.gpu]

NAN = float("nan")
ODD_LENGTHS = [0, 1, 12, 15, 16, 17, 63, 64, 65, 127, 128, 129, 401]
INT32_ELEMENTS = 2**31
ROTATIONS = ("none", "in order", "positions")


def workspace_size(batch: int, kv_heads: int, max_length: int, dim: int) -> int:
    """The formula of csrc/diversity.h, by which callers size workspaces."""
    splits = min(64, -(-max_length // 128))
    return batch * kv_heads * (2 * splits * (dim + 2) + max_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One call's inputs, on the GPU."""

    keys: Tensor
    values: Tensor
    lengths: Tensor
    inv_freq: Tensor | None
    positions: Tensor | None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.keys, self.values, self.lengths, self.inv_freq, self.positions


def make_problem(
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 128,
    kv_heads: int = 2,
    rotation: str = "positions",
    max_length: int | None = None,
    seed: int = 0,
) -> Problem:
    """Keys and values [B, K, N, D] as views of [B, N, K, D + 8], around a direction that each head prefers."""
    batch, max_length = len(lengths), max_length or max(1, *lengths)
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = []
    for _ in range(2):
        view = poisoned_rows((batch, max_length, kv_heads, dim), dtype, "cuda").transpose(1, 2)
        preferred = 0.5 * torch.randn(1, kv_heads, 1, dim, device="cuda", generator=generator)
        for b, length in enumerate(lengths):
            own = torch.randn(1, kv_heads, length, dim, device="cuda", generator=generator)
            view[b, :, :length] = (own + preferred)[0].to(dtype)
        rows.append(view)
    positions = None
    if rotation == "positions":
        steps = torch.randint(1, 20, (batch, max_length, kv_heads), device="cuda", generator=generator)
        positions = steps.cumsum(1).transpose(1, 2)
        for b, length in enumerate(lengths):
            positions[b, :, length:] = 2**62
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, device="cuda", dtype=torch.float32) / dim)
    return Problem(
        keys=rows[0],
        values=rows[1],
        lengths=int32(lengths, "cuda"),
        inv_freq=None if rotation == "none" else inv_freq,
        positions=positions,
    )


def run(problem: Problem) -> Tensor:
    """Into a poisoned view that is not contiguous, by a poisoned workspace of the least size."""
    batch, kv_heads, max_length, dim = problem.keys.shape
    result = torch.full((batch, kv_heads, max_length + 3), NAN, device="cuda")[..., :max_length]
    workspace = torch.full((workspace_size(batch, kv_heads, max_length, dim),), NAN, device="cuda")
    load_ops().kv_diversity(result, workspace, *problem.tensors())
    return result


def check(problem: Problem) -> None:
    actual = run(problem)
    expected = kv_diversity(*problem.tensors())
    assert_close_fp32(actual, expected)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_definition(dtype: torch.dtype, dim: int, kv_heads: int, rotation: str) -> None:
    check(make_problem(ODD_LENGTHS, dtype=dtype, dim=dim, kv_heads=kv_heads, rotation=rotation))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [[4000], [8191, 8192, 8193], [20001, 300]])
def test_long_prompts(lengths: list[int], dim: int) -> None:
    for rotation in ("in order", "positions"):
        check(make_problem(lengths, dim=dim, kv_heads=8, rotation=rotation))


@pytest.mark.parametrize("dim", [64, 128])
def test_131072_tokens(dim: int) -> None:
    """Angles up to 131,071 radians."""
    check(make_problem([131_072], dim=dim, rotation="in order"))


def test_dense_tensors_and_shared_positions() -> None:
    """Contiguous keys, and one row of positions for all heads, as after a first prompt."""
    problem = make_problem([777, 777], kv_heads=8, rotation="in order")
    shared = torch.arange(777, device="cuda").expand(2, 8, 777)
    dense = replace(problem, keys=problem.keys.contiguous(), values=problem.values.contiguous(), positions=shared)
    assert_bitwise_equal(run(dense), run(problem))
    check(dense)


@pytest.mark.parametrize("budget", [64, 500])
def test_the_tokens_kept_are_those_of_the_definition(budget: int) -> None:
    """Pooled, as the default scorer's second list is."""
    problem = make_problem([3000, 1234, 64], kv_heads=8)
    actual, expected = run(problem), kv_diversity(*problem.tensors())
    options = (problem.lengths, int32([budget] * 3, "cuda"), budget, 4, 32, "avg", 7)
    pooled = pool_scores(expected, problem.lengths, "avg", 7)
    assert_same_selection_up_to_near_ties(select(actual, *options)[0], select(expected, *options)[0], pooled)


@pytest.mark.parametrize("rows", ["keys", "values"])
def test_rows_of_zeros_have_no_direction(rows: str) -> None:
    """One among others, and all of them."""
    problem = make_problem([300, 301])
    getattr(problem, rows)[0, :, 7] = 0
    getattr(problem, rows)[1, :, :301] = 0
    check(problem)


def test_one_token_alone_is_like_the_others() -> None:
    actual = run(make_problem([1, 0], max_length=5))
    assert_bitwise_equal(actual, torch.zeros_like(actual))


def test_two_or_three_tokens_have_finite_scores() -> None:
    """Two are equally far from their mean: only rounding tells them apart, so there is nothing to compare with."""
    actual = run(make_problem([2, 3], kv_heads=8))
    assert (actual.abs() <= 2 * 3**0.5).all()


def test_twenty_launches_give_the_same_bits() -> None:
    problem = make_problem([5000, 1234], kv_heads=8)
    assert_repeatable(lambda: [run(problem)])


def test_a_request_gets_the_same_bits_in_any_batch_and_room() -> None:
    lengths = [1000, 37, 0, 8192, 640, 8193, 12, 129]
    problem = make_problem(lengths, max_length=8300)
    together = run(problem)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        assert problem.positions is not None
        alone = Problem(
            keys=problem.keys[one, :, :length],
            values=problem.values[one, :, :length],
            lengths=problem.lengths[one],
            inv_freq=problem.inv_freq,
            positions=problem.positions[one, :, :length],
        )
        assert_bitwise_equal(run(alone)[0], together[b, :, :length])
        assert not together[b, :, length:].any()


def test_heads_are_the_same_alone() -> None:
    """So that ranks which share the heads get the scores of one that has all."""
    problem = make_problem([500, 499], kv_heads=8)
    assert problem.positions is not None
    together = run(problem)
    for head in range(0, 8, 3):
        at = slice(head, head + 1)
        alone = replace(
            problem, keys=problem.keys[:, at], values=problem.values[:, at], positions=problem.positions[:, at]
        )
        assert_bitwise_equal(run(alone), together[:, at])


def test_graph_replay_follows_the_lengths() -> None:
    problem = make_problem([600, 500, 400])
    result = torch.full((3, 2, 600), NAN, device="cuda")
    workspace = torch.full((workspace_size(3, 2, 600, 128),), NAN, device="cuda")
    graph = capture(lambda: load_ops().kv_diversity(result, workspace, *problem.tensors()))
    for num_keys in ([33, 500, 0], [600, 1, 129]):
        problem.lengths.copy_(int32(num_keys, "cuda"))
        result.fill_(NAN)
        workspace.fill_(NAN)
        graph.replay()
        assert_close_fp32(result, kv_diversity(*problem.tensors()))


def test_launches_behind_one_another_do_not_mix() -> None:
    """Each launch of the next call may begin early: with one workspace and one result for several problems."""
    problems = [make_problem([4000 - 7 * seed], kv_heads=8, max_length=4000, seed=seed) for seed in range(6)]
    expected = [run(problem) for problem in problems]
    result = torch.empty(1, 8, 4000, device="cuda")
    workspace = torch.empty(workspace_size(1, 8, 4000, 128), device="cuda")
    copies = []
    for problem in problems:
        load_ops().kv_diversity(result, workspace, *problem.tensors())
        copies.append(result.clone())
    for actual, other in zip(copies, expected, strict=True):
        assert_bitwise_equal(actual, other.contiguous())


def test_offsets_pass_two_to_the_31() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * INT32_ELEMENTS:
        pytest.skip(f"needs 12 GiB of free GPU memory, there are {free / 2**30:.1f}")
    storage = torch.empty(INT32_ELEMENTS + 2**20, dtype=torch.bfloat16, device="cuda")
    near = make_problem([100, 100], kv_heads=1)
    strides = (INT32_ELEMENTS, 128 * 100, 128, 1)  # request 1 begins 2^31 elements after request 0
    far = replace(near, keys=storage.as_strided((2, 1, 100, 128), strides))
    far.keys.copy_(near.keys)
    assert_bitwise_equal(run(far), run(near))
    far = replace(near, values=storage.as_strided((2, 1, 100, 128), strides))
    far.values.copy_(near.values)
    assert_bitwise_equal(run(far), run(near))


def all_arguments() -> dict[str, Any]:
    """Valid arguments, in order."""
    problem = make_problem([64, 50])
    return {
        "diversity": torch.empty(2, 2, 64, device="cuda"),
        "workspace": torch.empty(workspace_size(2, 2, 64, 128), device="cuda"),
        **dict(zip(("keys", "values", "lengths", "inv_freq", "positions"), problem.tensors(), strict=True)),
    }


WRONG: dict[str, list[Callable[[Any], Any]]] = {
    "diversity": [lambda t: t.double(), lambda t: t[:, :, :-1], lambda t: t.mT.contiguous().mT, lambda t: t.cpu()],
    "workspace": [
        lambda t: t[:-1],
        lambda t: t[1:],
        lambda t: t.double(),
        lambda t: t.repeat(2)[::2],
        lambda t: t[None],
    ],
    "keys": [lambda t: t.float(), lambda t: t[..., 1:65], lambda t: t[..., :32], lambda t: t[0], lambda t: t[:, :0]],
    "values": [lambda t: t.half(), lambda t: t[:1], lambda t: t[:, :, :-1], lambda t: t[..., :64], lambda t: t.cpu()],
    "lengths": [lambda t: t.long(), lambda t: t[:1], lambda t: t.cpu(), lambda t: t.repeat(2)[::2]],
    "inv_freq": [lambda t: t.double(), lambda t: t[:-1], lambda t: t.repeat(2)[::2], lambda t: t.cpu()],
    "positions": [lambda t: t.int(), lambda t: t[:, :1], lambda t: t[..., :-1], lambda t: t.cpu()],
}


@pytest.mark.parametrize(("argument", "change"), [(name, change) for name in WRONG for change in WRONG[name]])
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Any], Any]) -> None:
    arguments = all_arguments()
    load_ops().kv_diversity(*arguments.values())
    arguments[argument] = change(arguments[argument])
    with pytest.raises(RuntimeError, match=f"`{argument}`"):
        load_ops().kv_diversity(*arguments.values())


def test_positions_that_change_nothing_are_refused() -> None:
    arguments = all_arguments() | {"inv_freq": None}
    with pytest.raises(RuntimeError, match="`positions` must not be given without `inv_freq`"):
        load_ops().kv_diversity(*arguments.values())


def test_nothing_to_do_is_allowed() -> None:
    actual = run(make_problem([0, 0], max_length=32))
    assert_bitwise_equal(actual, torch.zeros_like(actual))
    empty = torch.empty(2, 3, 0, 128, dtype=torch.bfloat16, device="cuda")
    none = torch.empty(2, 3, 0, device="cuda")
    load_ops().kv_diversity(none, torch.empty(0, device="cuda"), empty, empty, int32([0, 0], "cuda"), None, None)
