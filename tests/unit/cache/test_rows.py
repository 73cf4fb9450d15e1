"""RowState: where every layer's state is, what a row costs, and that nothing of a row stays behind when it moves."""

import pytest
import torch

from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.plan import LayerPlan, ModelShape

SHAPE = ModelShape(num_layers=5, num_heads=6, num_kv_heads=3, head_dim=8)
BASE = SparseKVConfig(full_layers=[0, 3], budget=21, num_sink_tokens=2, num_recent_tokens=8, observation_window=8)
CONFIGS = [
    BASE,
    BASE.with_(budget=[10, 16, 33]),
    BASE.with_(budget=0.3),
    BASE.with_(budget=5000),
    BASE.with_(decode="grow"),
    BASE.with_(full_layers=[]),
    BASE.with_(full_layers=None, num_full_layers=5),
]
PAGE, LENGTH, ROWS = 8, 101, 4


def rows_of(config, num_rows=ROWS, page_size=PAGE):
    plan = LayerPlan.build(config, SHAPE)
    return RowState(
        config,
        plan,
        num_rows=num_rows,
        num_kv_heads=SHAPE.num_kv_heads,
        page_size=page_size,
        max_length=LENGTH,
        device=torch.device("cpu"),
    )


def filled(config):
    """State in which every number is different."""
    rows = rows_of(config)
    for tensor in tensors(rows).values():
        tensor.copy_(torch.arange(1, tensor.numel() + 1).view(tensor.shape))
    return rows


def tensors(rows):
    return {name: value for name, value in vars(rows).items() if isinstance(value, torch.Tensor)}


def row(rows, index):
    """All that is known of one row, by tensor."""
    last = {"append_lengths", "slot_lengths", "slot_budgets", "slot_next", "append_tables", "victims"}
    return {
        name: tensor[:, index].clone() if name in last else tensor[index].clone()
        for name, tensor in tensors(rows).items()
    }


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@pytest.mark.parametrize("page_size", [1, 5, 8, 16])
def test_the_bytes_of_a_row_are_those_of_its_tensors(config, page_size):
    for num_rows in (1, 3):
        rows = rows_of(config, num_rows, page_size)
        row_bytes = RowState.row_bytes(rows.plan, SHAPE.num_kv_heads, page_size, LENGTH)
        assert rows.nbytes == num_rows * row_bytes == sum(tensor.nbytes for tensor in tensors(rows).values())


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_every_layer_has_a_place_of_its_own(config):
    rows = rows_of(config)
    for is_append in (True, False):
        places = [place for place in rows.places if place.is_append == is_append]
        assert [place.index for place in places] == list(range(len(places)))
    assert [place.spec.layer_idx for place in rows.places] == list(range(SHAPE.num_layers))
    for place in rows.places:
        assert place.is_append == (place.spec.is_full or config.decode_mode == "grow")
        expected = 0 if place.is_append else min(place.spec.kept_tokens(LENGTH), LENGTH)
        assert place.capacity == expected
    replacing = [place for place in rows.places if not place.is_append]
    for number, place in enumerate(replacing, start=1):
        rows.slot_positions(place).fill_(number)
        rows.slot_scores(place).fill_(number)
        rows.slot_table(place).fill_(number)
        assert rows.slot_positions(place).shape == (ROWS, SHAPE.num_kv_heads, place.capacity)
        assert rows.slot_scores(place).shape == (ROWS, SHAPE.num_kv_heads, place.capacity)
        assert rows.slot_table(place).shape == (ROWS, -(-place.capacity // PAGE))
    for number, place in enumerate(replacing, start=1):  # nobody wrote over another's
        for view in (rows.slot_positions(place), rows.slot_scores(place), rows.slot_table(place)):
            assert (view == number).all()
    for tensor in (rows._slot_positions, rows._slot_scores, rows.slot_tables):
        assert tensor.all()  # and nothing is reserved for nobody


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_a_row_that_moves_takes_everything_along_and_leaves_a_clear_one(config):
    rows = filled(config)
    before = [row(rows, index) for index in range(ROWS)]
    rows.move(3, 1)
    clear = row(cleared := rows_of(config), 0)
    assert cleared.is_active.sum() == 0
    for name, tensor in row(rows, 1).items():
        assert torch.equal(tensor, before[3][name]), name
    for name, tensor in row(rows, 3).items():
        if name not in ("_slot_positions", "_slot_scores"):  # nothing reads them past a length of 0
            assert torch.equal(tensor, clear[name]), name
    for index in (0, 2):
        for name, tensor in row(rows, index).items():
            assert torch.equal(tensor, before[index][name]), name


def test_clear_rows_write_to_page_0_and_read_one_slot_at_most():
    rows = filled(BASE)
    rows.clear(slice(1, 3))
    for index in (1, 2):
        now = row(rows, index)
        assert not any(now[name].any() for name in ("append_tables", "slot_tables", "victims", "append_lengths"))
        assert (now["slot_budgets"] == 1).all()
        assert not now["slot_lengths"].any()
        assert int(now["is_active"]) == 0


def test_slots_are_written_for_all_layers_at_once_bottom_first():
    rows = rows_of(BASE)
    replacing = [place for place in rows.places if not place.is_append]
    positions = [torch.randint(0, 99, (SHAPE.num_kv_heads, place.capacity)) for place in replacing]
    scores = [torch.rand(SHAPE.num_kv_heads, place.capacity) for place in replacing]
    rows.set_slots(2, torch.cat([p.flatten() for p in positions]), torch.cat([s.flatten() for s in scores]))
    for place, position, score in zip(replacing, positions, scores, strict=True):
        assert torch.equal(rows.slot_positions(place)[2].long(), position)
        assert torch.equal(rows.slot_scores(place)[2], score)
        assert not rows.slot_positions(place)[[0, 1, 3]].any()
