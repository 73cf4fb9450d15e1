"""Laws of a selection, for any scores, budgets and lengths: what stays, in which order, with which score."""

from fractions import Fraction
from itertools import pairwise
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_sparsekv import ScoreError, SparseKVConfig, ops
from hf_sparsekv.scorers import TwoLists
from hf_sparsekv.select import check_scores, decode_scores, pin_prompt, select_kept, unpinned

LAWS = settings(deadline=None, max_examples=60, derandomize=True)
KV_HEADS = 2
NAN, INF = float("nan"), float("inf")
HUGE = torch.finfo(torch.float32).max / 64  # the average of 41 of these still fits


def score_rows(num_keys: int) -> st.SearchStrategy[list[list[float]]]:
    """One row per KV head: few distinct values (many ties), all equal, tiny, or huge of either sign."""
    value = st.sampled_from([0.0, -0.0, 1.0, 0.5, -1.0, 1e-38, HUGE, -HUGE]) | st.floats(-1, 1, width=32)
    row = st.lists(value, min_size=num_keys, max_size=num_keys) | value.map(lambda v: [v] * num_keys)
    return st.lists(row, min_size=KV_HEADS, max_size=KV_HEADS)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    """A batch of requests with lengths and budgets of their own; NaN behind each request's length."""
    sinks, recent = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 24), min_size=1, max_size=3))
    budgets = [sinks + recent + draw(st.integers(0, 12)) for _ in lengths]
    num_keys = max(1, *lengths) + draw(st.integers(0, 2))
    lists = []
    for _ in range(2):
        scores = torch.tensor([draw(score_rows(num_keys)) for _ in lengths]).view(len(lengths), KV_HEADS, num_keys)
        for b, length in enumerate(lengths):
            scores[b, :, length:] = NAN
        lists.append(scores)
    return {
        "scores": lists[0],
        "second": lists[1],
        "lengths": lengths,
        "budgets": budgets,
        "capacity": max(budgets) + draw(st.integers(0, 3)),
        "sinks": sinks,
        "recent": recent,
        "pooling": draw(st.sampled_from(["avg", "max", "forward", "none"])),
        "width": draw(st.sampled_from([1, 3, 5, 41])),
        "share": draw(st.sampled_from([0.0, 0.25, 0.5, 0.99, 1.0])),
    }


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(problem: dict, *, second: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index, counts, retained, and the pooled first scores."""
    lengths = int32(problem["lengths"])
    pooled = ops.pool_scores(problem["scores"], lengths, problem["pooling"], problem["width"])
    options = {} if second is None else {"secondary": second, "share": problem["share"]}
    result = ops.select(
        problem["scores"],
        lengths,
        int32(problem["budgets"]),
        problem["capacity"],
        problem["sinks"],
        problem["recent"],
        problem["pooling"],
        problem["width"],
        **options,
    )
    return *result, pooled


def forced(problem: dict, b: int) -> set[int]:
    """Positions of request b that no score can evict."""
    length = problem["lengths"][b]
    return set(range(min(problem["sinks"], length))) | set(range(max(0, length - problem["recent"]), length))


def each(problem: dict, index: Tensor) -> list[tuple[int, int, list[int]]]:
    """(request, head, kept positions), the filling left out."""
    counts = [min(pair) for pair in zip(problem["lengths"], problem["budgets"], strict=True)]
    return [
        (b, head, index[b, head, : counts[b]].tolist()) for b in range(len(counts)) for head in range(index.shape[1])
    ]


@LAWS
@given(problems(), st.booleans())
def test_a_selection_is_exact_ascending_and_keeps_what_is_forced(problem, two_lists):
    index, counts, retained, _ = run(problem, second=problem["second"] if two_lists else None)
    assert index.shape == retained.shape == (len(problem["lengths"]), KV_HEADS, problem["capacity"])
    assert counts.tolist() == [min(pair) for pair in zip(problem["lengths"], problem["budgets"], strict=True)]
    for b, head, kept in each(problem, index):
        assert all(low < high for low, high in pairwise(kept))
        assert all(0 <= position < problem["lengths"][b] for position in kept)
        assert forced(problem, b) <= set(kept)
        assert (index[b, head, len(kept) :] == -1).all()
        assert (retained[b, head, len(kept) :] == 0).all()
        if problem["lengths"][b] <= problem["budgets"][b]:
            assert kept == list(range(problem["lengths"][b]))


@LAWS
@given(problems())
def test_what_is_kept_outscores_what_is_dropped_and_ties_go_to_the_lower_position(problem):
    index, _, retained, pooled = run(problem)
    for b, head, kept in each(problem, index):
        scores = pooled[b, head].tolist()
        free = set(kept) - forced(problem, b)
        dropped = set(range(problem["lengths"][b])) - set(kept)
        worst = min(((scores[j], -j) for j in free), default=(INF, 0))
        best = max(((scores[j], -j) for j in dropped), default=(-INF, 0))
        assert worst > best
        assert retained[b, head, : len(kept)].tolist() == [scores[j] for j in kept]


@LAWS
@given(problems())
def test_two_lists_fill_exactly_their_shares(problem):
    """floor(share * free) places go to the best by the first list, the others to the best left by the second."""
    index, _, _, pooled = run(problem, second=problem["second"])
    for b, head, kept in each(problem, index):
        inside = forced(problem, b)
        if problem["lengths"][b] <= problem["budgets"][b]:
            continue
        candidates = [j for j in range(problem["lengths"][b]) if j not in inside]
        num_free = problem["budgets"][b] - len(inside)
        num_first = floor(problem["share"] * num_free)
        by_first = sorted(candidates, key=lambda j: (-pooled[b, head, j].item(), j))
        first = set(by_first[:num_first])
        rest = sorted(set(candidates) - first, key=lambda j: (-problem["second"][b, head, j].item(), j))
        assert set(kept) == inside | first | set(rest[: num_free - num_first])


@LAWS
@given(problems())
def test_a_union_retains_one_finite_score_per_token_on_the_first_lists_scale(problem):
    index, _, retained, pooled = run(problem, second=problem["second"])
    assert retained.isfinite().all()
    for b, head, kept in each(problem, index):
        known = set(pooled[b, head].tolist())
        assert all(score in known for score in retained[b, head, : len(kept)].tolist())


@LAWS
@given(problems(), st.booleans())
def test_a_request_is_selected_alone_as_in_a_batch(problem, two_lists):
    index, _, retained, _ = run(problem, second=problem["second"] if two_lists else None)
    for b, length in enumerate(problem["lengths"]):
        alone = problem | {
            "scores": problem["scores"][b : b + 1, :, : max(1, length)],
            "lengths": [length],
            "budgets": problem["budgets"][b : b + 1],
        }
        second = problem["second"][b : b + 1, :, : max(1, length)] if two_lists else None
        own_index, _, own_retained, _ = run(alone, second=second)
        assert torch.equal(own_index[0], index[b])
        assert torch.allclose(own_retained[0], retained[b], rtol=1e-6, atol=0)


@LAWS
@given(problems())
def test_a_larger_budget_keeps_everything_that_a_smaller_one_kept(problem):
    small, _, _, _ = run(problem)
    larger = problem | {"budgets": [b + 1 for b in problem["budgets"]], "capacity": problem["capacity"] + 1}
    large, _, _, _ = run(larger)
    for (_, _, few), (_, _, many) in zip(each(problem, small), each(larger, large), strict=True):
        assert set(few) <= set(many)


# --- scores that cannot rank --------------------------------------------------------------------------------------


@LAWS
@given(st.sampled_from([NAN, INF, -INF]), st.integers(0, 1), st.integers(0, 1), st.integers(0, 4), st.booleans())
def test_one_score_that_is_not_finite_is_refused_by_layer_and_scorer(value, b, head, key, in_second_list):
    good, bad = torch.zeros(2, 2, 5), torch.zeros(2, 2, 5)
    bad[b, head, key] = value
    scores = TwoLists(primary=good, secondary=bad, share=0.5) if in_second_list else bad
    kind = "NaN" if value != value else "infinity"
    with pytest.raises(ScoreError, match=rf"scorer 'mine', layer 17: scores contain {kind}"):
        check_scores(scores, (2, 2, 5), 17, "mine")
    check_scores(TwoLists(primary=good, secondary=good, share=0.5), (2, 2, 5), 17, "mine")


@pytest.mark.parametrize(
    ("scores", "got"),
    [
        (torch.zeros(2, 2, 6), r"torch.float32 \[2, 2, 6\]"),
        (torch.zeros(2, 5), r"torch.float32 \[2, 5\]"),
        (torch.zeros(2, 2, 5, dtype=torch.float64), r"torch.float64 \[2, 2, 5\]"),
        (torch.zeros(2, 2, 5, dtype=torch.int64), r"torch.int64 \[2, 2, 5\]"),
        ([[[0.0] * 5] * 2] * 2, "list"),
        (None, "NoneType"),
    ],
)
def test_scores_of_another_kind_are_refused_by_layer_and_scorer(scores, got):
    with pytest.raises(ScoreError, match=rf"scorer 'mine', layer 3: expected float32 scores \[2, 2, 5\].*got {got}"):
        check_scores(scores, (2, 2, 5), 3, "mine")


# --- the score that decoding goes on with -------------------------------------------------------------------------

BASE = {"num_sink_tokens": 1, "num_recent_tokens": 2, "observation_window": 2, "pooling": "none"}


@st.composite
def retained_scores(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """(retained, is_kept, positions) [1, 2, C]: ascending positions, kept tokens first."""
    capacity = draw(st.integers(3, 12))
    count = draw(st.integers(3, capacity))
    rows, places = [], []
    for _ in range(KV_HEADS):
        rows.append(draw(st.lists(st.floats(-100, 100, width=32), min_size=capacity, max_size=capacity)))
        kept = sorted(draw(st.sets(st.integers(0, 99), min_size=count, max_size=count)))
        places.append(kept + [0] * (capacity - count))
    is_kept = (torch.arange(capacity) < count).expand(1, KV_HEADS, capacity)
    return torch.tensor([rows]).masked_fill(~is_kept, 0.0), is_kept, torch.tensor([places])


@LAWS
@given(retained_scores())
def test_scores_on_another_scale_become_ranks_that_sum_to_one_and_keep_their_order(kept):
    retained, is_kept, positions = kept
    scores = decode_scores(retained, is_kept, positions, SparseKVConfig(**BASE, scorer="keydiff"))
    assert (scores[~is_kept] == 0).all()
    count = int(is_kept[0, 0].sum())
    torch.testing.assert_close(scores.sum(dim=-1), torch.ones(1, KV_HEADS))
    for head in range(KV_HEADS):
        new, old = scores[0, head, :count].tolist(), retained[0, head, :count].tolist()
        assert len(set(new)) == count and min(new) > 0
        assert sorted(range(count), key=lambda i: new[i]) == sorted(range(count), key=lambda i: (old[i], i))


@LAWS
@given(retained_scores())
def test_softmax_weights_are_taken_as_they_are(kept):
    retained, is_kept, positions = kept
    assert torch.equal(decode_scores(retained, is_kept, positions, SparseKVConfig(**BASE)), retained)


@LAWS
@given(retained_scores(), st.booleans())
def test_a_ring_goes_on_with_ages_and_freezes_what_the_scorer_says(kept, freezes):
    retained, is_kept, positions = kept
    scorer = "snapkv" if freezes else "streaming_llm"
    scores = decode_scores(retained, is_kept, positions, SparseKVConfig(**BASE, scorer=scorer, decode="ring"))
    count = int(is_kept[0, 0].sum())
    frozen = count - BASE["num_recent_tokens"] if freezes else 0
    expected = positions.float().masked_fill(~is_kept, 0.0)
    expected[..., :frozen] = INF
    assert torch.equal(scores, expected)


@LAWS
@given(retained_scores(), st.integers(0, 30), st.sampled_from(["0", "0.25", "0.29", "0.5", "0.7", "0.99", "1"]))
def test_the_prompts_best_tokens_hold_their_share_of_the_budget(kept, num_free, share):
    scores, is_kept, _ = kept
    count, sinks, recent = int(is_kept[0, 0].sum()), BASE["num_sink_tokens"], BASE["num_recent_tokens"]
    budget = sinks + recent + num_free
    count = min(count, budget)
    config = SparseKVConfig(**BASE | {"budget": budget}, scorer="snapkv", prompt_share=float(share))
    pinned = pin_prompt(scores, count, budget, config)
    for head in range(KV_HEADS):
        before, after = scores[0, head].tolist(), pinned[0, head].tolist()
        rough = scores[0, head].bfloat16().tolist()
        others = sorted(range(min(sinks, count), max(sinks, count - recent)), key=lambda i: (-rough[i], i))
        newest = range(max(sinks, count - recent), count)
        expected = set([*others, *newest][: floor(Fraction(share) * num_free)])
        assert {i for i, score in enumerate(after) if score == INF} == expected
        assert all(after[i] == before[i] for i in range(len(after)) if i not in expected)


def test_tokens_whose_scores_differ_by_rounding_alone_hold_places_by_age():
    config = SparseKVConfig(**BASE | {"budget": 11}, scorer="snapkv", prompt_share=0.5)
    one = torch.full((1, KV_HEADS, 11), 0.1478959)
    above = one.nextafter(torch.tensor(1.0))
    scores = torch.where(torch.arange(11) % 2 == 0, above, one)
    scores[:, 1, 7] = 0.15  # more than rounding
    pinned = pin_prompt(scores, 11, 11, config)
    assert [(row == INF).nonzero().flatten().tolist() for row in pinned[0]] == [[1, 2, 3, 4], [1, 2, 3, 7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("share", "num_free", "num_pinned"), [(1.0, 989, 989), (0.29, 100, 29), (0.018, 1500, 27)])
def test_a_share_is_counted_in_whole_tokens_whatever_dtype_torch_defaults_to(share, num_free, num_pinned, dtype):
    config = SparseKVConfig(**BASE | {"budget": 3 + num_free}, scorer="snapkv", prompt_share=share)
    scores = torch.rand(1, KV_HEADS, 3 + num_free)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as while transformers builds a model
    try:
        pinned = pin_prompt(scores, 3 + num_free, 3 + num_free, config)
    finally:
        torch.set_default_dtype(before)
    assert (pinned == INF).sum(dim=-1).tolist() == [[num_pinned] * KV_HEADS]


@LAWS
@given(retained_scores(), st.integers(0, 3), st.sets(st.integers(0, 11)))
def test_what_held_its_place_is_carried_on_with_the_highest_score_that_is_no_sinks(kept, num_sinks, held):
    scores = kept[0]
    pinned = scores.clone()
    held = [place for place in held if num_sinks <= place < scores.shape[-1]]
    pinned[..., held] = INF
    carried = unpinned(pinned, num_sinks)
    for head in range(KV_HEADS):
        before, after = scores[0, head].tolist(), carried[0, head].tolist()
        others = [before[place] for place in range(num_sinks, len(before)) if place not in held]
        highest = max(others or before[:num_sinks] or [0.0])
        assert after == [highest if place in held else before[place] for place in range(len(before))]


def test_of_a_request_without_a_token_nothing_is_carried_on():
    assert unpinned(torch.zeros(1, KV_HEADS, 0), 4).shape == (1, KV_HEADS, 0)


@LAWS
@given(
    problems(), st.sampled_from(["snapkv", "keydiff", "hybrid"]), st.sampled_from(["replace_lowest", "ring", "grow"])
)
def test_a_layers_selection_always_leaves_a_victim_for_the_next_token(problem, scorer, decode):
    """Full slots hold at least one token that is neither a sink, nor recent, nor held for good: decoding can go on."""
    length, budget = max(1, *problem["lengths"]), problem["budgets"][0]
    primary = problem["scores"].nan_to_num(0.0)[:1, :, :length]
    scores = primary
    if scorer == "hybrid":
        scores = TwoLists(primary=primary, secondary=problem["second"].nan_to_num(0.0)[:1, :, :length], share=0.25)
    config = SparseKVConfig(
        scorer=scorer,
        decode=decode,
        budget=budget,
        num_sink_tokens=problem["sinks"],
        num_recent_tokens=problem["recent"],
        observation_window=1,
        pooling="none",
        **({"decay": 0.5, "prompt_share": problem["share"]} if decode == "replace_lowest" else {}),
    )
    kept = select_kept(scores, int32([budget]), problem["capacity"], None, config)
    positions = kept.index.to(torch.int32)
    pinned = pin_prompt(kept.scores, min(length, budget), budget, config)
    victims = ops.find_victim(
        pinned, positions, kept.counts, int32([budget]), int32([length]), problem["sinks"], problem["recent"]
    )
    for head in range(KV_HEADS):
        victim = int(victims[0, head])
        if length < budget:
            assert victim == length
        else:
            assert problem["sinks"] <= positions[0, head, victim] <= length - problem["recent"]
            assert pinned[0, head, victim] < INF
