"""What a scorer is: tensors of one layer in, one fp32 score per key out, larger = keep.

A scorer never sees padding, a cache, a request or a model: rows of different length are scored one by one, so every
tensor it gets is dense.

Shapes: B request, H query head, K KV head, G = H // K, A observed query row, N key, D head dim.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.ops.reference.score import REDUCTIONS as REDUCTIONS
from hf_sparsekv.ops.reference.select import POOLINGS as POOLINGS

Queries = Literal["none", "last", "all"]
QUERIES = ("none", "last", "all")
DECODE_MODES = ("replace_lowest", "ring", "grow")

TEMPORARY_BYTES = 16 * 2**20
"""What one fp32 temporary of a scorer may take."""

CHUNK_BYTES = 32 * 2**20
"""The same where keys or values are compared in plain PyTorch."""


def row_chunks(num_rows: int, bytes_per_row: int) -> list[slice]:
    """Pieces of `num_rows` rows whose temporaries stay under `TEMPORARY_BYTES`; at least one row each."""
    step = max(1, TEMPORARY_BYTES // max(1, bytes_per_row))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


@dataclass(frozen=True)
class HeadShard:
    """Which of a layer's KV heads are at hand: all, or those of one of several ranks that share the model."""

    first: int = 0
    total: int | None = None
    """KV heads of the whole layer; None = as many as are at hand."""


ALL_HEADS = HeadShard()


