"""Log-probabilities read from a sparse cache: a context is read once, compressed, and forked for its continuations.

Shapes: B context, R row (a fork of a context), T token, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_sparsekv.cache.layer import WindowLayer
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.hf.cache_adapter import SparseKVCache
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.switch import sparse_attention
from hf_sparsekv.parallel.ranks import Ranks
from hf_sparsekv.plan import LayerPlan

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Context:
    """One context and what is to be scored after it."""

    head: Tokens
    """What is read first and then compressed; at least one token."""
    tail: Tokens
    """The end of the context that is read after the compression; may be empty."""
    continuations: tuple[Tokens, ...]
    """Each scored as if it alone followed the context; none is empty."""


@dataclass(frozen=True)
class Footprint:
    """What compressing one context did."""

    num_evicted: int
    """Summed over the layers."""
    cache_bytes: int
    dense_bytes: int
    """Of a dense cache of the same tokens."""


@dataclass(frozen=True)
class Score:
    """Of one continuation."""

    log_likelihood: float
    """Natural log of its probability."""
    is_greedy: bool
    """Whether each of its tokens is the most probable one."""
    num_greedy: int
    """How many of its tokens are the most probable one after those before them."""


@dataclass(frozen=True)
class ContextScores:
    """Of one context."""

    scores: list[Score]
    """In the order of the continuations."""
    footprint: Footprint


@dataclass(frozen=True)
class StreamScore:
    """Of one text that was read in chunks."""

    log_likelihood: float
    footprint: Footprint


@dataclass
class _Row:
    """What is fed to one fork of a cache: the tail and all but the last token of a continuation."""

    owner: int
    """Index of the context."""
    feed: Tokens
    continuations: list[int] = field(default_factory=list)
    """Those whose scores this row gives: they differ in the last token at most."""


def evicts(plan: LayerPlan, num_tokens: int) -> bool:
    """Whether some layer will not keep all of a prompt."""
    return any(num_tokens > spec.kept_tokens(num_tokens) for spec in plan.layers)


def split_context(tokens: Sequence[int], num_held_back: int) -> tuple[Tokens, Tokens]:
    """Head and tail of a context; the head gets at least one token."""
    cut = max(len(tokens) - num_held_back, 1)
    return tuple(tokens[:cut]), tuple(tokens[cut:])


class SparseScorer:
    """Scores with one model and one configuration.

    A continuation attends to the compressed context and to itself, and evicts nothing, however long it is: its score
    does not depend on what else is in the batch. (While generating, a new token would take a stored one's place.)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SparseKVConfig,
        *,
        batch_size: int = 1,
        softmax_dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Take note of how to score.

        Args:
            model, config: see `hf_sparsekv.generate`.
            batch_size: forks that are scored at once.
            softmax_dtype: of the log-softmax; None = that of the logits.
            ranks: that share the model, see `hf_sparsekv.parallel.ranks.ranks_of`; None = this process has all of it.
        """
        self.model, self.config, self.batch_size = model, config, batch_size
        self.plan = SparseKVCache(model.config, config).plan
        self._softmax_dtype, self._ranks = softmax_dtype, ranks or Ranks()
        self._beginning: tuple[Tokens, SparseKVCache] | None = None
        """Of the last context of a bounded prefill: all chunks but the last, and the cache after them."""

    def score(self, contexts: Sequence[Context]) -> list[ContextScores]:
        """Score the continuations of some contexts, which are read as one batch, padded on the left."""
        with sparse_attention(self.model), torch.no_grad():
            cache, first_BV = self._read([context.head for context in contexts])
            footprints = self._footprints(cache)
            scores: dict[tuple[int, int], Score] = {}
            rows = _rows(contexts)
            for start in range(0, len(rows), self.batch_size):
                some = rows[start : start + self.batch_size]
                is_last = start + self.batch_size >= len(rows)
                logits_RTV = self._read_rows(cache if is_last else copy.deepcopy(cache), contexts, some, first_BV)
                for row, logits_TV in zip(some, logits_RTV, strict=True):
                    context = contexts[row.owner]
                    for i in row.continuations:
                        start_T = len(context.tail)
                        end_T = start_T + len(context.continuations[i])
                        scores[row.owner, i] = self._score(logits_TV[start_T:end_T], context.continuations[i])
        return [
            ContextScores([scores[b, i] for i in range(len(context.continuations))], footprint)
            for b, (context, footprint) in enumerate(zip(contexts, footprints, strict=True))
        ]

    def score_stream(self, tokens: Sequence[int], num_scored: int, chunk_tokens: int) -> StreamScore:
        """Score the end of a text, all of which is read in chunks with a selection after each.

        A chunk attends to what is kept of all chunks before it, and to itself. The first chunk's scores are the dense
        model's.

        Args:
            tokens: at least two.
            num_scored: last tokens that are scored, at least one; fewer than there are tokens.
            chunk_tokens: length of a chunk.
        """
        inputs, targets = tokens[:-1], tokens[1:]
        cache, total = SparseKVCache(self.model.config, self.config), 0.0
        with sparse_attention(self.model), torch.no_grad():
            for start in range(0, len(inputs), chunk_tokens):
                chunk = inputs[start : start + chunk_tokens]
                cache.expect_prompt(len(chunk))
                logits_RTV = self._forward(self._ids([chunk]), cache)
                skipped = max(len(inputs) - num_scored - start, 0)
                if skipped < len(chunk):
                    wanted = targets[start + skipped : start + chunk_tokens]
                    total += self._score(logits_RTV[0, skipped:], wanted).log_likelihood
        return StreamScore(total, self._footprints(cache)[0])

    def _read(self, heads: list[Tokens]) -> tuple[SparseKVCache, Tensor]:
        """The compressed cache of some prompts, and the logits [B, V] after the last token of each."""
        width = max(len(head) for head in heads)
        ids = self._ids([(0,) * (width - len(head)) + head for head in heads])
        padding: dict[str, Tensor] = {}
        if any(len(head) < width for head in heads):
            num_padding = torch.tensor([width - len(head) for head in heads], device=ids.device)
            positions = torch.arange(width, device=ids.device) - num_padding[:, None]
            padding = {"attention_mask": (positions >= 0).long(), "position_ids": positions.clamp_min(0)}
        step = self.config.chunk_tokens or width
        last = (width - 1) // step * step  # where the last chunk begins
        cache, num_read = self._begun(heads, last)
        for start in range(num_read, width, step):
            if start == last > num_read and len(heads) == 1:
                self._beginning = heads[0][:last], copy.deepcopy(cache)
            end = min(start + step, width)
            some = {name: t[:, :end] if name == "attention_mask" else t[:, start:end] for name, t in padding.items()}
            logits_BTV = self._forward(ids[:, start:end], cache, logits_to_keep=1, **some)
        return cache, logits_BTV[:, -1]

    def _begun(self, heads: list[Tokens], last: int) -> tuple[SparseKVCache, int]:
        """A cache for some prompts and how much it has of them: their chunks but the last where it is the same text.

        The questions about one document follow one another and differ in their last chunk.
        """
        width = max(len(head) for head in heads)
        if len(heads) == 1 and self._beginning is not None and self._beginning[0] == heads[0][:last]:
            cache = copy.deepcopy(self._beginning[1])
            cache.expect_prompt(width - last)
            return cache, last
        self._beginning = None  # before the next one takes memory
        return SparseKVCache(self.model.config, self.config, prompt_length=width), 0

    def _read_rows(
        self, fork: SparseKVCache, contexts: Sequence[Context], rows: list[_Row], first_BV: Tensor
    ) -> Tensor:
        """Logits [R, 1 + T, V] of some rows: those after their contexts' heads, then those after each token fed.

        Args:
            fork: holds the heads of all contexts; used up.
            contexts, rows: rows are padded on the right, where no earlier token can see it.
            first_BV: logits after the heads.
        """
        owners = torch.tensor([row.owner for row in rows])
        first_R1V = first_BV[owners.to(first_BV.device)][:, None]
        width = max(len(row.feed) for row in rows)
        if width == 0:
            return first_R1V
        fork.batch_select_indices(owners)
        # One more than will come: what is fed is the beginning of a turn, no decoding and no reason to select again.
        fork.expect_prompt(width + 1)
        ids = self._ids([row.feed + (0,) * (width - len(row.feed)) for row in rows])
        padding: dict[str, Tensor] = {}
        if fork.padding.is_token is not None:
            lengths = torch.tensor([len(contexts[row.owner].head) for row in rows], device=ids.device)
            padding = {
                "attention_mask": torch.cat([fork.padding.is_token.long(), torch.ones_like(ids)], dim=1),
                "position_ids": lengths[:, None] + torch.arange(width, device=ids.device),
            }
        return torch.cat([first_R1V, self._forward(ids, fork, **padding)], dim=1)

    def _forward(self, ids: Tensor, cache: SparseKVCache, **options: Tensor | int) -> Tensor:
        logits: Tensor = self.model(ids, **{CACHE_KEYWORD: cache}, use_cache=True, **options).logits
        return logits

    def _score(self, logits_TV: Tensor, targets: Sequence[int]) -> Score:
        log_p_TV = torch.log_softmax(logits_TV, dim=-1, dtype=self._softmax_dtype)
        target_T = torch.tensor(targets, device=log_p_TV.device)
        chosen_T = log_p_TV.gather(-1, target_T[:, None])[:, 0]
        num_greedy = int((log_p_TV.argmax(dim=-1) == target_T).sum())
        return Score(float(chosen_T.sum()), num_greedy == len(target_T), num_greedy)

    def _footprints(self, cache: SparseKVCache) -> list[Footprint]:
        """Of each request of a batch, of the whole model; bytes in equal shares, padding included on both sides."""
        report = cache.report()
        num_requests = len(report["tokens_seen"])
        # What belongs to no KV head is on every rank and counts once.
        counted = report["cache_bytes"] - (_headless_bytes(cache) if self._ranks.rank else 0)
        cache_bytes, dense_bytes = self._ranks.total(counted), self._ranks.total(report["dense_bytes"])
        return [
            Footprint(
                num_evicted=sum(seen - layer["stored"][row] for layer in report["layers"]),
                cache_bytes=cache_bytes // num_requests,
                dense_bytes=dense_bytes // num_requests,
            )
            for row, seen in enumerate(report["tokens_seen"])
        ]

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self.model.device)


def _rows(contexts: Sequence[Context]) -> list[_Row]:
    """The forks that all continuations need, longest first; what differs in the last token only shares one."""
    rows: dict[tuple[int, Tokens], _Row] = {}
    for owner, context in enumerate(contexts):
        for i, continuation in enumerate(context.continuations):
            feed = context.tail + continuation[:-1]
            rows.setdefault((owner, feed), _Row(owner, feed)).continuations.append(i)
    return sorted(rows.values(), key=lambda row: -len(row.feed))


def _headless_bytes(cache: SparseKVCache) -> int:
    states = [layer.state for layer in cache.layers]
    tables = [state.slots for state in states if isinstance(state, WindowLayer) and state.slots is not None]
    is_token = cache.padding.is_token
    return sum(table.headless_nbytes for table in tables) + (0 if is_token is None else is_token.nbytes)
