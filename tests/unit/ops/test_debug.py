"""Debug mode: what a kernel would read or write outside its tensors is refused first, by name, value and limit."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hf_sparsekv.errors import InputError
from hf_sparsekv.ops import debug, kernels
from hf_sparsekv.ops.library import SCHEMAS
from hf_sparsekv.ops.prefill import PREFILL

UNUSED = 2147480000
POOL = torch.zeros(5, 2, 3, 4)
"""[P, K, S, D]"""
TABLE = torch.tensor([[4, 0], [2, UNUSED]], dtype=torch.int32)
"""Room for 6 slots; the second request can have 3."""


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refuses(op: str, message: str, **given: object) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        debug.CHECKS[op](**given)


STORED = ["window_lse", "window_score", "key_anchor", "attend_slots"]


@pytest.mark.parametrize("op", STORED)
def test_lengths_and_pages_of_what_is_read(op):
    check = debug.CHECKS[op]
    check(k_pool=POOL, lengths=int32(6, 3), max_length=6, block_table=TABLE)
    check(k_pool=POOL, lengths=int32(0, 0), max_length=0, block_table=TABLE * 0 - 1)
    check(k_pool=POOL[:2], lengths=int32(3, 0), max_length=3)
    given = {"k_pool": POOL, "block_table": TABLE}
    refuses(op, "`lengths`[0] is 6: it must lie in 0 to 5, `max_length`", lengths=int32(6, 3), max_length=5, **given)
    refuses(op, "`lengths`[1] is 7: it must lie in 0 to 6, the slots", lengths=int32(6, 7), max_length=9, **given)
    refuses(op, "`lengths`[1] is -1: it must lie in 0 to 6", lengths=int32(6, -1), max_length=6, **given)
    refuses(
        op,
        f"`block_table`[1, 1] is {UNUSED}: it must lie in 0 to 4, the pages of the pool",
        lengths=int32(6, 4),
        max_length=6,
        **given,
    )
    refuses(op, "`block_table` is for 2 requests, `lengths` for 1", lengths=int32(6), max_length=6, **given)
    refuses(op, "`lengths`[0] is 4: it must lie in 0 to 3, the slots", lengths=int32(4), max_length=9, k_pool=POOL[:1])


def test_lengths_of_what_is_compared():
    debug.check_diversity(keys=POOL, lengths=int32(3, 0, 1, 2, 3))
    refuses("kv_diversity", "`lengths`[1] is 4: it must lie in 0 to 3", keys=POOL[:2], lengths=int32(3, 4))
    refuses("kv_diversity", "`lengths`[0] is -1: it must lie in 0 to 3", keys=POOL[:2], lengths=int32(-1, 3))
    refuses("kv_diversity", "`keys` is for 5 requests, `lengths` for 1", keys=POOL, lengths=int32(3))


def test_lengths_and_budgets_of_a_selection():
    given = {"scores": torch.zeros(2, 2, 6)}
    debug.check_select(lengths=int32(6, 0), budgets=int32(0, 99), **given)
    refuses("select", "`lengths`[0] is 7: it must lie in 0 to 6", lengths=int32(7, 0), budgets=int32(1, 1), **given)
    refuses("select", "`budgets`[1] is -2: it must lie in 0", lengths=int32(6, 0), budgets=int32(1, -2), **given)


def test_kept_positions_and_their_pages():
    index = torch.tensor([[[0, 5], [4, -1]], [[2, -1], [0, 1]]])
    below = torch.tensor([0, 4])[:, None, None]
    debug.check_compact(k_pool=POOL, index=index, block_table=TABLE)
    refuses("compact", "`index`[0, 0, 1] is 5: it must lie in -1 to 2", k_pool=POOL[:2], index=index)
    refuses("compact", "`index`[1, 0, 0] is -2: it must", k_pool=POOL, index=index - below, block_table=TABLE)
    index[1, 1, 1] = 3
    refuses("compact", f"`block_table`[1, 1] is {UNUSED}", k_pool=POOL, index=index, block_table=TABLE)


def test_what_goes_straight_into_pages():
    given = {"k_pool": POOL, "k": torch.zeros(2, 2, 40, 4), "block_table": TABLE}
    kept = torch.tensor([[[0, 7, 9, 39]], [[3, 8, 39, -1]]]).expand(2, 2, 4).clone()
    debug.check_compact_into(index=kept, **given)
    refuses("compact_into", "`index`[0, 0, 3] is 40: it must lie in -1 to 39", index=kept + (kept == 39).int(), **given)
    kept[1, 0, 3] = 39
    refuses("compact_into", f"`block_table`[1, 1] is {UNUSED}: it must lie in 0 to 4", index=kept, **given)
    wide = torch.full((2, 2, 7), -1)
    refuses("compact_into", "`index` has 7 entries per head: `block_table` gives a request 6", index=wide, **given)


def test_places_of_what_is_written():
    debug.check_write_packed(k_pool=POOL, slots=torch.tensor([-1, 0, 14]))
    refuses("write_packed", "`slots`[1] is 15: it must lie in -1 to 14", k_pool=POOL, slots=torch.tensor([0, 15]))
    slots = torch.tensor([[5, -1], [2, 0]])
    debug.check_write_slots(k_pool=POOL, slots=slots, block_table=TABLE)
    refuses("write_slots", "`slots`[0, 0] is 5: it must lie in -1 to 2", k_pool=POOL[:2], slots=slots)
    refuses("write_slots", "`slots`[1, 1] is 6", k_pool=POOL, slots=slots + slots.eq(0) * 6, block_table=TABLE)
    slots[1, 1] = 3
    refuses("write_slots", f"`block_table`[1, 1] is {UNUSED}", k_pool=POOL, slots=slots, block_table=TABLE)


def step(**changed: Tensor) -> dict[str, Tensor]:
    """One request is full, one takes its third slot, one has no budget: nothing of that one is looked at."""
    state = {
        "k_pool": POOL,
        "scores": torch.zeros(3, 2, 6),
        "lengths": int32(6, 2, 0),
        "budgets": int32(6, 3, 0),
        "victims": torch.tensor([[5, 0], [2, 2], [-1, 77]]),
        "block_table": torch.cat([TABLE, int32(-1, UNUSED)[None]]),
    }
    return state | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": int32(6, 7, 0)}, "`lengths`[1] is 7: it must lie in 0 to 6, the slots"),
        ({"budgets": int32(6, -1, 0)}, "`budgets`[1] is -1: it must lie in 0 to 6, the slots"),
        ({"scores": torch.zeros(3, 2, 5)}, "`budgets`[0] is 6: it must lie in 0 to 5, the slots"),
        ({"victims": torch.tensor([[5, 6], [2, 2], [0, 0]])}, "`victims`[0, 1] is 6: it must lie in 0 to 5, the slots"),
        ({"victims": torch.tensor([[5, 0], [2, 3], [0, 0]])}, "`victims`[1, 1] is 3: it must lie in 0 to 2, the slots"),
        ({"victims": torch.tensor([[5, 0], [2, -1], [0, 0]])}, "`victims`[1, 1] is -1: it must lie in 0 to 2"),
        ({"lengths": int32(6, 3, 0), "budgets": int32(6, 4, 0)}, f"`block_table`[1, 1] is {UNUSED}"),
        ({"victims": torch.tensor([[5, 0]])}, "`victims` is for 1 requests, `lengths` for 3"),
        ({"budgets": int32(6)}, "`budgets` is for 1 requests, `lengths` for 3"),
    ],
)
def test_a_step_of_decoding(changed, message):
    debug.check_decode_step(**step())
    refuses("decode_step", message, **step(**changed))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((1, 4, 9), "`cu_seqlens_k`[0] is 1: it must lie in 0 to 0"),
        ((0, 5, 4), "`cu_seqlens_k`[2] is 4: it must lie in 5 to 9, from the entry before to `max_seqlen_k` = 5 more"),
        ((0, 6, 9), "`cu_seqlens_k`[1] is 6: it must lie in 0 to 5"),
        ((0, 5, 10), "`cu_seqlens_k`[2] is 10: it must lie in 5 to 9"),
    ],
)
def test_bounds_of_packed_requests(bounds, message):
    q, k = torch.zeros(9, 4, 4), torch.zeros(9, 2, 4)
    good = int32(0, 4, 9)
    given = {"q": q, "k": k, "cu_seqlens_q": good, "max_seqlen_q": 5, "max_seqlen_k": 5}
    debug.check_varlen(cu_seqlens_k=good, **given)
    debug.check_varlen(cu_seqlens_k=int32(0, 0, 4), **given)  # the tokens behind belong to no request
    refuses("attention_varlen", message, cu_seqlens_k=int32(*bounds), **given)


def test_every_op_with_a_kernel_is_checked_under_its_own_argument_names():
    assert set(debug.CHECKS) == set(kernels.KERNELS) | {"attention_varlen"}
    implementations = kernels.KERNELS | PREFILL
    for op, check in debug.CHECKS.items():
        wanted = set(check.__code__.co_varnames[: check.__code__.co_argcount])
        assert wanted - {"block_table"} <= set(implementations[op].__annotations__), op
        assert wanted - {"block_table"} <= set(re.findall(r"(\w+)[,=)]", SCHEMAS[op])), op


def test_a_checked_op_runs_when_all_is_well_and_not_otherwise():
    launched = []

    def write_packed(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        launched.append(slots)

    run = debug.checked("write_packed", write_packed)
    new = torch.zeros(1, 2, 4)
    run(POOL, POOL, new, v=new, slots=torch.tensor([14]))
    assert len(launched) == 1
    with pytest.raises(InputError, match="`slots`"):
        run(POOL, POOL, new, new, torch.tensor([15]))
    assert len(launched) == 1


def test_nothing_stands_before_an_op_unless_asked():
    assert not debug.IS_ON
    for op, implementation in kernels.KERNELS.items():
        assert debug.guarded(op, implementation) is implementation


@pytest.mark.parametrize(("value", "expected"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_variable_is_read_once_at_import(value, expected):
    code = (
        "import torch; from hf_sparsekv.ops import debug, kernels;"
        "print(debug.IS_ON, debug.guarded('select', kernels.select) is not kernels.select)"
    )
    environment = os.environ | {debug.DEBUG_VARIABLE: value}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == [expected, expected]
