"""From a scorer's answer to the kept tokens of one layer, and the score that each keeps for decoding.

Tensors only: no cache, request or model is known here. Shapes: B request, K KV head, N candidate, C kept slot.
"""

from dataclasses import dataclass, replace
from math import floor

import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ScoreError
from hf_sparsekv.ops.reference.select import MAX_POOL_WIDTH
from hf_sparsekv.scorers import Scorer, TwoLists
from hf_sparsekv.scorers.base import POOLINGS
from hf_sparsekv.scorers.checks import MAX_SCORE, is_pool_width

NEVER_EVICTED = float("inf")


@dataclass(frozen=True)
class Kept:
    """The outcome of a selection."""

    index: Tensor
    """int64 [B, K, C], candidates kept, ascending, then -1."""
    counts: Tensor
    """int32 [B], how many."""
    scores: Tensor
    """fp32 [B, K, C], what decoding goes on with: lowest is replaced first."""


def check_scores(scores: Tensor | TwoLists, shape: tuple[int, int, int], layer_idx: int, scorer: str) -> None:
    """Refuse scores that cannot rank tokens, naming the layer and the scorer.

    Raises:
        ScoreError: not fp32 [B, K, N], NaN, infinite or above `MAX_SCORE`, or two lists that do not fit together.
    """
    for tensor in check_score_shapes(scores, shape, layer_idx, scorer):
        if not bool((tensor.abs() <= MAX_SCORE).all()):  # NaN is not
            where = f"scorer {scorer!r}, layer {layer_idx}"
            if bool(tensor.isfinite().all()):
                largest = float(tensor.abs().max())
                raise ScoreError(
                    f"{where}: scores go up to {largest:g}, which sums of them could not hold: scale them "
                    f"to at most {MAX_SCORE:g}"
                )
            kind = "NaN" if bool(tensor.isnan().any()) else "infinity"
            raise ScoreError(f"{where}: scores contain {kind}; every key needs a finite score")


def check_score_shapes(
    scores: Tensor | TwoLists, shape: tuple[int, int, int], layer_idx: int, scorer: str
) -> tuple[Tensor, ...]:
    """The part of `check_scores` that reads nothing from the device; returns the one or two lists.

    Raises:
        ScoreError: not fp32 [B, K, N], or two lists with a share or pooling that do not exist.
    """
    if isinstance(scores, TwoLists):
        _check_two_lists(scores, f"scorer {scorer!r}, layer {layer_idx}")
    lists = (scores.primary, scores.secondary) if isinstance(scores, TwoLists) else (scores,)
    for tensor in lists:
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            where = f"scorer {scorer!r}, layer {layer_idx}"
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ScoreError(f"{where}: expected float32 scores {list(shape)} (batch, KV heads, keys), got {got}")
    return lists


def _check_two_lists(scores: TwoLists, where: str) -> None:
    share, kind, width = scores.share, scores.secondary_pooling, scores.secondary_width
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:  # NaN is not
        raise ScoreError(f"{where}: the share of the first list must be a number in [0, 1], got {share!r}")
    if kind not in POOLINGS:
        raise ScoreError(f"{where}: secondary_pooling must be one of {', '.join(POOLINGS)}, got {kind!r}")
    if not is_pool_width(width):
        raise ScoreError(f"{where}: secondary_width must be an odd int from 1 to {MAX_POOL_WIDTH}, got {width!r}")


def with_earlier_windows(scores: Tensor | TwoLists, carried: Tensor | None, scorer: Scorer) -> Tensor | TwoLists:
    """What a bounded prefill ranks by: the most that any chunk's observation window has looked at a token.

    A chunk's window knows little of what a later one, such as a question, will ask for, and nothing of what an earlier
    one found. Scorers of every row add up by themselves; others than attention's judge the keys anew; and one whose
    scores forget at once while decoding forgets here too.

    Args:
        scores: fp32 [B, K, N], checked: of the newest window.
        carried: fp32 [B, K, N], the result of the chunk before, 0 for new tokens; None in a prompt's first chunk.
        scorer: whose scores these are.
    """
    if carried is None or scorer.queries != "last" or not scorer.is_probability or scorer.decode_decay == 0.0:
        return scores
    if isinstance(scores, TwoLists):
        return replace(scores, primary=torch.maximum(scores.primary, carried))
    return torch.maximum(scores, carried)


def kept_raw_scores(scores: Tensor | TwoLists, kept: Kept) -> Tensor:
    """fp32 [B, K, C]: of the kept tokens what they were ranked by, before pooling; for the next chunk."""
    primary = scores.primary if isinstance(scores, TwoLists) else scores
    return primary.gather(-1, kept.index.clamp_min(0)).masked_fill(kept.index < 0, 0.0)


