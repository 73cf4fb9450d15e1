"""The ops of a decode step: each against fp64, and many steps against a simulation with one Python object a slot."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.testing.compare import assert_bitwise_equal, assert_census, assert_close_fp32

HEADS = [(8, 2), (9, 3), (4, 4)]
DIM, SLOTS = 8, 9
LENGTHS = (0, 1, 5, SLOTS)
SCALE = 0.5
NAN, INF = float("nan"), float("inf")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def brute(q: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """fp64 output [H, D], LSE [H] and mean weights [K, C] of one request."""
    heads, kv_heads = q.shape[0], k.shape[0]
    output, lse = torch.zeros(heads, DIM, dtype=torch.float64), torch.full((heads,), -INF, dtype=torch.float64)
    probs = torch.zeros(kv_heads, k.shape[1], dtype=torch.float64)
    for h in range(heads if length else 0):
        kv = h // (heads // kv_heads)
        logits = k[kv, :length].double() @ q[h].double() * SCALE
        lse[h] = logits.exp().sum().log()
        weights = (logits - lse[h]).exp()
        output[h] = weights @ v[kv, :length].double()
        probs[kv, :length] += weights / (heads // kv_heads)
    return output, lse, probs


# --- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("lengths", [LENGTHS, (SLOTS, SLOTS, SLOTS, SLOTS)], ids=["some-free", "all-full"])
def test_decode_attention_reads_the_slots_in_use_and_nothing_else(heads, kv_heads, lengths):
    q = torch.randn(4, heads, DIM)
    k, v = (torch.randn(4, kv_heads, SLOTS, DIM) for _ in range(2))
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = NAN
    output, lse, probs = ops.decode_attention(q, k, v, int32(*lengths), SCALE, SLOTS)
    expected = [brute(q[b], k[b], v[b], length) for b, length in enumerate(lengths)]
    for actual, parts in zip((output, lse, probs), zip(*expected, strict=True), strict=True):
        assert_close_fp32(actual, torch.stack(parts))


def test_a_query_of_zeros_counts_the_slots_in_use():
    lengths = int32(1, 2, 130, 400)
    _, lse, probs = ops.decode_attention(
        torch.zeros(4, 4, DIM), torch.randn(4, 2, 400, DIM), torch.randn(4, 2, 400, DIM), lengths, SCALE, 400
    )
    assert_census(lse, lengths[:, None])
    assert_close_fp32(probs.sum(dim=-1), torch.ones(4, 2))


def test_the_output_has_the_dtype_of_the_query_and_the_weights_are_fp32():
    q, k, v = (
        t.to(torch.bfloat16) for t in (torch.randn(1, 4, DIM), torch.randn(1, 2, 5, DIM), torch.randn(1, 2, 5, DIM))
    )
    output, lse, probs = ops.decode_attention(q, k, v, int32(5), SCALE, 5)
    expected, expected_lse, expected_probs = brute(q[0], k[0], v[0], 5)
    assert output.dtype == torch.bfloat16
    assert_bitwise_equal(output[0], expected.to(torch.bfloat16))
    assert_close_fp32(lse[0], expected_lse)
    assert_close_fp32(probs[0], expected_probs)


# --- writing ------------------------------------------------------------------------------------------------------


def test_each_head_writes_to_its_own_slot_and_slot_minus_one_writes_nothing():
    k_pool, v_pool = torch.randn(3, 2, 5, DIM), torch.randn(3, 2, 5, DIM)
    k, v, slots = torch.randn(3, 2, DIM), torch.randn(3, 2, DIM), torch.tensor([[0, 4], [-1, 2], [-1, -1]])
    k[2] = v[2] = k[1, 0] = NAN  # what is not written may be anything
    expected = [k_pool.clone(), v_pool.clone()]
    for b, head in (slots >= 0).nonzero().tolist():
        expected[0][b, head, slots[b, head]] = k[b, head]
        expected[1][b, head, slots[b, head]] = v[b, head]
    assert ops.write_slots(k_pool, v_pool, k, v, slots) is None
    assert_bitwise_equal(k_pool, expected[0])
    assert_bitwise_equal(v_pool, expected[1])


def test_skipping_a_slot_keeps_even_nan_payloads():
    k_pool = torch.full((1, 1, 2, DIM), NAN)
    k_pool.view(torch.int32)[0, 0, 0] = 0x7FC01234
    before = k_pool.clone()
    ops.write_slots(k_pool, k_pool.clone(), torch.ones(1, 1, DIM), torch.ones(1, 1, DIM), torch.tensor([[-1]]))
    assert_bitwise_equal(k_pool, before)


# --- the next victim ----------------------------------------------------------------------------------------------


def find_victim(
    scores: list[float], positions: list[int], length: int, budget: int, next_position: int, sinks: int, recent: int
) -> int:
    return ops.find_victim(
        torch.tensor([[scores]]),
        torch.tensor([[positions]], dtype=torch.int32),
        int32(length),
        int32(budget),
        int32(next_position),
        sinks,
        recent,
    ).item()


@pytest.mark.parametrize(
    ("scores", "positions", "length", "budget", "next_position", "sinks", "recent", "victim"),
    [
        pytest.param([5.0, NAN, NAN], [0, 7, 7], 1, 3, 1, 1, 1, 1, id="the-next-free-slot"),
        pytest.param([3.0, 1.0, 2.0, 0.0], [0, 1, 2, 3], 4, 4, 4, 1, 2, 1, id="the-lowest-unprotected"),
        pytest.param([0.0, 9.0, 8.0, 0.0], [0, 1, 2, 3], 4, 4, 4, 1, 2, 2, id="sinks-and-recents-never"),
        pytest.param([9.0, 1.0, 1.0, 1.0], [0, 5, 3, 4], 4, 4, 9, 1, 1, 1, id="ties-to-the-lower-slot"),
        pytest.param([2.0, 1.0, 0.0], [0, 8, 9], 3, 3, 10, 1, 2, 1, id="the-new-token-counts-among-the-recent"),
        pytest.param([INF, INF, 4.0, 5.0], [0, 1, 4, 5], 4, 4, 6, 1, 2, 2, id="infinite-scores-stay"),
        pytest.param([-3.0, -2.0, -9.0], [4, 5, 6], 3, 3, 9, 0, 1, 2, id="no-sinks-and-negative-scores"),
        pytest.param([1.0, 2.0, -5.0, NAN], [4, 5, 6, 7], 3, 3, 9, 0, 1, 2, id="slots-past-the-budget-are-not-read"),
    ],
)
def test_the_victim_is(scores, positions, length, budget, next_position, sinks, recent, victim):
    assert find_victim(scores, positions, length, budget, next_position, sinks, recent) == victim


def test_every_head_has_its_own_victim():
    scores = torch.tensor([[[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]], [[2.0, 1.0, 0.0], [3.0, 4.0, 9.0]]])
    positions = torch.tensor([[[3, 4, 5], [3, 5, 4]], [[8, 1, 9], [0, 0, 0]]], dtype=torch.int32)
    victims = ops.find_victim(scores, positions, int32(3, 2), int32(3, 4), int32(9, 10), 0, 1)
    assert victims.dtype == torch.int64
    assert victims.tolist() == [[1, 0], [2, 2]]


# --- whole steps --------------------------------------------------------------------------------------------------


@dataclass
class Slot:
    key: Tensor
    value: Tensor
    position: int
    score: float


@dataclass
class Head:
    """One KV head of one request, step by step in plain Python and fp64."""

    slots: list[Slot]
    budget: int
    sinks: int
    recent: int

    def step(self, queries: Tensor, key: Tensor, value: Tensor, position: int, update: tuple[float, float] | None):
        """Output [G, D] of the group's queries; `update` is (decay, gain), None for a ring."""
        new = Slot(key.double(), value.double(), position, 0.0 if update else float(position))
        if len(self.slots) < self.budget:
            self.slots.append(new)
        else:
            evictable = [
                (slot.score, place)
                for place, slot in enumerate(self.slots)
                if slot.position >= self.sinks and slot.position <= position - self.recent
            ]
            self.slots[min(evictable)[1]] = new
        keys, values = torch.stack([s.key for s in self.slots]), torch.stack([s.value for s in self.slots])
        weights = (queries.double() @ keys.T * SCALE).softmax(dim=-1)
        if update:
            for place, slot in enumerate(self.slots):
                slot.score = update[0] * slot.score + update[1] * float(weights[:, place].mean())
        return weights @ values


