"""Laws of the books that a cache keeps: however a prompt is cut and padded, the tokens are the same.

A batch is a list of columns, some of them padding; a chunking cuts the columns into forward passes.
"""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_sparsekv.cache.columns import ColumnStore
from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.cache.tail import QueryTail
from hf_sparsekv.plan import FULL_LAYER_BLOCK, MAX_SHORT_COLUMNS, SHORT_LAYER_BLOCK

LAWS = settings(deadline=None, max_examples=80, derandomize=True)
HEADS, DIM = 2, 3


@st.composite
def histories(draw: st.DrawFn, max_columns: int = 20) -> tuple[Tensor, list[tuple[int, int]]]:
    """bool [B, N], which columns hold tokens (left, right, scattered or no padding), and where chunks begin and end."""
    batch, columns = draw(st.integers(1, 3)), draw(st.integers(1, max_columns))
    rows = []
    for _ in range(batch):
        tokens = draw(st.integers(0, columns))
        left, right = [False] * (columns - tokens) + [True] * tokens, [True] * tokens + [False] * (columns - tokens)
        scattered = draw(st.lists(st.booleans(), min_size=columns, max_size=columns))
        rows.append(draw(st.sampled_from([left, right, scattered, [True] * columns])))
    cuts = draw(st.sets(st.integers(1, columns), max_size=4))
    return torch.tensor(rows), list(pairwise(sorted(cuts | {0, columns})))


def numbered(is_token: Tensor) -> Tensor:
    """Queries [B, H, N, D] that tell where they come from; NaN where there is padding."""
    batch, columns = is_token.shape
    numbers = torch.arange(batch * HEADS * columns * DIM, dtype=torch.float32).view(batch, HEADS, columns, DIM)
    return numbers.masked_fill(~is_token[:, None, :, None], float("nan"))


def replayed(is_token: Tensor, chunks: list[tuple[int, int]]) -> Padding:
    """A padding history as forward passes make it, the mask of each pass covering all columns so far."""
    padding = Padding()
    for start, end in chunks:
        padding.extend(is_token.shape[0], end - start, is_token[:, :end])
    return padding