def select_index(
    scores: Tensor | TwoLists, budgets: Tensor, capacity: int, config: SparseKVConfig, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of `select_kept` that decides, for those who do not decode: arguments as there.

    Returns:
        Index and counts as in `Kept`, and the selection's own scores, fp32 [B, K, C].
    """
    primary = scores.primary if isinstance(scores, TwoLists) else scores
    batch, _, num_keys = primary.shape
    if lengths is None:
        lengths = torch.full((batch,), num_keys, dtype=torch.int32, device=primary.device)
    second = scores if isinstance(scores, TwoLists) else None
    index, counts, retained = ops.select(
        primary,
        lengths,
        budgets,
        capacity,
        config.num_sink_tokens,
        config.num_recent_tokens,
        config.pool.kind,
        config.pool.width,
        second.secondary if second else None,
        second.secondary_pooling if second else "none",
        second.secondary_width if second else 1,
        second.share if second else 1.0,
    )
    return index, counts, retained


def select_kept(
    scores: Tensor | TwoLists,
    budgets: Tensor,
    capacity: int,
    positions: Tensor | None,
    config: SparseKVConfig,
    lengths: Tensor | None = None,
) -> Kept:
    """Choose the tokens that stay.

    Args:
        scores: fp32 [B, K, N], checked.
        budgets: int32 [B] tokens to keep.
        capacity: C.
        positions: int64 [B, K, N] position per candidate, None when candidate j has position j.
        config: sinks, recent tokens, pooling, scorer and decode mode.
        lengths: int32 [B], every entry N, where the caller has it: layers of one prompt may share it.
    """
    index, counts, retained = select_index(scores, budgets, capacity, config, lengths)
    if config.decode_mode != "ring" and config.scorer_object.is_probability:
        return Kept(index, counts, retained)  # nothing more to launch
    kept_positions = index if positions is None else positions.gather(-1, index.clamp_min(0))
    kept_scores = decode_scores(retained, index >= 0, kept_positions, config)
    return Kept(index, counts, kept_scores)


def pin_prompt(scores: Tensor, count: int, budget: int, config: SparseKVConfig) -> Tensor:
    """Let a prompt keep its share of the budget while decoding: its best-scored tokens get a score that never falls.

    Decoding looks at little of a prompt at a time, and forgets the rest within a budget's length. What comes later may
    ask for it all the same.

    Args:
        scores: fp32 [B, K, C], `Kept.scores`.
        count: tokens kept, the first of the C, in ascending order of position.
        budget: what the layer may hold, at least `count`.
        config: the share, sinks and recent tokens.
    Returns:
        fp32 [B, K, C]: infinity at that share of the places that are neither sinks' nor recent tokens', rounded down;
        scores are compared as bf16, ties go to the older token. Recent tokens follow when the prompt has too few
        others, the oldest first: each of them has looked at itself, so their scores say little.
    """
    num_free = budget - config.num_protected
    num_pinned = floor(num_free * config.pinned_share + 1e-6)  # 0.29 * 100 is 28.999999999999996: that is 29 tokens
    if num_pinned <= 0:
        return scores
    first, end = config.num_sink_tokens, max(config.num_sink_tokens, count - config.num_recent_tokens)
    pinned = scores.clone()
    if num_pinned >= end - first:
        pinned[..., first : min(count, first + num_pinned)] = NEVER_EVICTED
        return pinned
    # Pooling gives all tokens of a short prompt one average, but for last bits that differ from batch to batch. Without
    # those bits they are equal, and ties go to the older token.
    rough = pinned[..., first:end].bfloat16()
    best = rough.sort(dim=-1, descending=True, stable=True).indices[..., :num_pinned]
    pinned[..., first:end].scatter_(-1, best, NEVER_EVICTED)
    return pinned


def unpinned(scores: Tensor, num_sinks: int) -> Tensor:
    """Scores that decoding has left, for a scorer to go on with: those of tokens that held their places made finite.

    They get the highest of the others'. Sinks count only where there is no other: what attention they gather would hold
    these tokens against everything that a later turn looks at.

    Args:
        scores: fp32 [B, K, C], in ascending order of position.
        num_sinks: how many of the first are sinks.
    Returns:
        fp32 [B, K, C], a copy; 0 in place of infinity where nothing else is left.
    """
    is_pinned, nothing = scores == NEVER_EVICTED, -NEVER_EVICTED
    others = torch.nn.functional.pad(scores.masked_fill(is_pinned, nothing), (0, num_sinks + 1), value=nothing)
    highest, with_sinks = (t.amax(dim=-1, keepdim=True) for t in (others[..., num_sinks:], others))
    highest = torch.where(highest == nothing, with_sinks, highest)
    return torch.where(is_pinned, highest.masked_fill(highest == nothing, 0.0), scores)


def decode_scores(retained: Tensor, is_kept: Tensor, positions: Tensor, config: SparseKVConfig) -> Tensor:
    """The score of each kept token on the scale that decoding goes on with.

    `replace_lowest` needs softmax weights: a scorer on another scale leaves its ranks, scaled to sum to 1.
    `ring` evicts by age: the score is the token's position, or infinity for the frozen selection of the prompt.

    Args:
        retained: fp32 [B, K, C], the selection's scores.
        is_kept: bool [B, K, C]; kept tokens come first, in ascending order of position.
        positions: int64 [B, K, C]; entries that are not kept may be anything.
        config: decode mode and scorer.
    Returns:
        fp32 [B, K, C], 0 where nothing is kept.
    """
    scorer = config.scorer_object
    count = is_kept.sum(dim=-1, keepdim=True)
    if config.decode_mode == "ring":
        ages = positions.float()
        if scorer.ring_freezes_selection:
            place = torch.arange(is_kept.shape[-1], device=is_kept.device)
            ages = ages.masked_fill(place < count - config.num_recent_tokens, NEVER_EVICTED)
        return ages.masked_fill(~is_kept, 0.0)
    if scorer.is_probability:
        return retained
    order = retained.masked_fill(~is_kept, NEVER_EVICTED).argsort(dim=-1, stable=True)
    ladder = torch.arange(1, order.shape[-1] + 1, device=order.device, dtype=torch.float32)
    ranks = torch.empty_like(retained).scatter_(-1, order, ladder.expand_as(retained))
    return (2.0 * ranks / (count * (count + 1.0)).clamp_min(1.0)).masked_fill(~is_kept, 0.0)
