"""RequestTables: block counts worked out by hand, and exact new entries."""

import pytest

from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.tables import RequestTables, blocks_for
from hf_sparsekv.errors import PoolError
from hf_sparsekv.plan import LayerPlan, LayerSpec, ModelShape

FULL = None


def layer_plan(budgets, grows=False):
    shape = ModelShape(num_layers=len(budgets), num_heads=2, num_kv_heads=1, head_dim=8)
    layers = [LayerSpec(layer_idx=i, is_full=b is FULL, budget=b, num_protected=2) for i, b in enumerate(budgets)]
    return LayerPlan(shape=shape, layers=tuple(layers), grows=grows)


def counts(tables):
    return [len(table) for table in tables.blocks], [len(table) for table in tables.staging]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_are_rounded_up(tokens, blocks):
    assert blocks_for(tokens, 4) == blocks


@pytest.mark.parametrize(
    ("budgets", "grows", "prompt", "max_length", "length", "expected"),
    [
        ([FULL, 6], False, 10, 30, 10, 3 + 2),
        ([FULL, 6], False, 10, 30, 13, 4 + 2),  # only the full layer grows
        ([FULL, 100], False, 10, 12, 10, 3 + 3),  # never more slots than tokens
        ([FULL, 100], False, 10, 30, 10, 3 + 8),  # but all of them from the start
        ([FULL, 0.5], False, 10, 30, 10, 3 + 2),  # 5 tokens
        ([FULL, 6], True, 10, 30, 10, 3 + 2),
        ([FULL, 6], True, 10, 30, 13, 4 + 3),  # 6 + 3 decoded
        ([FULL, 100], True, 10, 30, 13, 4 + 4),  # keeps all
        ([6, 6, 7], False, 10, 30, 29, 2 + 2 + 2),
    ],
)
def test_demand_is_what_the_layers_hold(budgets, grows, prompt, max_length, length, expected):
    tables = RequestTables(layer_plan(budgets, grows), prompt, max_length, 4)
    assert tables.demand(length, staged=False) == expected
    pool = BlockPool(64)
    tables.allocate(pool, length, staged=False)
    assert tables.num_blocks == expected == pool.num_usable - pool.num_free


def test_window_layers_that_drop_something_are_staged():
    # Layers: full, window of 6 < 10, window of 10 = the prompt, window of 12.
    tables, pool = RequestTables(layer_plan([FULL, 6, 10, 12]), 10, 20, 4), BlockPool(64)
    assert tables.demand(11, staged=True) == tables.demand(11, staged=False) + 3
    tables.allocate(pool, 11, staged=True)
    assert counts(tables) == ([3, 2, 3, 3], [0, 3, 0, 0])
    tables.release_staging(pool)
    assert counts(tables) == ([3, 2, 3, 3], [0, 0, 0, 0])
    tables.release_staging(pool)  # nothing left to give
    assert pool.num_usable - pool.num_free == tables.num_blocks == 11
    tables.release(pool)
    assert pool.num_free == pool.num_usable and tables.num_blocks == 0


def test_growth_happens_exactly_at_block_boundaries():
    tables, pool = RequestTables(layer_plan([FULL, 5], grows=True), 7, 30, 4), BlockPool(64)
    tables.allocate(pool, 7, staged=False)
    assert tables.blocks == [[1, 2], [3, 4]]
    grown = {length: tables.grow(pool, length) for length in range(8, 15)}
    assert {length: entries for length, entries in grown.items() if entries} == {
        9: [(0, 2, 5)],  # the full layer's ninth token
        11: [(1, 2, 6)],  # the window layer holds 5 + 4 decoded
        13: [(0, 3, 7)],
    }
    assert tables.growth(15) == 1 and tables.growth(14) == 0
    assert tables.grow(pool, 19) == [(0, 4, 8), (1, 3, 9), (1, 4, 10)]


@pytest.mark.parametrize("grows", [False, True])
def test_growth_is_the_difference_of_demands(grows):
    tables, pool = RequestTables(layer_plan([FULL, 5, 3, 0.4], grows), 9, 60, 4), BlockPool(200)
    tables.allocate(pool, 10, staged=True)
    tables.release_staging(pool)
    for length in range(10, 60):
        expected = tables.demand(length, staged=False) - tables.num_blocks
        assert tables.growth(length) == expected == len(tables.grow(pool, length))


def test_tables_without_growing_layers_never_grow():
    tables, pool = RequestTables(layer_plan([5, 7]), 9, 60, 4), BlockPool(20)
    tables.allocate(pool, 9, staged=False)
    assert tables.growth(59) == 0 and tables.grow(pool, 59) == []


def test_a_pool_that_is_too_small_changes_nothing():
    tables, pool = RequestTables(layer_plan([FULL, FULL]), 8, 30, 4), BlockPool(6)
    with pytest.raises(PoolError):
        tables.allocate(pool, 12, staged=False)
    assert (tables.num_blocks, pool.num_free) == (0, 5)
    tables.allocate(pool, 8, staged=False)
    with pytest.raises(PoolError):
        tables.grow(pool, 9)
    assert (counts(tables)[0], pool.num_free) == ([2, 2], 1)
    assert tables.growth(9) == 2  # still wanted


def test_released_tables_can_be_filled_again():
    tables, pool = RequestTables(layer_plan([FULL, 5]), 7, 30, 4), BlockPool(64)
    tables.allocate(pool, 7, staged=True)
    tables.grow(pool, 12)
    tables.release(pool)
    tables.allocate(pool, 7, staged=False)
    assert counts(tables) == ([2, 2], [0, 0])
    assert tables.growth(9) == 1


@pytest.mark.parametrize("budgets", [[6] * 8, [FULL] + [6] * 7])
def test_tables_take_memory_for_what_a_request_holds_not_for_what_it_may_generate(budgets):
    tables, pool = RequestTables(layer_plan(budgets), 10, 1_000_000, 4), BlockPool(2000)
    tables.allocate(pool, 11, staged=True)
    for length in (*range(12, 100), 1000):
        tables.grow(pool, length)
        widest = max(map(len, tables.blocks))
        assert tables._own_tables.rows.shape[1] <= 2 * widest
    assert tables._staging_tables.rows.shape[1] == 3
    assert sorted(block for table in tables.blocks + tables.staging for block in table) == sorted(
        set(range(1, 2000)) - set(pool._free.tolist())
    )


@pytest.mark.parametrize("budgets", [[6, 6], [FULL, 6], [FULL, FULL]])
def test_the_blocks_of_a_prompt_in_order_are_staging_where_a_layer_keeps_a_part(budgets):
    tables, pool = RequestTables(layer_plan(budgets), 20, 30, 4), BlockPool(64)
    tables.allocate(pool, 21, staged=True)
    expected = [
        own if budget is FULL else staged
        for budget, own, staged in zip(budgets, tables.blocks, tables.staging, strict=True)
    ]
    in_order = tables.in_order()
    assert in_order.tolist() == [table[: in_order.shape[1]] for table in expected]
    assert in_order.shape[1] == min(map(len, expected))
