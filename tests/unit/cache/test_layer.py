"""FullLayer and WindowLayer: what they count and what follows a request."""

import pytest
import torch

from hf_sparsekv import SparseKVConfig
from hf_sparsekv.cache.layer import FullLayer, PromptRecord, WindowLayer
from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.cache.slots import SlotStore
from hf_sparsekv.plan import LayerSpec

SPEC = LayerSpec(layer_idx=1, is_full=False, budget=6, num_protected=3)


def window_layer(seen: tuple[int, ...] = (), **options: object) -> WindowLayer:
    """A layer whose history has `seen` tokens per request, left-padded."""
    padding = Padding()
    if seen:
        columns = torch.arange(max(seen))
        padding.extend(len(seen), max(seen), columns[None] >= max(seen) - torch.tensor(seen)[:, None])
    sizes = {"num_sink_tokens": 1, "num_recent_tokens": 2, "observation_window": 2, "budget": 6}
    return WindowLayer(SPEC, padding, SparseKVConfig(**(sizes | options)), None)


def slot_store(batch: int, capacity: int = 6) -> SlotStore:
    shape = (batch, 2, capacity)
    return SlotStore(
        keys=torch.randn(*shape, 4),
        values=torch.randn(*shape, 4),
        positions=torch.zeros(shape, dtype=torch.int32),
        scores=torch.rand(shape),
        lengths=torch.full((batch,), capacity, dtype=torch.int32),
        budgets=torch.full((batch,), capacity, dtype=torch.int32),
        victims=torch.zeros(batch, 2, dtype=torch.int64),
        next_positions=torch.full((batch,), 9, dtype=torch.int32),
    )


@pytest.mark.parametrize(("scorer", "held"), [("snapkv", 2), ("h2o", 7), ("keydiff", 0)])
def test_the_tail_keeps_the_rows_that_the_scorer_asks_for(scorer, held):
    layer = window_layer(scorer=scorer)
    layer.tail.append(torch.randn(1, 4, 7, 4), None)
    assert layer.tail.queries.shape[2] == held


def test_the_layers_of_a_cache_share_one_history():
    padding = Padding()
    full, window = FullLayer(SPEC, padding), WindowLayer(SPEC, padding, SparseKVConfig(), None)
    padding.extend(2, 5, None)
    assert full.padding is window.padding
    assert window.num_stored(1) == 5


def test_bytes_are_those_of_columns_scores_tail_and_slots():
    layer = window_layer((5, 5))
    assert layer.nbytes == 0
    layer.columns.append(torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4))
    layer.column_scores = torch.zeros(2, 2, 64)
    layer.tail.append(torch.randn(2, 4, 5, 4), None)
    layer.slots = slot_store(2)
    columns, scores, tail = 2 * 2 * 2 * 16 * 4 * 4, 2 * 2 * 64 * 4, 2 * 4 * 2 * 4 * 4
    assert layer.nbytes == columns + scores + tail + layer.slots.nbytes


def test_before_the_first_eviction_every_token_is_stored():
    layer = window_layer((3, 5))
    assert [layer.num_stored(row) for row in (0, 1)] == [3, 5]
    assert [layer.num_new(row) for row in (0, 1)] == [3, 5]


@pytest.mark.parametrize(("decode", "in_slots"), [("replace_lowest", [5, 6]), ("ring", [5, 6]), ("grow", [5, 8])])
def test_slots_in_use_grow_up_to_the_budget(decode, in_slots):
    layer = window_layer((3, 10), decode=decode)
    layer.slots = slot_store(2)
    layer.prompts = [PromptRecord(seen=3, kept=3, evicted=0, budget=6), PromptRecord(10, 6, 4, 6)]
    layer.num_decoded = 2
    layer.padding.extend(2, 2, None)
    assert [layer.num_in_slots(row) for row in (0, 1)] == in_slots
    assert [layer.num_new(row) for row in (0, 1)] == [0, 0]
    assert [layer.num_stored(row) for row in (0, 1)] == in_slots
    layer.padding.extend(2, 4, torch.tensor([[False, True, True, True], [True] * 4]))  # a new turn
    assert [layer.num_new(row) for row in (0, 1)] == [3, 4]
    assert [layer.num_stored(row) for row in (0, 1)] == [in_slots[0] + 3, in_slots[1] + 4]


def test_everything_that_a_layer_holds_follows_its_requests():
    layer = window_layer((3, 5))
    keys, values, queries = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 4, 5, 4)
    layer.columns.append(keys, values)
    layer.tail.append(queries, layer.padding.is_token)
    layer.column_scores = torch.rand(2, 2, 64)
    layer.slots = slot_store(2)
    layer.prompts = [PromptRecord(3, 3, 0, 6), PromptRecord(5, 5, 0, 6)]
    scores, positions, slot_keys = layer.column_scores, layer.slots.positions, layer.slots.keys
    rows = torch.tensor([1, 0, 1])
    layer.select_rows(rows)
    assert torch.equal(layer.columns.keys, keys[rows])
    assert torch.equal(layer.columns.values, values[rows])
    assert torch.equal(layer.tail.queries, queries[rows][:, :, -2:])
    assert torch.equal(layer.column_scores, scores[rows])
    assert torch.equal(layer.slots.positions, positions[rows])
    assert torch.equal(layer.slots.keys, slot_keys[rows])
    assert [record.seen for record in layer.prompts] == [5, 3, 5]


def test_equal_records_follow_any_number_of_requests():
    layer = window_layer((5, 5))
    layer.prompts = [PromptRecord(5, 5, 0, 6)] * 2
    layer.select_rows(torch.tensor([0, 0, 1, 1]))
    assert layer.prompts == [PromptRecord(5, 5, 0, 6)] * 4
    empty = window_layer()
    empty.select_rows(torch.tensor([0, 0]))
    assert empty.prompts == []