@dataclass(frozen=True, kw_only=True)
class ScoreInputs:
    """What one layer knows when its prompt (or a new turn) has ended.

    Keys are in storage order: what was kept from earlier, then the new tokens, so the last A keys belong to the last A
    query rows.
    """

    keys: Tensor
    """[B, K, N, D], after RoPE."""
    values: Tensor
    """[B, K, N, D]."""
    queries: Tensor
    """[B, H, A, D], after RoPE: the last A rows, as many as the scorer's `queries` asks for; A == 0 for "none"."""
    scale: float
    """Factor on the logits."""
    row_reduction: str
    """"mean" or "max" over the observed rows; the configuration's, or the scorer's own default."""
    group_reduction: str
    """"mean" or "max" over the query heads of a KV head."""
    lse: Tensor | None = None
    """fp32 [B, H, A], log-sum-exp of those rows where the attention backend returned it."""
    carried: Tensor | None = None
    """fp32 [B, K, N]: score that stored tokens kept from turns and decoding before, 0 for new ones; None at first.
    Those that the prompt held for good have the highest of the others', sinks aside.
    Between the chunks of a bounded prefill: the scorer's own scores, before pooling."""
    positions: Tensor | None = None
    """int64 [B, K, N]: position of every key; None when key j simply has position j."""
    num_seen: int = 0
    """Tokens seen so far, these included; the next token gets this position."""
    inv_freq: Tensor | None = None
    """fp32 [D / 2], RoPE's inverse frequencies, for scorers that undo the rotation (rotate-half layout)."""
    is_last: bool = True
    """False in a bounded prefill where the prompt is known to go on: what its end will ask for is not in the window."""
    layer_idx: int = 0
    key_counts: Tensor | None = None
    """int32 [B], every entry N, where the caller has it: layers of one prompt may share it. See `lengths`."""
    heads: HeadShard = ALL_HEADS
    """Which KV heads the tensors hold, for what must not depend on the number of ranks. Scores are per head: a score
    that is to be the same for all heads of a layer has to be summed over the ranks by the scorer itself."""

    @property
    def lengths(self) -> Tensor:
        """int32 [B], every entry N."""
        if self.key_counts is not None:
            return self.key_counts
        batch, _, num_keys, _ = self.keys.shape
        return torch.full((batch,), num_keys, dtype=torch.int32, device=self.keys.device)

    def key_positions(self) -> Tensor:
        """int64 [B, K, N], the position of every key."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.keys.shape[2], device=self.keys.device).expand(self.keys.shape[:3])

    def _lse_of(self, last_queries: Tensor, lengths: Tensor) -> Tensor:
        """fp32 [B, H, rows] of the last rows: the backend's LSE, or computed here when it returned none."""
        if self.lse is not None:
            return self.lse[:, :, self.lse.shape[2] - last_queries.shape[2] :]
        return ops.window_lse(last_queries, self.keys, lengths, self.scale, self.keys.shape[2])

    def attention_received(
        self, *, row_reduction: str | None = None, num_rows: int | None = None, value_norm: bool = False
    ) -> Tensor:
        """fp32 [B, K, N]: softmax weight that each key gets from the observed rows, on a probability scale.

        Args:
            row_reduction: overrides the configured one.
            num_rows: use only the last `num_rows` rows.
            value_norm: multiply by the norm of the key's value over the mean norm of the head's values, so that the
                scale stays a probability's.
        Returns:
            All 0 where no row was observed.
        """
        first = 0 if num_rows is None else max(0, self.queries.shape[2] - num_rows)
        queries = self.queries[:, :, first:]
        if queries.shape[2] == 0:
            return self.keys.new_zeros(self.keys.shape[:3], dtype=torch.float32)
        norm = None
        if value_norm:
            norm = torch.linalg.vector_norm(self.values, dim=-1, dtype=torch.float32)
            norm = norm / norm.mean(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        lengths = self.lengths
        score, _ = ops.window_score(
            queries,
            self.keys,
            self._lse_of(queries, lengths),
            lengths,
            self.scale,
            self.keys.shape[2],
            row_reduction or self.row_reduction,
            self.group_reduction,
            None,
            norm,
        )
        return score

    def noisy_attention_received(self, noise: Tensor, temperature: float) -> Tensor:
        """fp32 [B, K, N]: sum over all observed rows of softmax((logit + noise) / temperature), reduced over the group.

        Args:
            noise: fp32 [B, K, N], added to the logits of a key.
            temperature: divides the noisy logits.
        """
        batch, kv_heads, num_keys, dim = self.keys.shape
        num_rows = min(self.queries.shape[2], num_keys)  # rows before the first key see nothing
        first_row = self.queries.shape[2] - num_rows
        groups = self.queries.shape[1] // kv_heads
        queries = self.queries[:, :, first_row:].reshape(batch, kv_heads, groups, num_rows, dim)
        keys = self.keys.float().transpose(-1, -2)[:, :, None]
        key_index = torch.arange(num_keys, device=keys.device)
        per_head = self.keys.new_zeros((batch, kv_heads, groups, num_keys), dtype=torch.float32)
        for rows in row_chunks(num_rows, batch * self.queries.shape[1] * num_keys * 4):
            end = rows.stop + num_keys - num_rows  # later keys are hidden from all of these rows
            logits = torch.matmul(queries[..., rows, :].float(), keys[..., :end]).mul_(self.scale)
            position = torch.arange(rows.start, rows.stop, device=keys.device) + num_keys - num_rows
            is_later = key_index[:end] > position[:, None]
            logits.add_(noise[:, :, None, None, :end]).div_(temperature).masked_fill_(is_later, float("-inf"))
            per_head[..., :end] += logits.softmax(dim=-1).sum(dim=-2)
        return per_head.mean(dim=2) if self.group_reduction == "mean" else per_head.amax(dim=2)

    def key_diversity(self) -> Tensor:
        """fp32 [B, K, N]: negative cosine between each key and the mean key direction, in [-1, 1]."""
        batch, kv_heads, num_keys, dim = self.keys.shape
        anchor = ops.key_anchor(self.keys, self.lengths, num_keys)[:, :, None]
        cosines = [
            torch.nn.functional.cosine_similarity(self.keys[:, :, some].float(), anchor, dim=-1)
            for some in row_chunks(num_keys, batch * kv_heads * dim * 4)
        ]
        return -torch.cat(cosines, dim=-1)

    def kv_diversity(self) -> Tensor:
        """fp32 [B, K, N]: how unlike the others a token's key, without its rotation, and its value are.

        Each is the negative cosine to the mean direction, standardised per head; their sum. Where the model's rotary
        frequencies are not fixed (`inv_freq` is None), keys are compared as they are.
        """
        if self.inv_freq is None:
            return ops.kv_diversity(self.keys, self.values, self.lengths, None, None, CHUNK_BYTES)
        # A transformers cache holds the frequencies on the host: that copy must not wait for the device.
        inv_freq = self.inv_freq.to(self.keys.device, non_blocking=True)
        return ops.kv_diversity(self.keys, self.values, self.lengths, inv_freq, self.positions, CHUNK_BYTES)


@dataclass(frozen=True, kw_only=True)
class TwoLists:
    """Two scores that fill the budget together: the first takes its share of the free places, the second the rest."""

    primary: Tensor
    """fp32 [B, K, N], pooled as the configuration says; its values are what decoding goes on with."""
    secondary: Tensor
    """fp32 [B, K, N]; only its order matters."""
    share: float
    """Part of the free places that the first list fills, in [0, 1]."""
    secondary_pooling: str = "none"
    secondary_width: int = 1


@dataclass(frozen=True)
class Pooling:
    """How a score spreads to its neighbours before selection, see `ops.pool_scores`."""

    kind: str = "none"
    width: int = 1


class Scorer(ABC):
    """One published way to say which keys matter. Subclass it, set the class attributes, write `score`.

    A scorer holds hyper-parameters only, never state of a request: one object serves every layer and request.
    """

    name: ClassVar[str]
    """What the configuration calls it."""
    queries: ClassVar[Queries] = "last"
    """Which query rows it needs: none, the observation window ("last"), or every row of the prompt ("all")."""
    is_query_aware: ClassVar[bool] = True
    """Whether the score depends on the queries, and so on a question at the prompt's end."""
    is_probability: ClassVar[bool] = True
    """Whether scores are softmax weights. If not, decoding goes on with the rank of each kept token instead."""
    uses_row_reduction: ClassVar[bool] = False
    """Whether `row_reduction` changes this score; setting it for another scorer is an error."""
    uses_group_reduction: ClassVar[bool] = False
    default_pooling: ClassVar[Pooling] = Pooling()
    default_row_reduction: ClassVar[str] = "mean"
    default_decode: ClassVar[str] = "replace_lowest"
    default_prompt_share: ClassVar[float] = 0.5
    """Part of the free budget that the prompt holds for good in `decode="replace_lowest"`."""
    decode_decay: ClassVar[float | None] = None
    """Decay of the score while decoding; None = 1 - 1 / observation_window."""
    decode_gain: ClassVar[float | None] = None
    """Weight of each new softmax weight while decoding; None = 1 - decay."""
    ring_freezes_selection: ClassVar[bool] = True
    """In `decode="ring"`: whether the prompt's selection stays for good, or everything but the sinks grows old."""

    @abstractmethod
    def score(self, inputs: ScoreInputs) -> Tensor | TwoLists:
        """fp32 [B, K, N], finite, larger = keep; or two lists that share the budget."""
