"""score, lse_tail and key_anchor against their definitions in hf_sparsekv/ops/reference/score.py.

Shapes: B request, H query head, K KV head, G = H / K, A scored rows, N longest length, D head dim, S slots per page.
Queries and LSE of rows that do not exist, keys and value norms past the length, and unused table entries are poison.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import capture, int32, load_ops, make_pool, needs_cuda, padded_rows
from torch import Tensor

from hf_sparsekv.ops.reference.score import key_anchor, window_lse, window_score
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_census, assert_close_fp32, assert_repeatable

pytestmark = [needs_cuda, pytest.mark.gpu]

REDUCTIONS = ("mean", "max")
NAN = float("nan")
INT32_ELEMENTS = 2**31


def num_key_splits(max_length: int) -> int:
    """The formula of csrc/score.h, by which callers size workspaces."""
    units = -(-max_length // 128)
    keys_per_split = 128 * max(1, -(-units // 64))
    return -(-max_length // keys_per_split)


def edge_lengths(num_rows: int, max_length: int) -> list[int]:
    """Lengths around A, around the last tile that needs no mask (64 and 128 keys), and the longest."""
    around_tiles = [tile + num_rows + offset for tile in (64, 128) for offset in (-2, -1, 0)]
    lengths = [0, 1, num_rows - 1, num_rows, num_rows + 1, 63, 65, 128, *around_tiles, max_length - 1, max_length]
    return [min(length, max_length) for length in lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One call's inputs, on the GPU."""

    q: Tensor
    k_pool: Tensor
    table: Tensor | None
    lengths: Tensor
    max_length: int
    value_norm: Tensor
    num_keys: list[int]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return self.q.shape[0], self.k_pool.shape[1], self.max_length

    def poison_missing_rows(self, rows: Tensor) -> Tensor:
        """A copy of a [B, H, A, ...] tensor with NaN in the rows that do not exist."""
        rows = rows.clone(memory_format=torch.preserve_format)
        for b, length in enumerate(self.num_keys):
            rows[b, :, : max(0, self.q.shape[2] - length)] = NAN
        return rows


def make_problem(
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 128,
    kv_heads: int = 2,
    group: int = 4,
    num_rows: int = 32,
    page_size: int | None = 16,
    max_length: int | None = None,
    seed: int = 0,
) -> Problem:
    max_length = max_length or max(1, *lengths)
    k_pool, _, table, _, _ = make_pool(lengths, kv_heads, dim, page_size, dtype, "cuda", seed, capacity=max_length)
    q = padded_rows((len(lengths), kv_heads * group, num_rows, dim), dtype, "cuda", seed + 1)
    generator = torch.Generator("cuda").manual_seed(seed + 2)
    value_norm = torch.rand(len(lengths), kv_heads, max_length, device="cuda", generator=generator) + 0.5
    for b, length in enumerate(lengths):
        q[b, :, : max(0, num_rows - length)] = NAN
        value_norm[b, :, length:] = NAN
    return Problem(
        q=q,
        k_pool=k_pool,
        table=table,
        lengths=int32(lengths, "cuda"),
        max_length=max_length,
        value_norm=value_norm,
        num_keys=list(lengths),
    )


