"""Scores of several layers at once, with what scorers have in common computed once.

A layer is one request of a scorer's batch: scorers treat requests alone, so an answer does not depend on what is
stacked, but for rounding.

Shapes: L layer, S layer of a stack, H query head, K KV head, A observed query row, N token of the prompt, D head dim.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evals.all_rows import summed_weights
from hf_sparsekv import ops
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.ops.prefill_choice import gives_lse
from hf_sparsekv.scorers import ScoreInputs, TwoLists
from hf_sparsekv.scorers.base import ALL_HEADS, HeadShard
from hf_sparsekv.select import check_score_shapes

STACK_BYTES = 2**18
"""Layers are stacked while an fp32 score of each key of each KV head takes no more than this: a scorer that compares
all keys with each other then still has many rows in one matrix product."""
CUDA_STACK_BYTES = 2**24
"""The same on a GPU, where the number of launches counts."""
SEVERAL = -1
"""The layer index of a stack."""


@dataclass(frozen=True)
class PromptTensors:
    """What a dense model leaves of one prompt."""

    keys: Tensor
    """[L, K, N, D], after RoPE."""
    values: Tensor
    """[L, K, N, D]."""
    queries: Tensor
    """[L, H, A, D], after RoPE: the last rows, as many as any scorer reads, at most N."""
    scale: float
    """Factor on the logits."""
    inv_freq: Tensor | None
    """fp32 [D / 2], RoPE's inverse frequencies, where they are fixed."""
    heads: HeadShard = ALL_HEADS
    """Which of the model's KV heads these are; the query heads are theirs."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.keys.shape[2]

    @property
    def stackable(self) -> int:
        """Layers that may be scored together, at least one."""
        num_layers, kv_heads, num_tokens, _ = self.keys.shape
        limit = CUDA_STACK_BYTES if self.keys.is_cuda else STACK_BYTES
        return max(1, min(num_layers, limit // (4 * kv_heads * num_tokens)))


class Stack:
    """Some neighbouring layers of a prompt."""

    def __init__(self, prompt: PromptTensors, layers: slice) -> None:
        """Nothing is computed before it is asked for."""
        self.keys, self.values, self.queries = (t[layers] for t in (prompt.keys, prompt.values, prompt.queries))
        self._prompt, self._first, self._num_layers = prompt, layers.start, layers.stop - layers.start
        self._known: dict[Hashable, Tensor] = {}
        self._window = 0

    def scores(self, config: SparseKVConfig, num_rows: int | None, window: int) -> Tensor | TwoLists | None:
        """A scorer's answer, fp32 [S, K, N]; None where it asks for its layer and there are several.

        Args:
            config: says how.
            num_rows: query rows that the scorer reads; None = all.
            window: the most that any scorer reads which does not read all.
        Raises:
            ScoreError: no fp32 [S, K, N], or two lists that do not fit together; values are not looked at.
        """
        self._window = max(self._window, min(window, self.queries.shape[2]))
        scorer, first = config.scorer_object, 0
        if num_rows is not None:
            first = max(0, self.queries.shape[2] - num_rows)
        inputs = _StackInputs(
            keys=self.keys,
            values=self.values,
            queries=self.queries[:, :, first:],
            scale=self._prompt.scale,
            row_reduction=config.rows,
            group_reduction=config.groups,
            num_seen=self._prompt.num_tokens,
            inv_freq=self._prompt.inv_freq,
            layer_idx=self._first if self._num_layers == 1 else SEVERAL,
            heads=self._prompt.heads,
            stack=self,
        )
        try:
            scores = scorer.score(inputs)
        except _LayerAsked:
            return None
        check_score_shapes(scores, (*self.keys.shape[:3],), self._first, scorer.name)
        return scores

    def lse(self, num_rows: int) -> Tensor:
        """fp32 [S, H, num_rows] of the last rows; that of the longest window serves all shorter ones."""
        computed = max(num_rows, self._window)
        key = ("lse", computed)
        if key not in self._known:
            self._known[key] = self._lse(computed)
        return self._known[key][:, :, computed - num_rows :].contiguous()

    def _lse(self, num_rows: int) -> Tensor:
        num_layers, _, num_keys, _ = self.keys.shape
        queries, scale = self.queries[:, :, self.queries.shape[2] - num_rows :], self._prompt.scale
        if (
            num_rows == num_keys and gives_lse()
        ):  # then the backends of attention are faster, though they also read the values
            return ops.attention(queries, self.keys, self.values, scale, None, True)[1]
        lengths = torch.full((num_layers,), num_keys, dtype=torch.int32, device=queries.device)
        return ops.window_lse(queries, self.keys, lengths, scale, num_keys)

    def remember(self, key: Hashable, value: Tensor) -> Tensor:
        """Keep a tensor for the next scorer; returns a copy, which the present one may write to."""
        self._known[key] = value
        return value.clone()

    def remembered(self, key: Hashable) -> Tensor | None:
        """A copy of what `remember` kept."""
        value = self._known.get(key)
        return None if value is None else value.clone()


class _LayerAsked(Exception):  # noqa: N818  # no error: the answer is to ask again, layer by layer
    """A scorer wants to know which of several layers it sees."""


@dataclass(frozen=True, kw_only=True)
class _StackInputs(ScoreInputs):
    """Inputs whose common parts the stack remembers."""

    stack: Stack = field(repr=False)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name == "layer_idx" and value == SEVERAL:
            raise _LayerAsked
        return value

    def _lse_of(self, last_queries: Tensor, lengths: Tensor) -> Tensor:
        """See `ScoreInputs`."""
        return self.stack.lse(last_queries.shape[2])

    def attention_received(
        self, *, row_reduction: str | None = None, num_rows: int | None = None, value_norm: bool = False
    ) -> Tensor:
        """See `ScoreInputs`."""
        observed = self.queries.shape[2] if num_rows is None else min(num_rows, self.queries.shape[2])
        rows = row_reduction or self.row_reduction
        key = _attention_key(observed, rows, self.group_reduction, value_norm)
        known = self.stack.remembered(key)
        if known is not None:
            return known
        if rows == "mean" and not value_norm and observed == self.keys.shape[2]:
            (sums,) = summed_weights(self.queries, self.keys, self.scale)
            return self.stack.remember(key, self._reduced(sums) / observed)
        fresh = super().attention_received(row_reduction=row_reduction, num_rows=num_rows, value_norm=value_norm)
        return self.stack.remember(key, fresh)

    def noisy_attention_received(self, noise: Tensor, temperature: float) -> Tensor:
        """See `ScoreInputs`; leaves what the rows give without noise to the next scorer."""
        num_tokens = self.keys.shape[2]
        if temperature != 1.0 or self.queries.shape[2] != num_tokens:
            return super().noisy_attention_received(noise, temperature)
        plain, noisy = summed_weights(self.queries, self.keys, self.scale, noise.exp())
        key = _attention_key(num_tokens, "mean", self.group_reduction, False)
        self.stack.remember(key, self._reduced(plain) / num_tokens)
        return self._reduced(noisy)

    def _reduced(self, per_head: Tensor) -> Tensor:
        """fp32 [S, K, N] of [S, K, G, N]."""
        return per_head.mean(dim=2) if self.group_reduction == "mean" else per_head.amax(dim=2)

    def key_diversity(self) -> Tensor:
        """See `ScoreInputs`."""
        known = self.stack.remembered("diversity")
        return known if known is not None else self.stack.remember("diversity", super().key_diversity())

    def kv_diversity(self) -> Tensor:
        """See `ScoreInputs`."""
        known = self.stack.remembered("kv_diversity")
        return known if known is not None else self.stack.remember("kv_diversity", super().kv_diversity())


def _attention_key(num_rows: int, row_reduction: str, group_reduction: str, value_norm: bool) -> Hashable:
    return "attention", num_rows, row_reduction, group_reduction, value_norm
