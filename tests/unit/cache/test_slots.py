"""SlotStore: everything that decoding reads moves, grows and is counted together."""

from dataclasses import fields

import torch

from hf_sparsekv.cache.slots import SlotStore


def store(batch: int = 3, kv_heads: int = 2, capacity: int = 4, dim: int = 8) -> SlotStore:
    shape = (batch, kv_heads, capacity)
    return SlotStore(
        keys=torch.randn(*shape, dim).to(torch.bfloat16),
        values=torch.randn(*shape, dim).to(torch.bfloat16),
        positions=torch.randint(0, 99, shape, dtype=torch.int32),
        scores=torch.rand(shape),
        lengths=torch.randint(1, capacity + 1, (batch,), dtype=torch.int32),
        budgets=torch.full((batch,), capacity, dtype=torch.int32),
        victims=torch.randint(0, capacity, (batch, kv_heads)),
        next_positions=torch.randint(99, 200, (batch,), dtype=torch.int32),
    )


def tensors(slots: SlotStore) -> dict[str, torch.Tensor]:
    return {f.name: getattr(slots, f.name).clone() for f in fields(SlotStore)}


def test_bytes_are_those_of_every_tensor():
    per_slot = 2 * (2 * 8 * 2 + 4 + 4)  # two heads: key and value in bf16, position, score
    per_request = 4 * per_slot + 3 * 4 + 2 * 8
    assert store().nbytes == 3 * per_request
    assert store().capacity == 4


def test_every_tensor_follows_its_request():
    slots = store()
    before, rows = tensors(slots), torch.tensor([2, 2, 0, 1])
    slots.select_rows(rows)
    for name, tensor in tensors(slots).items():
        assert torch.equal(tensor, before[name][rows]), name


def test_repeated_rows_do_not_share_memory():
    slots = store()
    slots.select_rows(torch.tensor([1, 1]))
    before = tensors(slots)
    for f in fields(SlotStore):
        getattr(slots, f.name)[0] = 0
    for name, tensor in tensors(slots).items():
        assert torch.equal(tensor[1], before[name][1]), name


def test_reserved_slots_are_free_and_the_others_stay():
    slots = store()
    before = tensors(slots)
    slots.reserve(7)
    assert slots.capacity == 7
    for name, tensor in tensors(slots).items():
        kept = tensor[:, :, :4] if tensor.dim() > 2 else tensor
        assert torch.equal(kept, before[name]), name
    assert (slots.positions[:, :, 4:] == -1).all()
    assert (slots.scores[:, :, 4:] == 0).all()


def test_reserving_no_more_than_there_is_changes_nothing():
    slots = store()
    address = slots.keys.data_ptr()
    for capacity in (0, 3, 4):
        slots.reserve(capacity)
        assert slots.capacity == 4
        assert slots.keys.data_ptr() == address


def test_stores_of_single_requests_join_in_order():
    parts = [store(batch=1), store(batch=2)]
    joined = tensors(SlotStore.join_rows(parts))
    for name, tensor in joined.items():
        assert torch.equal(tensor, torch.cat([getattr(part, name) for part in parts])), name
