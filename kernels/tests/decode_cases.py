"""States, references and checks that the decode tests share.

Shapes: B request, T query row, H query head, K KV head, G = H / K, D head dim, C slots per request.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from helpers import assert_bitwise_equal, assert_close_policy, int32, make_pool, padded_rows
from torch import Tensor

from hf_sparsekv.ops import reference
from hf_sparsekv.ops.reference.pool import dense_rows
from hf_sparsekv.testing.compare import MAX_FP32_RELATIVE_ERROR, assert_close_fp32

DEVICE = "cuda"
COUNTER_BYTES = 2 * 8192 * 4
"""The part of a workspace that must be zero before and after every launch."""
NUM_SINKS, NUM_RECENT = 2, 5


def new_workspace(num_bytes: int = 32 * 2**20) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)


def nan_like(q: Tensor) -> Tensor:
    """An output to be filled, as a non-contiguous view."""
    return torch.full((*q.shape[:-1], q.shape[-1] + 8), float("nan"), dtype=q.dtype, device=q.device)[
        ..., : q.shape[-1]
    ]


def same_dtype_attention(q_THD: Tensor, k_KND: Tensor, v_KND: Tensor, scale: float) -> Tensor:
    """Plain PyTorch in the dtype of its inputs, [T, H, D]; rows that see nothing give 0."""
    group = q_THD.shape[1] // k_KND.shape[0]
    keys, values = (x.repeat_interleave(group, dim=0) for x in (k_KND, v_KND))
    logits = torch.matmul(q_THD.transpose(0, 1), keys.transpose(-1, -2)) * scale
    rows, slots = torch.arange(q_THD.shape[0]), torch.arange(k_KND.shape[1])
    hidden = (slots[None] > rows[:, None] + len(slots) - len(rows)).to(q_THD.device)
    weights = logits.masked_fill(hidden, float("-inf")).softmax(dim=-1).nan_to_num(0.0)
    return torch.matmul(weights, values).transpose(0, 1)


def check_attention(
    out: Tensor, lse: Tensor, q_BTHD: Tensor, dense_k: Tensor, dense_v: Tensor, lengths: Sequence[int], scale: float
) -> None:
    """Every request of a finished launch against the fp32 reference."""
    for b, length in enumerate(lengths):
        if length == 0:
            assert not out[b].any()
            assert torch.isneginf(lse[b]).all()
            continue
        k, v = dense_k[b, :, :length], dense_v[b, :, :length]
        expected, expected_lse = reference.attention(
            q_BTHD[b : b + 1].float().transpose(1, 2), k[None].float(), v[None].float(), scale, None, True
        )
        same = same_dtype_attention(q_BTHD[b], k, v, scale)
        assert_close_policy(out[b], expected[0].transpose(0, 1), same)
        assert_close_fp32(lse[b], expected_lse[0].T)


@dataclasses.dataclass
class State:
    """What a step changes, and what it needs besides the token. The kernel's and the reference's start equal."""

    k_pool: Tensor
    v_pool: Tensor
    table: Tensor | None
    positions: Tensor
    scores: Tensor
    lengths: Tensor
    budgets: Tensor
    victims: Tensor
    next_position: Tensor

    def copy(self) -> "State":
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, value in values.items():
            values[name] = None if value is None else value.clone()
        return State(**values)

    def changed(self) -> list[Tensor]:
        return [
            self.k_pool,
            self.v_pool,
            self.positions,
            self.scores,
            self.lengths,
            self.victims,
            self.next_position,
        ]


def make_state(
    lengths: Sequence[int],
    budgets: Sequence[int],
    kv_heads: int,
    dim: int,
    page_size: int | None,
    dtype: torch.dtype,
    seed: int,
    capacity: int | None = None,
    device: str = DEVICE,
) -> State:
    """Requests with random tokens in slots below their lengths, and NaN keys, values and scores in the free ones."""
    capacity = capacity or max(budgets)
    held = [max(length, budget) for length, budget in zip(lengths, budgets, strict=True)]
    k_pool, v_pool, table, _, _ = make_pool(held, kv_heads, dim, page_size, dtype, device, seed, capacity=capacity)
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    positions = torch.zeros(batch, kv_heads, capacity + 3, dtype=torch.int32)[..., :capacity]
    scores = torch.full((batch, kv_heads, capacity + 3), float("nan"))[..., :capacity]
    next_position = [length + 11 * b for b, length in enumerate(lengths)]
    for b, length in enumerate(lengths):
        for head in range(kv_heads):
            positions[b, head, :length] = torch.randperm(next_position[b], generator=generator)[:length].int()
        scores[b, :, :length] = torch.rand(kv_heads, length, generator=generator) / max(1, length)
        for slot in range(length, held[b]):
            for pool in (k_pool, v_pool):
                page = b if table is None else int(table[b, slot // pool.shape[2]])
                pool[page, :, slot if table is None else slot % pool.shape[2]] = float("nan")
    state = State(
        k_pool=k_pool,
        v_pool=v_pool,
        table=table,
        positions=positions.to(device),
        scores=scores.to(device),
        lengths=int32(lengths, device),
        budgets=int32(budgets, device),
        victims=torch.empty(batch, kv_heads + 1, dtype=torch.int64, device=device)[:, :kv_heads],
        next_position=int32(next_position, device),
    )
    state.victims.copy_(next_victims(state))
    return state


def next_victims(state: State) -> Tensor:
    return reference.find_victim(
        state.scores.nan_to_num(0.0),
        state.positions,
        state.lengths,
        state.budgets,
        state.next_position,
        NUM_SINKS,
        NUM_RECENT,
    )


def new_token(state: State, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, kv_heads, dim, dtype = *state.victims.shape, state.k_pool.shape[3], state.k_pool.dtype
    device = state.k_pool.device
    q = padded_rows((batch, heads, dim), dtype, device, seed)
    k, v = (padded_rows((batch, kv_heads, dim), dtype, device, seed + i) for i in (1, 2))
    return q, k, v


def run_step(
    ops: Any,
    state: State,
    token: tuple[Tensor, Tensor, Tensor],
    workspace: Tensor,
    num_splits: int = 0,
    by_position: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    q, k, v = token
    out = nan_like(q) if out is None else out
    ops.decode_step(
        out,
        state.k_pool,
        state.v_pool,
        state.positions,
        state.scores,
        state.lengths,
        state.victims,
        state.next_position,
        workspace,
        q,
        k,
        v,
        state.budgets,
        state.table,
        2 * q.shape[-1] ** -0.5,
        0.9,
        0.1,
        NUM_SINKS,
        NUM_RECENT,
        by_position,
        num_splits,
    )
    return out


def run_reference(state: State, token: tuple[Tensor, Tensor, Tensor], by_position: bool = False) -> Tensor:
    """fp32 output of the reference on the rounded inputs; scores of free slots must not be NaN for it."""
    q, k, v = token
    return reference.decode_step(
        q.float(),
        k,
        v,
        state.k_pool,
        state.v_pool,
        state.positions,
        state.scores,
        state.lengths,
        state.budgets,
        state.victims,
        state.next_position,
        2 * q.shape[-1] ** -0.5,
        0.9,
        0.1,
        NUM_SINKS,
        NUM_RECENT,
        by_position,
        state.table,
    )


def check_step(out: Tensor, expected: Tensor, q: Tensor, state: State, exact: State) -> None:
    """Output, pools, positions, scores and counters of one step; victims are left to the caller."""
    capacity = state.scores.shape[2]
    assert torch.equal(state.lengths, exact.lengths)
    assert torch.equal(state.next_position, exact.next_position)
    for actual, reference_pool in ((state.k_pool, exact.k_pool), (state.v_pool, exact.v_pool)):
        assert_bitwise_equal(actual, reference_pool)
    dense_k, dense_v = (dense_rows(pool, state.table, capacity) for pool in (state.k_pool, state.v_pool))
    for b, length in enumerate(state.lengths.tolist()):
        same = same_dtype_attention(
            q[b : b + 1], dense_k[b, :, :length], dense_v[b, :, :length], 2 * q.shape[-1] ** -0.5
        )
        assert_close_policy(out[b], expected[b], same[0])
        assert torch.equal(state.positions[b, :, :length], exact.positions[b, :, :length])
        assert_close_fp32(state.scores[b, :, :length], exact.scores[b, :, :length])


def adopt_victims(state: State, exact: State) -> int:
    """Where a near-tie made the kernel choose another victim, let the reference follow; returns how often.

    The chosen slot must be allowed, and its score within the fp32 policy of the lowest.
    """
    flips = (state.victims != exact.victims).nonzero().tolist()
    for b, head in flips:
        chosen, lowest = int(state.victims[b, head]), int(exact.victims[b, head])
        assert int(exact.lengths[b]) == int(exact.budgets[b]), "a free slot was not taken"
        position = int(exact.positions[b, head, chosen])
        assert NUM_SINKS <= position < int(exact.next_position[b]) - NUM_RECENT + 1, f"position {position} is protected"
        row = exact.scores[b, head]
        gap = float(row[chosen] - row[lowest])
        assert gap <= 2 * MAX_FP32_RELATIVE_ERROR * float(row.max()), f"victim {chosen} is {gap:.3e} above {lowest}"
    exact.victims.copy_(state.victims)
    return len(flips)
