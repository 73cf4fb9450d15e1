"""The smallest launches that together take every path of every kernel, for tools that make each of them slow.

Inputs are on the CPU; where a launch reads lengths or a table, some requests are empty and unused entries lead astray.

Shapes: B request, T query row, H query head, K KV head, G = H / K, D head dim, A scored rows, N key, C slot.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from decode_cases import NUM_RECENT, NUM_SINKS, make_state, new_token
from helpers import int32, make_pool
from torch import Tensor

from hf_sparsekv.ops import reference

HALVES = (torch.bfloat16, torch.float16)
DIMS = (64, 128)
HEADS = 2
"""K, KV heads."""
SPLIT = 128
"""Keys of a request that one CTA sums up at least, see csrc/score.h."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One call of a compiled op."""

    op: str
    what: str
    arguments: dict[str, Any]
    """By the op's names."""
    fresh: tuple[str, ...] = ()
    """Arguments that hold nothing before the call."""
    changed: tuple[str, ...] = ()
    """Arguments that the call updates; these and the fresh ones are compared, workspaces apart."""
    splits: int | None = None
    """Of a decode launch; its workspace is made where it runs."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def keys_of(lengths: list[int], dtype: torch.dtype, dim: int, *, heads: int = HEADS, page: int | None = None) -> tuple:
    """(k_pool, v_pool, table or None, lengths) with NaN where there is no token."""
    k_pool, v_pool, table, _, _ = make_pool(lengths, heads, dim, page, dtype, "cpu", seed=1)
    return k_pool, v_pool, table, int32(lengths, "cpu")


def windows(
    lengths: list[int], dtype: torch.dtype, dim: int, *, group: int, num_rows: int, heads: int = HEADS
) -> dict[str, Any]:
    """What `score` and `lse_tail` have in common; paged where D is 64."""
    k_pool, _, table, sizes = keys_of(lengths, dtype, dim, heads=heads, page=16 if dim == 64 else None)
    q = torch.randn(len(lengths), heads * group, num_rows, dim).to(dtype)
    shared = {"q": q, "k_pool": k_pool, "lengths": sizes, "block_table": table}
    return shared | {"scale": dim**-0.5, "max_length": max(lengths)}


def score_launch(given: dict[str, Any], what: str, *, row_max: bool, extras: bool) -> Launch:
    num_keys = given["max_length"]
    shape = given["q"].shape[0], given["k_pool"].shape[1], num_keys
    keys = given["k_pool"], given["lengths"]
    lse = reference.window_lse(given["q"], *keys, given["scale"], num_keys, given["block_table"])
    anchor = reference.key_anchor(*keys, num_keys, given["block_table"]) if extras else None
    more = {
        "score": empty(*shape),
        "cosine": empty(*shape) if extras else None,
        "lse": lse,
        "value_norm": torch.rand(shape) if extras else None,
        "anchor": anchor,
        "row_reduction": int(row_max),
        "group_reduction": int(row_max),
    }
    name = f"{what}, {'max' if row_max else 'mean'}{', norms and anchor' if extras else ''}"
    return Launch(op="score", what=name, arguments=given | more, fresh=("score", "cosine"))


def score() -> Iterator[Launch]:
    """Tiles of 64 keys."""
    for dtype, dim, row_max in product(HALVES, DIMS, (False, True)):
        given = windows([150, 5, 0], dtype, dim, group=2, num_rows=9)
        yield score_launch(given, f"{dtype} D {dim}", row_max=row_max, extras=row_max == (dtype == torch.float16))


def score_wide() -> Iterator[Launch]:
    """Tiles of 128 keys, which take two CTAs for every multiprocessor (132 on Hopper)."""
    for dtype, dim, row_max in product(HALVES, DIMS, (False, True)):
        given = windows([33] * 17 + [2], dtype, dim, group=1, num_rows=4, heads=16)
        yield score_launch(given, f"{dtype} D {dim}", row_max=row_max, extras=False)


def score_deep() -> Iterator[Launch]:
    """Two tiles for one CTA, and more query rows than the usual ring has places for."""
    given = windows([137] * 24 + [3], torch.bfloat16, 64, group=1, num_rows=129, heads=16)
    yield score_launch(given, "D 64", row_max=False, extras=True)


def lse_tail() -> Iterator[Launch]:
    for dtype, dim in product(HALVES, DIMS):
        given = windows([300, 130, 5, 0], dtype, dim, group=4, num_rows=40)
        rows = given["q"].shape[:3]
        splits = -(-given["max_length"] // SPLIT)
        more = {"lse": empty(*rows), "workspace": empty(2 * rows.numel() * splits)}
        yield Launch(op="lse_tail", what=f"{dtype} D {dim}", arguments=given | more, fresh=("lse", "workspace"))


def key_anchor() -> Iterator[Launch]:
    for dtype, dim in product(HALVES, DIMS):
        k_pool, _, table, lengths = keys_of([300, 1, 0], dtype, dim, page=16 if dim == 64 else None)
        given = {"k_pool": k_pool, "lengths": lengths, "block_table": table, "max_length": 300}
        more = {"anchor": empty(3, HEADS, dim), "workspace": empty(3 * HEADS * -(-300 // SPLIT) * dim)}
        yield Launch(op="key_anchor", what=f"{dtype} D {dim}", arguments=given | more, fresh=("anchor", "workspace"))


def kv_diversity() -> Iterator[Launch]:
    for dtype, dim, rotation in product(HALVES, DIMS, ("no rotation", "in order", "positions")):
        lengths = [300, 129, 1, 0] if rotation != "positions" else [1100, 5]  # one or two CTAs for the last kernel
        keys, values, _, sizes = keys_of(lengths, dtype, dim)
        batch, num_keys = len(lengths), max(lengths)
        splits = -(-num_keys // SPLIT)
        shape = batch, HEADS, num_keys
        given = {
            "diversity": empty(*shape),
            "workspace": empty(batch * HEADS * (2 * splits * (dim + 2) + num_keys)),
            "keys": keys,
            "values": values,
            "lengths": sizes,
            "inv_freq": None if rotation == "no rotation" else 10000.0 ** -(torch.arange(0, dim, 2) / dim),
            "positions": torch.randint(1, 20, shape).cumsum(-1) if rotation == "positions" else None,
        }
        fresh = ("diversity", "workspace")
        yield Launch(op="kv_diversity", what=f"{dtype} D {dim}, {rotation}", arguments=given, fresh=fresh)


def selection(
    lengths: list[int], budgets: list[int], pooling: int, *, second: int | None = None, share: float = 0.5, ties: bool
) -> Launch:
    batch, num_keys, capacity = len(lengths), max(lengths), max(budgets)
    lists = [torch.rand(batch, HEADS, num_keys) for _ in range(2)]
    if ties:
        lists = [(4 * scores).floor() for scores in lists]
    for scores, (b, length) in product(lists, enumerate(lengths)):
        scores[b, :, length:] = float("nan")
    given: dict[str, Any] = {
        "index": empty(batch, HEADS, capacity, dtype=torch.int64),
        "count": empty(batch, dtype=torch.int32),
        "retained": empty(batch, HEADS, capacity),
        "scores": lists[0],
        "lengths": int32(lengths, "cpu"),
        "budgets": int32(budgets, "cpu"),
        "num_sinks": NUM_SINKS,
        "num_recent": NUM_RECENT,
        "pooling": pooling,
        "pool_width": 7,
    }
    what = f"N {num_keys}, pooling {pooling}{', ties' if ties else ''}"
    if second is not None:
        given |= {"secondary": lists[1], "secondary_pooling": second, "secondary_width": 5, "share": share}
        what += f", and {second} for {1 - share:.1f}"
    return Launch(op="select", what=what, arguments=given, fresh=("index", "count", "retained"))


def select() -> Iterator[Launch]:
    """Rows that stay in shared memory: one list or two, every pooling, all kept, none kept, equal scores."""
    sizes = [300, 40, 0, 7], [64, 64, 64, 7]
    for pooling, ties in product(range(4), (False, True)):
        yield selection(*sizes, pooling, ties=ties)
        yield selection(*sizes, pooling, second=3 - pooling, ties=ties)
    for share in (0.0, 1.0):
        yield selection(*sizes, 2, second=3, share=share, ties=True)


def select_long() -> Iterator[Launch]:
    """Rows that do not stay in shared memory (227 KB on Hopper), or the keys of only one of two lists."""
    yield selection([60000], [100], 2, ties=False)
    yield selection([30000], [100], 2, second=3, ties=False)
    yield selection([60000], [100], 2, second=3, ties=False)


def kept_index(lengths: list[int], capacity: int) -> Tensor:
    """int64 [B, K, C]: ascending slots of each request, others per head, then -1."""
    index = torch.full((len(lengths), HEADS, capacity), -1)
    for (b, length), head in product(enumerate(lengths), range(HEADS)):
        kept = torch.randperm(length)[:capacity].sort().values
        index[b, head, : len(kept)] = kept
    return index


def compact() -> Iterator[Launch]:
    lengths, capacity = [100, 20, 0], 40
    for (dtype, dim), page, out_page in product(
        ((torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 72)), (None, 16), (None, 7)
    ):
        k_pool, v_pool, table, _ = keys_of(lengths, dtype, dim, page=page)
        kept = [min(length, capacity) for length in lengths]
        out = make_pool(kept, HEADS, dim, out_page, dtype, "cpu", seed=2, capacity=capacity)
        given = {"k_out": out[0], "v_out": out[1], "k_pool": k_pool, "v_pool": v_pool, "in_table": table}
        given |= {"index": kept_index(lengths, capacity), "out_table": out[2]}
        outputs = ("k_out", "v_out")  # without a table all of it is written, with one what is kept
        where = {"fresh": outputs} if out_page is None else {"changed": outputs}
        what = f"{dtype} D {dim}, pages of {page} to {out_page}"
        yield Launch(op="compact", what=what, arguments=given, **where)


def write() -> Iterator[Launch]:
    lengths = [50, 17, 1, 0]
    for (dtype, dim), page in product(((torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 72)), (None, 16)):
        k_pool, v_pool, table, _ = keys_of(lengths, dtype, dim, page=page)
        rows = [torch.randn(len(lengths), HEADS, dim).to(dtype) for _ in range(2)]
        slots = torch.tensor([[49, 3], [16, -1], [0, 0], [-1, -1]])
        pools = {"k_pool": k_pool, "v_pool": v_pool, "k": rows[0], "v": rows[1]}
        new = {"new_positions": int32([60, 17, 1, 0], "cpu")}
        of_requests = {"slots": slots, "block_table": table, "positions": torch.zeros(4, HEADS, 50, dtype=torch.int32)}
        changed = ("k_pool", "v_pool", "positions")
        what = f"{dtype} D {dim}, pages of {page}"
        yield Launch(op="write_kv", what=what, arguments=pools | new | of_requests, changed=changed)
        if page is not None:
            last = k_pool.shape[0] * page - 1
            packed = {"slot_mapping": torch.tensor([last, -1, 0, 19])}
            packed["positions"] = torch.zeros(*k_pool.shape[:3], dtype=torch.int32)
            yield Launch(op="write_kv_packed", what=what, arguments=pools | new | packed, changed=changed)


def decode_attention() -> Iterator[Launch]:
    """Tiles of 4, 8 and 16 rows, two blocks of 16, with one split and with three."""
    lengths = [300, 131, 2, 0]
    shapes = ((4, 1), (8, 1), (4, 3), (8, 3))  # (G, T)
    for dtype, dim, (group, num_rows), splits in product(HALVES, DIMS, shapes, (1, 3)):
        k_pool, v_pool, table, sizes = keys_of(lengths, dtype, dim, page=16 if dim == 128 else None)
        q = torch.randn(len(lengths), num_rows, HEADS * group, dim).to(dtype)
        given = {"out": torch.empty_like(q), "lse": empty(*q.shape[:3]), "q": q, "k_pool": k_pool, "v_pool": v_pool}
        given |= {"lengths": sizes, "block_table": table, "scale": dim**-0.5, "max_length": 300, "num_splits": splits}
        what = f"{dtype} D {dim} G {group} T {num_rows}, {splits} splits"
        yield Launch(op="decode_attention", what=what, arguments=given, fresh=("out", "lse"), splits=splits)


def decode_step() -> Iterator[Launch]:
    """Requests that grow, that are full and that are empty; tiles of 4 and 8 rows, one split and three."""
    lengths, budgets = (0, 7, 40, 299), (8, 9, 40, 299)
    for dtype, dim, group, splits in product(HALVES, DIMS, (4, 8), (1, 3)):
        page = 16 if dim == 128 else None
        state = make_state(lengths, budgets, HEADS, dim, page, dtype, seed=3, capacity=300, device="cpu")
        q, k, v = new_token(state, HEADS * group, seed=4)
        given = {"out": torch.empty_like(q, memory_format=torch.contiguous_format), "q": q, "k": k, "v": v}
        given |= {"k_pool": state.k_pool, "v_pool": state.v_pool, "positions": state.positions}
        given |= {"scores": state.scores.nan_to_num(0.0), "lengths": state.lengths, "victims": state.victims}
        given |= {"next_position": state.next_position, "budgets": state.budgets, "block_table": state.table}
        given |= {"scale": 2 * dim**-0.5, "decay": 0.9, "gain": 0.1, "num_sinks": NUM_SINKS, "num_recent": NUM_RECENT}
        by_position = group == 8 and dtype == torch.float16
        given |= {"score_by_position": by_position, "num_splits": splits}
        changed = ("k_pool", "v_pool", "positions", "scores", "lengths", "victims", "next_position")
        what = f"{dtype} D {dim} G {group}, {splits} splits{', by position' if by_position else ''}"
        yield Launch(op="decode_step", what=what, arguments=given, fresh=("out",), changed=changed, splits=splits)


GROUPS: dict[str, Callable[[], Iterator[Launch]]] = {
    "write": write,
    "compact": compact,
    "key_anchor": key_anchor,
    "lse_tail": lse_tail,
    "score": score,
    "score_wide": score_wide,
    "score_deep": score_deep,
    "kv_diversity": kv_diversity,
    "select": select,
    "select_long": select_long,
    "decode_attention": decode_attention,
    "decode_step": decode_step,
}
"""Launches that one run of a tool can take, the quick ones first."""
