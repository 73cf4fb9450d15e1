"""The ops on a GPU, through their own door: lawful, compiled, captured, equal to their definitions, refusing by name.

The kernels themselves are tested in `kernels/tests`; here it is the way to them.

Shapes: B request, H query head, K KV head, D head dim, N key, A window row, C slot, P page, S slots per page.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_sparsekv import ops
from hf_sparsekv.errors import InputError
from hf_sparsekv.ops import debug, kernels, reference
from hf_sparsekv.ops.library import SCHEMAS
from hf_sparsekv.testing.compare import (
    MAX_FP32_RELATIVE_ERROR,
    assert_bitwise_equal,
    assert_close_fp32,
    assert_close_policy,
)

pytestmark = pytest.mark.gpu

H, K, D, S = 8, 2, 64, 16
SCALE = 0.2
ROOM = 112
"""Slots that every request can have: seven pages."""
LENGTHS = (37, 0, 112, 1, 16, 17)
SINKS, RECENT = 2, 5


@pytest.fixture(autouse=True)
def _with_kernels() -> None:
    assert kernels.load() is not None, "build the kernels first: python kernels/build.py, then set HF_SPARSEKV_KERNELS"


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def new_tokens(count: int) -> tuple[Tensor, Tensor]:
    """Keys and values [count, K, D] as views of one projection."""
    both = bf16(count, 2 * K + 3, D)
    return both[:, 1 : K + 1], both[:, K + 2 : 2 * K + 2]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Pages in shuffled order, with NaN in every slot that holds no token and unused entries that lead astray."""

    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        return self.k_pool, self.v_pool

    def clone(self) -> "Stored":
        return Stored(**{name: tensor.clone() for name, tensor in vars(self).items()})

    def take(self, other: "Stored") -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))


