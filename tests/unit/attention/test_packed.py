"""Rows that pad a decode step, as CUDA graphs have them, change nothing that belongs to a request."""

import pytest
import torch

from hf_sparsekv.attention.packed import DecodeRows, PackedStep, PromptChunk, PromptRun
from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.plan import LayerPlan, ModelShape

SHAPE = ModelShape(num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8)
ROWS, PAGE, LENGTH, NUM_PAGES = 5, 4, 40, 120
BASE = SparseKVConfig(full_layers=[1], budget=12, num_sink_tokens=2, num_recent_tokens=4, observation_window=4)


def pool_of(num_pages=NUM_PAGES):
    return PagePool(num_pages, SHAPE.num_kv_heads, PAGE, SHAPE.head_dim, torch.float32, torch.device("cpu"))


def rows_of(config):
    return RowState(
        config,
        LayerPlan.build(config, SHAPE),
        num_rows=ROWS,
        num_kv_heads=SHAPE.num_kv_heads,
        page_size=PAGE,
        max_length=LENGTH,
        device=torch.device("cpu"),
    )


def vectors(tokens, generator):
    shapes = ((tokens, SHAPE.num_heads, SHAPE.head_dim), *[(tokens, SHAPE.num_kv_heads, SHAPE.head_dim)] * 2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def read_prompts(config, lengths):
    """A pool and rows after prompts of these lengths, one row each, in one run."""
    pool, rows, generator = pool_of(), rows_of(config), torch.Generator().manual_seed(3)
    free, chunks, offset = iter(torch.randperm(NUM_PAGES - 1, generator=generator).add(1).tolist()), [], 0
    for row, length in enumerate(lengths):
        for place in rows.places:
            width = LENGTH // PAGE if place.is_append else rows.slot_table(place).shape[1]
            pages = torch.tensor([next(free) for _ in range(width)], dtype=torch.int32)
            if place.is_append:
                rows.append_tables[place.index, row] = pages
                rows.append_lengths[place.index, row] = min(length, place.spec.kept_tokens(length))
            else:
                rows.slot_table(place)[row] = pages
        rows.positions[row], rows.is_active[row] = length, 1
        at = torch.arange(length)
        kept = [
            rows.append_tables[place.index, row] if place.is_append else rows.slot_table(place)[row]
            for place in rows.places
        ]
        slots = [
            kept[i][at // PAGE].long() * PAGE + at % PAGE if place.spec.is_full else None
            for i, place in enumerate(rows.places)
        ]
        tables = tuple(kept[i] if place.spec.is_full else None for i, place in enumerate(rows.places))
        chunks.append(PromptChunk(rows, row, offset, 0, length, True, LENGTH, tables, tuple(slots), tuple(kept), {}))
        offset += length
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    step = PackedStep(pool, [], chunks, [PromptRun(chunks, bounds)])
    for layer in range(SHAPE.num_layers):
        step.attend(layer, *vectors(offset, generator), 0.3)
    assert step.finish().tolist() == [True] * len(lengths)
    return pool, rows


@pytest.mark.parametrize(
    "config",
    [BASE, BASE.with_(decode="ring"), BASE.with_(decode="grow"), BASE.with_(full_layers=[]), BASE.with_(budget=0.5)],
    ids=["replace", "ring", "grow", "no full layer", "fraction"],
)
def test_padding_rows_change_no_request_and_no_page_but_page_0(config):
    lengths = (20, 7, 11)
    (pool, rows), (padded_pool, padded_rows) = (read_prompts(config, lengths) for _ in range(2))
    if config.full_layers != ():
        padded_pool.keys[0], padded_pool.values[0] = float("nan"), float("nan")  # page 0 belongs to nobody
    generator = torch.Generator().manual_seed(4)
    for _ in range(15):
        exact, padded = DecodeRows(rows, 0, 3, LENGTH), DecodeRows(padded_rows, 0, ROWS, LENGTH)
        exact.advance()
        padded.advance()
        for layer in range(SHAPE.num_layers):
            q, k, v = vectors(ROWS, generator)
            expected = PackedStep(pool, [exact], [], []).attend(layer, q[:3], k[:3], v[:3], 0.3)
            output = PackedStep(padded_pool, [padded], [], []).attend(layer, q, k, v, 0.3)
            assert torch.equal(output[:3], expected)
        assert torch.equal(padded_pool.keys[1:], pool.keys[1:])
        assert torch.equal(padded_pool.values[1:], pool.values[1:])
    for place in rows.places:
        if not place.is_append:
            for name in ("slot_positions", "slot_scores", "slot_table"):
                assert torch.equal(getattr(padded_rows, name)(place)[:3], getattr(rows, name)(place)[:3])
    for name in ("append_lengths", "slot_lengths", "slot_next", "victims"):
        assert torch.equal(getattr(padded_rows, name)[:, :3], getattr(rows, name)[:, :3])


def test_the_parts_of_a_step_attend_each_over_its_own_rows():
    cases, q_k_v = ((BASE, (20, 7)), (BASE.with_(decode="grow"), (9,))), vectors(3, torch.Generator().manual_seed(5))
    expected, offset = [], 0
    for config, lengths in cases:
        pool, rows = read_prompts(config, lengths)
        part, at = DecodeRows(rows, 0, len(lengths), LENGTH), slice(offset, offset + len(lengths))
        part.advance()
        expected.append(PackedStep(pool, [part], [], []).attend(0, *(t[at] for t in q_k_v), 0.3))
        offset += len(lengths)

    (first, rows), (second, others) = (read_prompts(*case) for case in cases)
    both = pool_of(2 * NUM_PAGES)
    both.keys.copy_(torch.cat([first.keys, second.keys]))
    both.values.copy_(torch.cat([first.values, second.values]))
    others.append_tables += NUM_PAGES
    decode = [DecodeRows(rows, 0, 2, LENGTH), DecodeRows(others, 2, 1, LENGTH)]
    for part in decode:
        part.advance()
    assert torch.equal(PackedStep(both, decode, [], []).attend(0, *q_k_v, 0.3), torch.cat(expected))
