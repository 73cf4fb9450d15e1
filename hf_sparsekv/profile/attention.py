"""Softmax weights of some rows, a bounded chunk at a time, and what they say: mass, locality, sinks, entropy.

Shapes: K KV head, G query heads per KV head, T row, R row of a chunk, N key, C budget, D head dim. One request.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.hf.observe import AttentionCall, DenseRun, observed
from hf_sparsekv.profile.result import Curve
from hf_sparsekv.profile.texts import one_text
from hf_sparsekv.scorers.base import row_chunks
from hf_sparsekv.scorers.checks import check_int

NUM_BLOCKS = 64
"""Of an attention pattern's rows and columns."""


def weight_chunks(call: AttentionCall) -> Iterator[tuple[slice, Tensor]]:
    """All rows of a call, in order: which rows, and their softmax weights fp32 [K, G, R, N], causal."""
    query, keys = call.query[0], call.key[0].float()
    num_heads, num_rows, dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    column_N = torch.arange(num_keys, device=keys.device)
    for rows in row_chunks(num_rows, num_heads * num_keys * 4):
        position_R = torch.arange(rows.start, rows.stop, device=keys.device) + num_keys - num_rows
        chunk = query[:, rows].float().reshape(num_kv_heads, -1, dim)
        logits = torch.matmul(chunk, keys.transpose(-1, -2)).mul_(call.scale)
        logits = logits.view(num_kv_heads, num_heads // num_kv_heads, -1, num_keys)
        logits.masked_fill_(column_N > position_R[:, None], float("-inf"))
        yield rows, logits.softmax(dim=-1)


class AttentionStats:
    """What one layer's rows pay attention to: sums over rows, per KV head."""

    def __init__(self, num_kv_heads: int, budgets: tuple[int, ...], prompt_length: int, num_sinks: int, window: int):
        self._budgets, self._prompt_length = budgets, prompt_length
        self._num_sinks, self._window = num_sinks, window
        self._num_rows = 0
        self._simple_3K = torch.zeros(3, num_kv_heads, dtype=torch.float64)
        self._best_CK = torch.zeros(len(budgets), num_kv_heads, dtype=torch.float64)

    def add(self, first_position: int, weights_KGRN: Tensor) -> None:
        """Take some rows.

        Args:
            first_position: of the first row.
            weights_KGRN: their softmax weights.
        """
        num_rows, num_keys = weights_KGRN.shape[2:]
        self._num_rows += num_rows
        position_R = torch.arange(first_position, first_position + num_rows, device=weights_KGRN.device)
        is_near = torch.arange(num_keys, device=weights_KGRN.device) > position_R[:, None] - self._window
        entropy_K = torch.special.entr(weights_KGRN).sum(dim=-1).mean(dim=1).sum(dim=-1)
        sink_K = weights_KGRN[..., : self._num_sinks].sum(dim=-1).mean(dim=1).sum(dim=-1)
        local_K = (weights_KGRN * is_near).sum(dim=-1).mean(dim=1).sum(dim=-1)
        self._simple_3K += torch.stack([entropy_K, sink_K, local_K]).double().cpu()
        own_KGR = weights_KGRN[..., self._prompt_length :].sum(dim=-1)
        best_KGRN = weights_KGRN[..., : self._prompt_length].sort(dim=-1, descending=True).values.cumsum(dim=-1)
        for c, budget in enumerate(self._budgets):
            best_K = (own_KGR + best_KGRN[..., budget - 1]).mean(dim=1).sum(dim=-1)
            self._best_CK[c] += best_K.double().cpu()

    def simple(self, head: int) -> tuple[float, float, float]:
        """Mean entropy, sink mass and local mass of a KV head's rows."""
        entropy, sink, local = (self._simple_3K[:, head] / self._num_rows).tolist()
        return entropy, sink, local

    def best_mass(self, head: int) -> Curve:
        """Mean over a KV head's rows."""
        return tuple((self._best_CK[:, head] / self._num_rows).tolist())


def attention_pattern(model: Any, ids: Tensor, *, num_blocks: int | None = None) -> Tensor:
    """Where each layer's rows look, in blocks: fp32 [layers, num_blocks, num_blocks] on the CPU.

    Entry [l, i, j] is the softmax weight that a row of block i pays to block j of the keys, mean over the block's rows
    and all query heads: rows sum to 1.

    Args:
        model: a causal language model.
        ids: int64 [1, N], one text.
        num_blocks: into which its tokens are divided, at most N; None = 64, or N if that is less.
    Raises:
        ModelError, InputError: no such model, or not one text that it can read.
        ConfigError: more blocks than tokens.
    """
    text = one_text(model, ids)
    num_tokens = text.shape[1]
    num_blocks = min(NUM_BLOCKS, num_tokens) if num_blocks is None else num_blocks
    check_int("num_blocks", num_blocks, at_least=1, at_most=num_tokens)
    block_N = torch.arange(num_tokens, device=model.device) * num_blocks // num_tokens
    patterns = torch.zeros(model_shape(model.config).num_layers, num_blocks, num_blocks, device=model.device)

    def look(call: AttentionCall) -> None:
        pattern = patterns[call.layer_idx]
        for rows, weights_KGRN in weight_chunks(call):
            mean_RN = weights_KGRN.mean(dim=(0, 1))
            by_block_RB = torch.zeros(len(mean_RN), num_blocks, device=mean_RN.device)
            by_block_RB.index_add_(1, block_N, mean_RN)
            pattern.index_add_(0, block_N[rows], by_block_RB)

    with observed(model, on_attention=look):
        DenseRun(model).read(text)
    return (patterns / block_N.bincount(minlength=num_blocks)[:, None]).cpu()