def stored(lengths: Sequence[int], reserved: Sequence[int] | None = None) -> Stored:
    """Requests with tokens in their first `lengths` slots, and pages for `reserved` of them."""
    per_request = ROOM // S
    order = torch.randperm(len(lengths) * per_request + 3).int().tolist()
    pools = [torch.full((len(order), K, S, D), float("nan"), device="cuda").bfloat16() for _ in range(2)]
    table = torch.tensor([-1, 2147480000], dtype=torch.int32).repeat(len(lengths), per_request)[:, :per_request]
    for b, length in enumerate(lengths):
        for entry in range(-(-(reserved or lengths)[b] // S)):
            page, count = order.pop(), max(0, min(S, length - entry * S))
            table[b, entry] = page
            for pool in pools:
                pool[page, :, :count] = bf16(K, count, D)
    return Stored(k_pool=pools[0], v_pool=pools[1], table=table.cuda(), lengths=int32(*lengths))


def full() -> Stored:
    """Two requests without a free slot: nothing is NaN, so that tools may compare by value."""
    return stored([ROOM, ROOM])


def dense(pool: Tensor, table: Tensor, b: int, length: int) -> Tensor:
    """The tokens of one request, [K, length, D]."""
    return pool[table[b, : -(-length // S)].long()].transpose(0, 1).flatten(1, 2)[:, :length]


def assert_attended(output: Tensor, q: Tensor, held: Stored) -> None:
    """Every request of `attend_slots` against fp32 attention, by the policy for half precision."""
    for b, length in enumerate(held.lengths.tolist()):
        if length == 0:
            assert not output[b].any()
            continue
        k, v = (dense(pool, held.table, b, length) for pool in held.pools)
        expected, _ = reference.attention(
            q[b, None, :, None].float(), k[None].float(), v[None].float(), SCALE, None, False
        )
        keys, values = (t.repeat_interleave(H // K, dim=0) for t in (k, v))
        weights = (q[b, :, None] @ keys.transpose(1, 2) * SCALE).softmax(-1)
        assert_close_policy(output[b], expected[0, :, 0], (weights @ values)[:, 0])


def step_state(lengths: Sequence[int], budgets: Sequence[int]) -> list[Tensor]:
    """k_pool ... next_position of `decode_step`, then the table."""
    held = stored(lengths, budgets)
    capacity = max(budgets)
    order = torch.zeros(len(lengths), K, capacity, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for head in range(K):
            order[b, head, :length] = torch.randperm(length).int()
    positions, allowed = order.cuda(), int32(*budgets)
    used = torch.arange(capacity, device="cuda")[None, None] < held.lengths[:, None, None]
    scores = torch.rand(len(lengths), K, capacity, device="cuda").mul_(used)
    victims = reference.find_victim(scores, positions, held.lengths, allowed, held.lengths, SINKS, RECENT)
    return [*held.pools, positions, scores, held.lengths, allowed, victims, held.lengths.clone(), held.table]


def run_step(step: Callable[..., Tensor], token: Sequence[Tensor], state: Sequence[Tensor]) -> Tensor:
    return step(*token, *state[:-1], SCALE, 0.9, 0.1, SINKS, RECENT, False, state[-1])


def step_token(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return (bf16(batch, H, D), *new_tokens(batch))


def assert_step(output: Tensor, q: Tensor, state: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """One step of the kernel and of the definition from equal states; near-ties of victims then follow the kernel's."""
    k_pool, v_pool, positions, scores, lengths, budgets, victims, next_position, table = state
    for same, at in ((k_pool, 0), (v_pool, 1), (lengths, 4), (budgets, 5), (next_position, 7)):
        assert_bitwise_equal(same, exact[at])
    assert_attended(output, q, Stored(k_pool=k_pool, v_pool=v_pool, table=table, lengths=lengths))
    for b, length in enumerate(lengths.tolist()):
        assert torch.equal(positions[b, :, :length], exact[2][b, :, :length])
        assert_close_fp32(scores[b, :, :length], exact[3][b, :, :length])
    chosen, lowest = (exact[3].gather(-1, at[..., None].clamp_max(scores.shape[2] - 1)) for at in (victims, exact[6]))
    assert ((chosen - lowest).abs() <= 2 * MAX_FP32_RELATIVE_ERROR * exact[3].amax(-1, keepdim=True)).all()
    is_free = (lengths < budgets)[:, None].expand_as(victims)
    assert torch.equal(victims[is_free], exact[6][is_free])
    exact[6].copy_(victims)


def arguments(op: str) -> tuple[Any, ...]:
    """Positional arguments of an op for two requests, of shapes that kernels take where there are any."""
    held, q, window, keys = full(), bf16(2, H, D), bf16(2, H, 8, D), bf16(2, K, 100, D)
    scores, lengths, budgets = torch.rand(2, K, 100, device="cuda"), int32(100, 60), int32(32, 20)
    bounds, packed = int32(0, 40, 100), (bf16(100, H, D), bf16(100, K, D), bf16(100, K, D))
    lse = ops.window_lse(window, held.k_pool, held.lengths, SCALE, ROOM, held.table)
    index, _, _ = ops.select(scores, lengths, budgets, 32, SINKS, RECENT, "avg", 5)
    state = step_state((96, 40), (96, 96))
    state[0], state[1] = (pool.nan_to_num(0.0) for pool in state[:2])
    stored_keys = (held.lengths, SCALE, ROOM)
    return {
        "attention": (window, keys, keys.clone(), SCALE, None, True),
        "attention_varlen": (*packed, bounds, bounds, 60, 60, SCALE, True),
        "window_lse": (window, held.k_pool, *stored_keys, held.table),
        "window_score": (
            window, held.k_pool, lse, *stored_keys, "max", "mean", held.table,
            torch.rand(2, K, ROOM, device="cuda"), torch.randn(2, K, D, device="cuda"),
        ),
        "key_anchor": (held.k_pool, held.lengths, ROOM, held.table), "kv_diversity": (keys, keys.flip(2), lengths),
        "pool_scores": (scores, lengths, "avg", 5),
        "select": (scores, lengths, budgets, 32, SINKS, RECENT, "avg", 5, scores.flip(2).contiguous(), "max", 3, 0.5),
        "compact": (*held.pools, index, held.table),
        "compact_into": (*held.pools, keys, keys.clone(), index, held.table),
        "decode_attention": (q, *held.pools, *stored_keys, held.table),
        "attend_slots": (q, *held.pools, *stored_keys, held.table),
        "write_packed": (*held.pools, *new_tokens(5), torch.tensor([3, -1, 40, 0, 77], device="cuda")),
        "write_slots": (*held.pools, *new_tokens(2), torch.tensor([[3, 111], [-1, 16]], device="cuda"), held.table),
        "find_victim": (scores, torch.arange(100, device="cuda").int().expand(2, K, 100), *[lengths] * 3, 1, 1),
        "decode_step": (*step_token(2), *state[:-1], SCALE, 0.9, 0.1, SINKS, RECENT, False, state[-1]),
    }[op]  # fmt: skip


@pytest.mark.parametrize("op", SCHEMAS)
def test_an_op_passes_opcheck(op):
    torch._dynamo.reset()
    result = torch.library.opcheck(getattr(torch.ops.hf_sparsekv, op).default, arguments(op))
    assert set(result.values()) == {"SUCCESS"}


def select_into(window, k, v, lse, lengths, budgets, k_pool, v_pool, table):
    """The end of a prompt: scores, kept positions, pages."""
    scores, _ = ops.window_score(window, k, lse, lengths, 0.2, k.shape[2])
    index, count, retained = ops.select(scores, lengths, budgets, 32, 2, 5, "max", 7)
    ops.compact_into(k_pool, v_pool, k, v, index, table)
    return index, count, retained


def one_step(*given):
    return (ops.decode_step(*given).mul(2.0),)


def one_attention(*given):
    return (ops.attend_slots(*given).mul(2.0),)


@pytest.mark.parametrize("layer", [select_into, one_step, one_attention])
def test_a_layer_compiles_without_a_graph_break(layer):
    torch._dynamo.reset()
    if layer is select_into:
        window, k, lengths = bf16(2, H, 8, D), bf16(2, K, 100, D), int32(100, 60)
        lse = ops.window_lse(window, k, lengths, SCALE, 100)
        pages = stored([0, 0], [32, 20])
        given = (window, k, bf16(2, K, 100, D), lse, lengths, int32(32, 20), *pages.pools, pages.table)
    else:
        given = arguments("decode_step" if layer is one_step else "attend_slots")
    eager, compiled = ([t.clone() if isinstance(t, Tensor) else t for t in given] for _ in range(2))
    expected = layer(*eager)
    frames = CompileCounterWithBackend("aot_eager")
    actual = torch.compile(layer, fullgraph=True, backend=frames)(*compiled)
    assert frames.frame_count == 1
    for one, other in zip((*actual, *compiled), (*expected, *eager), strict=True):
        if isinstance(one, Tensor):
            assert_bitwise_equal(one, other)


def captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one launch. A first run on the same stream allocates the workspace that the capture must not."""
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    return graph


def test_attention_is_its_definition_and_a_graph_of_it_follows_lengths_and_tables():
    held, outputs = stored(LENGTHS), []
    q = torch.full((len(LENGTHS), H, D + 8), float("nan"), device="cuda").bfloat16()[..., :D]  # rows apart
    q.copy_(bf16(*q.shape))
    assert_attended(ops.attend_slots(q, *held.pools, held.lengths, SCALE, ROOM, held.table), q, held)
    graph = captured(lambda: outputs.append(ops.attend_slots(q, *held.pools, held.lengths, SCALE, ROOM, held.table)))
    for rotation in range(len(LENGTHS)):
        held.take(stored(LENGTHS[rotation:] + LENGTHS[:rotation]))
        q.copy_(bf16(*q.shape))
        graph.replay()
        assert_attended(outputs[-1], q, held)


def test_a_graph_of_a_decode_step_advances_its_requests():
    state, token, outputs = step_state((0, 7, 40, 96), (8, 8, 64, 96)), step_token(4), []
    start = [tensor.clone() for tensor in state]
    graph = captured(lambda: outputs.append(run_step(ops.decode_step, token, state)))
    for another in (start, step_state((96, 8, 3, 0), (96, 8, 64, 8)), step_state((5, 64, 96, 7), (8, 64, 96, 96))):
        for tensor, values in zip(state, another, strict=True):
            tensor.copy_(values)
        exact = [tensor.clone() for tensor in state]
        for _ in range(12):
            for tensor, values in zip(token, step_token(4), strict=True):
                tensor.copy_(values)
            graph.replay()
            run_step(reference.decode_step, token, exact)
            assert_step(outputs[-1], token[0], state, exact)


def test_a_graph_of_writes_follows_its_slots():
    held, (k, v) = full(), new_tokens(6)
    slots = torch.full((6,), -1, device="cuda")
    graph = captured(lambda: ops.write_packed(*held.pools, k, v, slots))
    expected = held.clone()
    for _ in range(4):
        slots.copy_(torch.randperm(held.k_pool.shape[0] * S)[:6].masked_fill(torch.rand(6) < 0.3, -1))
        graph.replay()
        reference.write_packed(*expected.pools, k, v, slots)
        assert_bitwise_equal(torch.stack(held.pools), torch.stack(expected.pools))


def kept_index(counts: Sequence[int], num_keys: int, capacity: int) -> Tensor:
    index = torch.full((len(counts), K, capacity), -1)
    for b, count in enumerate(counts):
        for head in range(K):
            index[b, head, :count] = torch.randperm(num_keys)[:count].sort().values
    return index.cuda()


def test_compaction_is_its_definition_in_a_graph_and_out_of_it():
    held, (keys, values) = stored([0, 0, 0], [40, 1, 0]), (bf16(3, 100, K, D).transpose(1, 2) for _ in range(2))
    index = kept_index((40, 1, 0), 100, 48)
    launch = functools.partial(ops.compact_into, *held.pools, keys, values, index, held.table)
    replay = captured(launch).replay
    for run in (launch, replay):
        for counts in ((40, 1, 0), (0, 48, 17), (16, 32, 15)):
            held.take(stored([0, 0, 0], counts))
            index.copy_(kept_index(counts, 100, 48))
            expected = held.clone()
            run()
            reference.compact_into(*expected.pools, keys, values, index, held.table)
            assert_bitwise_equal(torch.stack(held.pools), torch.stack(expected.pools))


def test_writes_are_their_definition():
    held, (k, v) = stored(LENGTHS, [max(1, length) for length in LENGTHS]), new_tokens(len(LENGTHS))
    slots = (held.lengths.long() - 1)[:, None].repeat(1, K)
    slots[0, 1], slots[2] = -1, torch.tensor([0, 77])
    expected = held.clone()
    ops.write_slots(*held.pools, k, v, slots, held.table)
    reference.write_slots(*expected.pools, k, v, slots, held.table)
    assert_bitwise_equal(torch.stack(held.pools), torch.stack(expected.pools))
    places = torch.tensor([5, -1, 300, 0, -1, 299], device="cuda")
    ops.write_packed(*held.pools, v, k, places)
    reference.write_packed(*expected.pools, v, k, places)
    assert_bitwise_equal(torch.stack(held.pools), torch.stack(expected.pools))


WRONG: dict[str, tuple[str, int, Callable[[Any], Any], str]] = {
    "lengths of another dtype": ("attend_slots", 3, lambda t: t.long(), "`lengths` must be int32, got int64"),
    "values of another dtype": ("attend_slots", 2, lambda t: t.half(), "`v_pool` must have the dtype of `q`"),
    "lengths elsewhere": ("attend_slots", 3, lambda t: t.cpu(), "`lengths` must be on CUDA device 0"),
    "too long": ("attend_slots", 5, lambda n: n + 1, "`k_pool` holds 112 slots per request"),
    "a head ratio": ("attend_slots", 0, lambda t: t[:, :7].contiguous(), "`q` must have 1 to 8 heads per head"),
    "fewer query than KV heads": ("attend_slots", 0, lambda t: t[:, :1].contiguous(), "`q` is .*takes .* 1 to 8"),
    "an index of another dtype": ("compact_into", 4, lambda t: t.int(), "`index` must be int64, got int32"),
    "too small a table": ("compact_into", 5, lambda t: t[:, :1], "`k_pool` has 16 slots per request"),
    "a table of one request": ("write_slots", 5, lambda t: t[:1], "`block_table` has the wrong shape"),
    "places of another dtype": ("write_packed", 4, lambda t: t.int(), "`slots` must be int64, got int32"),
    "victims of another dtype": ("decode_step", 9, lambda t: t.int(), "`victims` must be int64, got int32"),
    "an LSE of another dtype": ("window_score", 2, lambda t: t.double(), "`lse` must be float32, got float64"),
    "an unknown reduction": ("window_score", 6, lambda _: "median", "`row_reduction` is 'median'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_kernel_refuses_is_an_input_error_by_our_name(case):
    op, at, change, message = WRONG[case]
    given = list(arguments(op))
    given[at] = change(given[at])
    with pytest.raises(InputError, match=message):
        getattr(ops, op)(*given)


BAD_VALUES: dict[str, tuple[str, int, str]] = {
    "attend_slots table": ("attend_slots", 6, "`block_table`"),
    "attend_slots lengths": ("attend_slots", 3, "`lengths`"),
    "window_score table": ("window_score", 8, "`block_table`"),
    "select lengths": ("select", 1, "`lengths`"),
    "compact_into index": ("compact_into", 4, "`index`"),
    "compact_into table": ("compact_into", 5, "`block_table`"),
    "write_slots slots": ("write_slots", 4, "`slots`"),
    "write_packed slots": ("write_packed", 4, "`slots`"),
    "decode_step victims": ("decode_step", 9, "`victims`"),
    "decode_step table": ("decode_step", 17, "`block_table`"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_debug_mode_refuses_before_the_launch(case):
    op, at, argument = BAD_VALUES[case]
    run, given = debug.checked(op, kernels.KERNELS[op]), list(arguments(op))
    good, given[at] = given[at], torch.full_like(given[at], 2147480000)
    with pytest.raises(InputError, match=f"{argument}.* is 2147480000: it must lie in "):
        run(*given)
    given[at] = good
    run(*given)
    torch.cuda.synchronize()


def test_debug_mode_is_switched_on_by_the_environment():
    code = """
import torch
from hf_sparsekv import ops
from hf_sparsekv.errors import InputError
q, pool = torch.zeros(1, 4, 64, device="cuda").bfloat16(), torch.zeros(2, 2, 16, 64, device="cuda").bfloat16()
lengths, table = (torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([20], [[1, 99]]))
try:
    ops.attend_slots(q, pool, pool, lengths, 1.0, 32, table)
except InputError as error:
    print(error)
table.fill_(1)
print(ops.attend_slots(q, pool, pool, lengths, 1.0, 32, table).sum().item())
"""
    environment = os.environ | {debug.DEBUG_VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "`block_table`[0, 1] is 99: it must lie in 0 to 1, the pages of the pool",
        "0.0",
    ]