@LAWS
@given(histories(), st.integers(1, 8) | st.none())
def test_the_tail_holds_the_last_token_rows_however_the_prompt_came_in(history, limit):
    is_token, chunks = history
    queries, tail, padding = numbered(is_token), QueryTail(limit), Padding()
    for start, end in chunks:
        padding.extend(is_token.shape[0], end - start, is_token[:, :end])
        tail.append(queries[:, :, start:end], padding.new_tokens(end - start))
    for b in range(is_token.shape[0]):
        expected = queries[b][:, is_token[b]]
        wanted = expected.shape[1] if limit is None else min(limit, expected.shape[1])
        assert tail.queries.shape[2] >= wanted
        held = tail.queries[b, :, tail.queries.shape[2] - wanted :]
        assert torch.equal(held, expected[:, expected.shape[1] - wanted :])
    if limit is not None:
        assert tail.queries.shape[2] <= limit
    held = [tensor for tensor in vars(tail).values() if isinstance(tensor, torch.Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == tail.nbytes  # no view keeps a prompt alive


@LAWS
@given(histories(), st.integers(0, 8), st.data())
def test_the_tail_follows_its_requests(history, limit, data):
    is_token, chunks = history
    rows = torch.tensor(data.draw(st.lists(st.integers(0, is_token.shape[0] - 1), min_size=1, max_size=5)))
    before, after = QueryTail(limit), QueryTail(limit)
    queries, cut = numbered(is_token), chunks[0][1]
    before.append(queries[:, :, :cut], is_token[:, :cut])
    before.select_rows(rows)
    after.append(queries[rows][:, :, :cut], is_token[rows][:, :cut])
    if cut < is_token.shape[1]:
        for tail in (before, after):
            tail.append(queries[rows][:, :, cut:], is_token[rows][:, cut:])
    assert torch.equal(before.queries.nan_to_num(-1.0), after.queries.nan_to_num(-1.0))


@LAWS
@given(histories())
def test_padding_counts_the_tokens_and_finds_their_columns(history):
    is_token, chunks = history
    padding = replayed(is_token, chunks)
    assert padding.tokens == is_token.sum(dim=-1).tolist()
    assert padding.num_columns == is_token.shape[1]
    assert (padding.is_token is None) == bool(is_token.all())
    columns = torch.arange(is_token.shape[1])
    for b in range(is_token.shape[0]):
        for start, _ in chunks:
            expected = columns[start:][is_token[b, start:]] - start
            assert torch.equal(columns[: len(columns) - start][padding.columns_of(b, start)], expected)


@LAWS
@given(histories())
def test_padding_does_not_depend_on_how_the_prompt_was_cut(history):
    is_token, chunks = history
    cut, whole = replayed(is_token, chunks), replayed(is_token, [(0, is_token.shape[1])])
    assert cut.tokens == whole.tokens
    assert cut.num_columns == whole.num_columns
    if whole.is_token is None:
        assert cut.is_token is None
    else:
        assert torch.equal(cut.is_token, whole.is_token)


@LAWS
@given(histories())
def test_new_columns_are_the_last_ones(history):
    is_token, chunks = history
    padding = Padding()
    for start, end in chunks:
        padding.extend(is_token.shape[0], end - start, is_token[:, :end])
        new = padding.new_tokens(end - start)
        assert is_token[:, :end].all() if new is None else torch.equal(new, is_token[:, start:end])


@LAWS
@given(histories(), st.integers(1, 5))
def test_decoded_columns_are_tokens_of_every_request(history, num_decoded):
    is_token, chunks = history
    padding = replayed(is_token, chunks)
    for _ in range(num_decoded):
        padding.extend(is_token.shape[0], 1, None)
    longer = torch.nn.functional.pad(is_token, (0, num_decoded), value=True)
    assert padding.tokens == longer.sum(dim=-1).tolist()
    assert padding.is_token is None if longer.all() else torch.equal(padding.is_token, longer)


@LAWS
@given(histories(), st.data())
def test_padding_follows_its_requests(history, data):
    is_token, chunks = history
    rows = torch.tensor(data.draw(st.lists(st.integers(0, is_token.shape[0] - 1), min_size=1, max_size=5)))
    padding = replayed(is_token, chunks)
    padding.select_rows(rows)
    assert padding.tokens == is_token[rows].sum(dim=-1).tolist()
    assert padding.is_token is None or torch.equal(padding.is_token, is_token[rows])


@LAWS
@given(histories(max_columns=400), st.sampled_from([torch.float32, torch.bfloat16]))
def test_columns_are_what_concatenation_would_be(history, dtype):
    is_token, chunks = history
    batch, columns = is_token.shape
    keys, values = (torch.randn(batch, HEADS, columns, DIM).to(dtype) for _ in range(2))
    store = ColumnStore()
    for start, end in chunks:
        store.append(keys[:, :, start:end], values[:, :, start:end])
        assert torch.equal(store.keys, keys[:, :, :end])
        assert torch.equal(store.values, values[:, :, :end])
    block = SHORT_LAYER_BLOCK if columns <= MAX_SHORT_COLUMNS else FULL_LAYER_BLOCK
    blocks = -(-columns // block) * block
    assert store.capacity == blocks
    assert store.nbytes == 2 * batch * HEADS * blocks * DIM * dtype.itemsize


@LAWS
@given(histories(max_columns=100), st.data())
def test_columns_follow_their_requests_and_go_on_growing(history, data):
    is_token, chunks = history
    batch, columns = is_token.shape
    rows = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=5)))
    keys, values = torch.randn(batch, HEADS, columns, DIM), torch.randn(batch, HEADS, columns, DIM)
    store = ColumnStore()
    for start, end in chunks:
        store.append(keys[:, :, start:end], values[:, :, start:end])
    store.select_rows(rows)
    more = torch.randn(len(rows), HEADS, 1, DIM)
    store.append(more, -more)
    assert torch.equal(store.keys, torch.cat([keys[rows], more], dim=2))
    assert torch.equal(store.values, torch.cat([values[rows], -more], dim=2))