@dataclass
class Store:
    """The tensors that `decode_step` reads and changes, in its order, NaN where nothing is stored."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor
    lengths: Tensor
    budgets: Tensor
    victims: Tensor
    next_position: Tensor


def matching(starts: list[list[int]], budgets: list[int], capacity: int, kv_heads: int, protect: tuple[int, int]):
    """A store and the simulated heads of the same requests; request b starts with the positions starts[b]."""
    batch = len(starts)
    store = Store(
        keys=torch.full((batch, kv_heads, capacity, DIM), NAN),
        values=torch.full((batch, kv_heads, capacity, DIM), NAN),
        positions=torch.full((batch, kv_heads, capacity), -1, dtype=torch.int32),
        scores=torch.zeros(batch, kv_heads, capacity),
        lengths=int32(*map(len, starts)),
        budgets=int32(*budgets),
        victims=torch.empty(0),
        next_position=int32(*(start[-1] + 1 for start in starts)),
    )
    heads = {}
    for b, start in enumerate(starts):
        for kv in range(kv_heads):
            order = [start[i] for i in torch.randperm(len(start))]  # slots hold positions in any order
            slots = [Slot(torch.randn(DIM), torch.randn(DIM), position, float(torch.rand(()))) for position in order]
            for place, slot in enumerate(slots):
                store.keys[b, kv, place], store.values[b, kv, place] = slot.key, slot.value
                store.positions[b, kv, place], store.scores[b, kv, place] = slot.position, slot.score
                slot.key, slot.value = slot.key.double(), slot.value.double()
            heads[b, kv] = Head(slots, budgets[b], *protect)
    store.victims = ops.find_victim(
        store.scores, store.positions, store.lengths, store.budgets, store.next_position, *protect
    )
    return store, heads


def check_same(store: Store, heads: dict[tuple[int, int], Head]) -> None:
    for (b, kv), head in heads.items():
        used = len(head.slots)
        assert store.lengths[b] == used
        assert store.positions[b, kv, :used].tolist() == [slot.position for slot in head.slots]
        assert_close_fp32(store.scores[b, kv, :used], torch.tensor([s.score for s in head.slots], dtype=torch.float64))
        assert_bitwise_equal(store.keys[b, kv, :used], torch.stack([slot.key for slot in head.slots]).float())
        assert_bitwise_equal(store.values[b, kv, :used], torch.stack([slot.value for slot in head.slots]).float())
        assert store.keys[b, kv, used:].isnan().all() and store.values[b, kv, used:].isnan().all()


def run_and_compare(
    store: Store,
    heads: dict[tuple[int, int], Head],
    num_heads: int,
    protect: tuple[int, int],
    update: tuple[float, float] | None,
    num_steps: int,
) -> None:
    batch, kv_heads = store.victims.shape
    group = num_heads // kv_heads
    for _ in range(num_steps):
        before = store.next_position.tolist()
        q = torch.randn(batch, num_heads, DIM)
        k, v = torch.randn(batch, kv_heads, DIM), torch.randn(batch, kv_heads, DIM)
        output = ops.decode_step(q, k, v, *vars(store).values(), SCALE, *(update or (NAN, NAN)), *protect, not update)
        expected = torch.zeros(batch, num_heads, DIM, dtype=torch.float64)
        for (b, kv), head in heads.items():
            own = slice(kv * group, (kv + 1) * group)
            expected[b, own] = head.step(q[b, own], k[b, kv], v[b, kv], before[b], update)
        assert_close_fp32(output, expected)
        assert store.next_position.tolist() == [position + 1 for position in before]
        check_same(store, heads)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("update", [(0.75, 0.25), (1.0, 1.0), (0.0, 1.0)], ids=["moving", "sum", "last"])
def test_replacing_steps_do_what_a_slot_by_slot_simulation_does(heads, kv_heads, update):
    protect = (2, 3)
    starts = [[0, 1, 2, 5, 9, 14, 15, 16], [0, 1, 3, 4, 5], [0]]  # full, partly full, one token
    store, simulated = matching(starts, [8, 7, 6], 8, kv_heads, protect)
    run_and_compare(store, simulated, heads, protect, update, 14)
    assert store.lengths.tolist() == [8, 7, 6]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("freezes", [True, False])
def test_ring_steps_do_what_a_slot_by_slot_simulation_does(heads, kv_heads, freezes):
    protect = (1, 3)
    starts = [[0, 2, 4, 7, 8, 9], [0, 1, 2, 3, 4]]
    store, simulated = matching(starts, [6, 6], 6, kv_heads, protect)
    for (b, kv), head in simulated.items():
        for place, slot in enumerate(head.slots):
            is_frozen = freezes and b == 0 and slot.position < 7
            slot.score = store.scores[b, kv, place] = INF if is_frozen else float(slot.position)
    store.victims = ops.find_victim(
        store.scores, store.positions, store.lengths, store.budgets, store.next_position, *protect
    )
    run_and_compare(store, simulated, heads, protect, None, 11)
    frozen = [0, 2, 4] if freezes else [0, 16, 17]
    assert sorted(store.positions[0, 0].tolist()) == sorted({*frozen, 18, 19, 20})


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_growing_steps_evict_nothing(heads, kv_heads):
    unlimited = torch.iinfo(torch.int32).max
    store, simulated = matching([[0, 3, 7], [0]], [unlimited, unlimited], 9, kv_heads, (1, 1))
    run_and_compare(store, simulated, heads, (1, 1), (0.5, 0.5), 6)
    assert store.lengths.tolist() == [9, 7]


def test_a_new_tokens_score_starts_at_zero_in_the_slot_it_takes():
    store, _ = matching([[0, 1, 2, 3]], [4], 4, 1, (1, 1))
    victim = int(store.victims)
    before = store.scores.clone()
    ops.decode_step(
        torch.randn(1, 1, DIM),
        torch.randn(1, 1, DIM),
        torch.randn(1, 1, DIM),
        *vars(store).values(),
        SCALE,
        1.0,
        0.0,
        1,
        1,
        False,
    )
    expected = before.clone()
    expected[0, 0, victim] = 0.0
    assert_bitwise_equal(store.scores, expected)