def run_score(
    problem: Problem,
    lse: Tensor,
    rows: str = "mean",
    heads: str = "mean",
    value_norm: Tensor | None = None,
    anchor: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Score and cosine, written into poisoned views that are not contiguous."""
    batch, kv_heads, max_length = problem.kv_shape
    score = torch.full((batch, kv_heads, max_length + 3), NAN, device="cuda")[..., :max_length]
    cosine = None if anchor is None else torch.full((batch, kv_heads, max_length + 1), NAN, device="cuda")[..., 1:]
    tensors = (score, cosine, problem.q, problem.k_pool, lse, problem.lengths, problem.table, value_norm, anchor)
    load_ops().score(*tensors, problem.scale, max_length, REDUCTIONS.index(rows), REDUCTIONS.index(heads))
    return score, cosine


def run_lse(problem: Problem) -> Tensor:
    batch, heads, num_rows, _ = problem.q.shape
    lse = torch.full((batch, num_rows, heads), NAN, device="cuda").transpose(1, 2)
    workspace = torch.full((batch, heads, num_rows, num_key_splits(problem.max_length), 2), NAN, device="cuda")
    load_ops().lse_tail(
        lse, workspace, problem.q, problem.k_pool, problem.lengths, problem.table, problem.scale, problem.max_length
    )
    return lse


def run_anchor(problem: Problem) -> Tensor:
    batch, kv_heads, max_length = problem.kv_shape
    dim = problem.q.shape[-1]
    anchor = torch.full((batch, kv_heads, dim), NAN, device="cuda")
    workspace = torch.full((batch, kv_heads, num_key_splits(max_length), dim), NAN, device="cuda")
    load_ops().key_anchor(anchor, workspace, problem.k_pool, problem.lengths, problem.table, max_length)
    return anchor


def reference_lse(problem: Problem) -> Tensor:
    return window_lse(problem.q, problem.k_pool, problem.lengths, problem.scale, problem.max_length, problem.table)


def reference_anchor(problem: Problem) -> Tensor:
    return key_anchor(problem.k_pool, problem.lengths, problem.max_length, problem.table)


def reference_score(
    problem: Problem,
    lse: Tensor,
    rows: str = "mean",
    heads: str = "mean",
    value_norm: Tensor | None = None,
    anchor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    inputs = (problem.q, problem.k_pool, lse, problem.lengths, problem.scale, problem.max_length)
    return window_score(*inputs, rows, heads, problem.table, value_norm, anchor)


def check_score(problem: Problem, rows: str, heads: str, extras: bool) -> None:
    """One call against the definition; `extras`: value norms and the cosine to an anchor as well."""
    lse = reference_lse(problem)
    norm, anchor = None, None
    if extras:
        norm, anchor = problem.value_norm, reference_anchor(problem)
    actual, cosine = run_score(problem, problem.poison_missing_rows(lse), rows, heads, norm, anchor)
    expected, expected_cosine = reference_score(problem, lse, rows, heads, norm, anchor)
    assert_close_fp32(actual, expected)
    if cosine is not None:
        assert_close_fp32(cosine, expected_cosine)


@pytest.mark.parametrize("kv_heads", [2, 8])  # 64-key tiles, 128-key tiles
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("rows", REDUCTIONS)
@pytest.mark.parametrize("heads", REDUCTIONS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_score_is_the_definition(
    dtype: torch.dtype, dim: int, heads: str, rows: str, page_size: int | None, kv_heads: int
) -> None:
    problem = make_problem(
        edge_lengths(32, 401), dtype=dtype, dim=dim, kv_heads=kv_heads, page_size=page_size, group=4, num_rows=32
    )
    check_score(problem, rows, heads, extras=rows == heads)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 65, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_every_group_and_window(group: int, num_rows: int, kv_heads: int) -> None:
    problem = make_problem(edge_lengths(num_rows, 400), kv_heads=kv_heads, group=group, num_rows=num_rows, seed=group)
    check_score(problem, "mean", "max", extras=False)
    check_score(problem, "max", "mean", extras=True)


@pytest.mark.parametrize("page_size", [1, 5, 8, 13, 32, 53])
def test_every_page_size(page_size: int) -> None:
    problem = make_problem(edge_lengths(16, 300), page_size=page_size, num_rows=16)
    check_score(problem, "mean", "mean", extras=True)
    assert_close_fp32(run_lse(problem), reference_lse(problem))
    assert_close_fp32(run_anchor(problem), reference_anchor(problem))


@pytest.mark.parametrize(
    ("lengths", "num_rows"),
    [
        ([5000], 32),  # one tile per CTA
        ([5000], 256),  # queries streamed
        ([20000, 19990], 32),  # several tiles per CTA, queries resident in four slots
        ([20000, 300], 48),  # and in six
    ],
)
def test_long_prompts(lengths: list[int], num_rows: int) -> None:
    problem = make_problem(lengths, kv_heads=8, num_rows=num_rows)
    check_score(problem, "mean", "mean", extras=True)
    check_score(problem, "max", "mean", extras=False)
    assert_close_fp32(run_lse(problem), reference_lse(problem))


def test_weights_of_a_row_sum_to_one() -> None:
    problem = make_problem(edge_lengths(32, 3000), kv_heads=8)
    total = run_score(problem, problem.poison_missing_rows(run_lse(problem)))[0].sum(-1)
    expected = (problem.lengths > 0).float()[:, None].expand_as(total)
    assert_close_fp32(total, expected)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("num_rows", [1, 9, 32, 200])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lse_is_the_definition(dtype: torch.dtype, dim: int, num_rows: int, page_size: int | None) -> None:
    problem = make_problem(
        edge_lengths(num_rows, 700), dtype=dtype, dim=dim, group=3, num_rows=num_rows, page_size=page_size
    )
    assert_close_fp32(run_lse(problem), reference_lse(problem))


@pytest.mark.parametrize("max_length", [300, 8193, 40000])  # one 128-key unit per split, two, five
def test_lse_reads_every_key_once(max_length: int) -> None:
    lengths = [1, 40, 129, max_length - 1, max_length]
    problem = make_problem(lengths, group=3, num_rows=40)
    problem.q.zero_()
    lse = run_lse(problem)
    position = problem.lengths[:, None] - 40 + torch.arange(40, device="cuda")
    assert_census(lse, (position + 1).clamp_min(0)[:, None].expand_as(lse))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_anchor_is_the_definition(dtype: torch.dtype, dim: int, page_size: int | None) -> None:
    problem = make_problem([0, 1, 63, 127, 128, 129, 9000], dtype=dtype, dim=dim, page_size=page_size, num_rows=1)
    problem.k_pool.mul_(torch.rand(problem.k_pool.shape[-2], 1, device="cuda").to(dtype) * 4)
    assert_close_fp32(run_anchor(problem), reference_anchor(problem))


def test_a_zero_key_has_no_direction() -> None:
    problem = make_problem([64], page_size=None)
    problem.k_pool[:, :, 7] = 0
    anchor = run_anchor(problem)
    _, cosine = run_score(problem, reference_lse(problem), anchor=anchor)
    assert cosine is not None
    assert (cosine[:, :, 7] == 0).all()
    assert_close_fp32(anchor, reference_anchor(problem))


def test_twenty_launches_give_the_same_bits() -> None:
    problem = make_problem([5000, 1234], kv_heads=8)
    anchor = run_anchor(problem)

    def launch() -> list[Tensor]:
        lse = run_lse(problem)
        score, cosine = run_score(problem, lse, "max", "mean", problem.value_norm, anchor)
        assert cosine is not None
        return [lse, run_anchor(problem), score, cosine, run_score(problem, lse)[0]]

    assert_repeatable(launch)


def test_a_request_scores_the_same_in_any_batch() -> None:
    lengths = [1000, 37, 0, 999, 640, 1000, 12, 77]  # together 128-key tiles, alone 64-key tiles
    problem = make_problem(lengths, kv_heads=8)
    lse = run_lse(problem)
    together, _ = run_score(problem, lse)
    assert problem.table is not None
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = replace(
            problem, q=problem.q[one], table=problem.table[one], lengths=problem.lengths[one], num_keys=[length]
        )
        assert_bitwise_equal(run_lse(alone)[0], lse[b])
        assert_bitwise_equal(run_score(alone, lse[one])[0][0], together[b])


def test_graph_replay_follows_the_lengths() -> None:
    problem = make_problem([600, 500, 400])
    lse = torch.full(problem.q.shape[:3], NAN, device="cuda")
    workspace = torch.empty(*lse.shape, num_key_splits(problem.max_length), 2, device="cuda")
    score = torch.full(problem.kv_shape, NAN, device="cuda")
    anchor = torch.full((*problem.kv_shape[:2], 128), NAN, device="cuda")
    cosine = torch.full_like(score, NAN)
    q, pool, lengths, table, size = problem.q, problem.k_pool, problem.lengths, problem.table, problem.max_length
    ops = load_ops()

    def launch() -> None:
        ops.lse_tail(lse, workspace, q, pool, lengths, table, problem.scale, size)
        ops.key_anchor(anchor, workspace, pool, lengths, table, size)
        ops.score(score, cosine, q, pool, lse, lengths, table, None, anchor, problem.scale, size, 0, 0)

    graph = capture(launch)
    for num_keys in ([33, 500, 0], [600, 1, 129]):
        lengths.copy_(int32(num_keys, "cuda"))
        for output in (lse, score, anchor, cosine):
            output.fill_(NAN)
        graph.replay()
        expected_lse, expected_anchor = reference_lse(problem), reference_anchor(problem)
        expected_score, expected_cosine = reference_score(problem, expected_lse, anchor=expected_anchor)
        assert_close_fp32(lse, expected_lse)
        assert_close_fp32(anchor, expected_anchor)
        assert_close_fp32(score, expected_score)
        assert_close_fp32(cosine, expected_cosine)


def test_offsets_pass_two_to_the_31() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * INT32_ELEMENTS:
        pytest.skip(f"needs 12 GiB of free GPU memory, there are {free / 2**30:.1f}")
    storage = torch.empty(INT32_ELEMENTS + 2**20, dtype=torch.bfloat16, device="cuda")
    near = make_problem([100, 90], page_size=None, kv_heads=1)
    # Request 1 begins 2^31 elements after request 0: in int32 that offset is negative.
    far = replace(near, k_pool=storage.as_strided((2, 1, 100, 128), (INT32_ELEMENTS, 128 * 100, 128, 1)))
    far.k_pool.copy_(near.k_pool)
    lse = reference_lse(near)
    assert_bitwise_equal(run_lse(far), run_lse(near))
    assert_bitwise_equal(run_anchor(far), run_anchor(near))
    assert_bitwise_equal(run_score(far, lse)[0], run_score(near, lse)[0])


def score_arguments() -> dict[str, Any]:
    """Valid arguments of `score`, in order."""
    problem = make_problem([64, 50])
    return {
        "score": torch.empty(problem.kv_shape, device="cuda"),
        "cosine": torch.empty(problem.kv_shape, device="cuda"),
        "q": problem.q,
        "k_pool": problem.k_pool,
        "lse": torch.zeros(problem.q.shape[:3], device="cuda"),
        "lengths": problem.lengths,
        "block_table": problem.table,
        "value_norm": None,
        "anchor": torch.ones(*problem.kv_shape[:2], 128, device="cuda"),
        "scale": problem.scale,
        "max_length": problem.max_length,
        "row_reduction": 0,
        "group_reduction": 0,
    }


WRONG: dict[str, list[Callable[[Any], Any]]] = {
    "score": [lambda t: t.double(), lambda t: t[:, :, :-1], lambda t: t.mT.contiguous().mT],
    "cosine": [lambda t: None],
    "q": [lambda t: t.float(), lambda t: t[:, :7], lambda t: t[..., :64], lambda t: t[:1], lambda t: t.cpu()],
    "k_pool": [lambda t: t.half(), lambda t: t[..., 1:65], lambda t: t[..., :32], lambda t: t[0]],
    "lse": [lambda t: t[:, :, :-1], lambda t: t.half()],
    "lengths": [lambda t: t.long(), lambda t: t.cpu()],
    "block_table": [lambda t: t.long(), lambda t: t[:1]],
    "anchor": [lambda t: t.half()],
    "max_length": [lambda n: n + 1000, lambda n: -1],
    "row_reduction": [lambda n: 2],
    "group_reduction": [lambda n: -1],
}


@pytest.mark.parametrize(("argument", "change"), [(name, change) for name in WRONG for change in WRONG[name]])
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Any], Any]) -> None:
    arguments = score_arguments()
    load_ops().score(*arguments.values())
    arguments[argument] = change(arguments[argument])
    with pytest.raises(RuntimeError, match=f"`{argument}`"):
        load_ops().score(*arguments.values())


@pytest.mark.parametrize(("op", "output"), [("lse_tail", "lse"), ("key_anchor", "anchor")])
def test_a_small_workspace_is_refused(op: str, output: str) -> None:
    problem = make_problem([300, 200])
    shape = problem.q.shape[:3] if op == "lse_tail" else (*problem.kv_shape[:2], 128)
    needed = math.prod(shape) * num_key_splits(300) * (2 if op == "lse_tail" else 1)
    keys = [problem.k_pool, problem.lengths, problem.table]
    arguments = [problem.q, *keys, problem.scale] if op == "lse_tail" else keys
    result = torch.empty(shape, device="cuda")
    launch = getattr(load_ops(), op)
    launch(result, torch.empty(needed, device="cuda"), *arguments, 300)
    with pytest.raises(RuntimeError, match="`workspace`"):
        launch(result, torch.empty(needed - 1, device="cuda"), *arguments, 300)


def test_nothing_to_do_is_allowed() -> None:
    problem = make_problem([0, 0], max_length=32)
    score, _ = run_score(problem, torch.full(problem.q.shape[:3], NAN, device="cuda"))
    assert_bitwise_equal(score, torch.zeros_like(score))
    assert (run_lse(problem) == float("-inf")).all()
    assert (run_anchor(problem) == 0).all()
