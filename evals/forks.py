"""One forward pass over many forks of a prompt: each keeps other tokens of it, all are fed the same new tokens.

The kept keys and values are gathered a layer at a time, for forks that keep about equally many together, so memory
holds the prompt once and one group's copy.

Shapes: F fork, T new token, L layer, H query head, K KV head, G query heads per KV head, N token of the prompt,
C kept token, D head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hf_sparsekv.errors import ModelError
from hf_sparsekv.hf.models import text_config

ATTENTION_NAME = "sparsekv_forks"
KEYWORD = "sparsekv_forks"
"""How the forks reach the attention function: as an argument of the model, which hands on what it does not know."""
MIN_FILL = 0.8
"""Forks of one group keep at least this share of what the largest one keeps: the rest is work for nothing."""
GROUP_BYTES = 64 * 2**20
"""What one group's gathered keys and values may take; at least one fork."""


@dataclass(frozen=True)
class KeptTokens:
    """What one fork keeps of the prompt."""

    index: Tensor | None
    """int64 [L, K, >= C], kept positions, ascending; what stands past a layer's count may be anything. None: all."""
    counts: tuple[int, ...]
    """C of each layer."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Forks that attend together in one layer."""

    members: tuple[int, ...]
    """Ascending."""
    counts: tuple[int, ...]
    place: slice | Tensor
    """Of the members among all forks."""
    new_rows: Tensor
    """int64 [F of the group, K, T], rows of the new tokens in a layer's table."""


class Forks:
    """The attention of some forks in one forward pass."""

    def __init__(self, keys: Tensor, values: Tensor, kept: Sequence[KeptTokens], visible: Tensor) -> None:
        """Take note of what each fork sees.

        Args:
            keys, values: [L, K, N, D] of the prompt, keys after RoPE.
            kept: of each fork.
            visible: bool [T, T], which new tokens each new token sees, see `TokenTree`.
        """
        self._keys, self._values, self._kept, self._visible = keys, values, kept, visible
        self._groups: dict[tuple[int, ...], list[_Group]] = {}
        """By the counts of all forks in a layer; few layers differ in them."""
        self._masks: dict[tuple[int, ...], Tensor] = {}

    @property
    def num_forks(self) -> int:
        """F."""
        return len(self._kept)

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Output [F, T, H, D] for queries [F, H, T, D], keys and values [F, K, T, D] of the new tokens."""
        num_heads, kv_heads, num_new, dim = query.shape[1], key.shape[1], query.shape[2], query.shape[3]
        packed = query.reshape(self.num_forks, kv_heads, (num_heads // kv_heads) * num_new, dim)
        # Prompt first, then the new tokens, as rows of one table: a gather then makes a fork's whole past.
        tables = [
            torch.cat([old[layer_idx].reshape(-1, dim), new.reshape(-1, dim)])
            for old, new in ((self._keys, key), (self._values, value))
        ]
        output = torch.empty_like(packed)
        for group in self._groups_of(layer_idx):
            where = self._rows(group, layer_idx)
            keys, values = (
                t.index_select(0, where.flatten()).view(len(group.members), kv_heads, -1, dim) for t in tables
            )
            mask = self._mask(group, num_heads // kv_heads)
            mine = packed[group.place]
            output[group.place] = scaled_dot_product_attention(mine, keys, values, attn_mask=mask, scale=scale)
        return output.view(self.num_forks, num_heads, num_new, dim).transpose(1, 2)

    def _groups_of(self, layer_idx: int) -> list[_Group]:
        counts = tuple(kept.counts[layer_idx] for kept in self._kept)
        if counts not in self._groups:
            self._groups[counts] = self._grouped(counts)
        return self._groups[counts]

    def _grouped(self, counts: tuple[int, ...]) -> list[_Group]:
        row_bytes = 2 * self._keys.shape[1] * self._keys.shape[3] * self._keys.element_size()
        groups: list[list[int]] = []
        for fork in sorted(range(len(counts)), key=lambda i: -counts[i]):
            largest = counts[groups[-1][0]] if groups else 0
            fits = groups and (len(groups[-1]) + 1) * (largest + self._visible.shape[0]) * row_bytes <= GROUP_BYTES
            if fits and counts[fork] >= MIN_FILL * largest:
                groups[-1].append(fork)
            else:
                groups.append([fork])
        return [self._group(sorted(members), counts) for members in groups]

    def _group(self, members: list[int], counts: tuple[int, ...]) -> _Group:
        (_, kv_heads, num_tokens, _), num_new = self._keys.shape, self._visible.shape[0]
        fork = _uploaded(members, self._keys.device)
        head, token = (torch.arange(count, device=fork.device) for count in (kv_heads, num_new))
        new_rows = kv_heads * num_tokens + (fork[:, None, None] * kv_heads + head[:, None]) * num_new + token
        is_whole = members[-1] - members[0] == len(members) - 1
        place = slice(members[0], members[-1] + 1) if is_whole else fork
        return _Group(tuple(members), tuple(counts[i] for i in members), place, new_rows)

    def _rows(self, group: _Group, layer_idx: int) -> Tensor:
        """int64 [F of the group, K, C + T]: rows of the table; where a fork keeps less than C, any."""
        num_layers, kv_heads, num_tokens, _ = self._keys.shape
        width, device = max(group.counts), self._keys.device
        head = torch.arange(kv_heads, device=device)[:, None]
        parts = []
        for fork, count in zip(group.members, group.counts, strict=True):
            index = self._kept[fork].index
            if index is None:
                index = torch.arange(num_tokens, device=device).expand(num_layers, kv_heads, -1)
            part = index[layer_idx, :, :count]
            parts.append(part if count == width else torch.nn.functional.pad(part, (0, width - count)))
        old = torch.stack(parts) + head * num_tokens
        return torch.cat([old, group.new_rows], dim=-1)

    def _mask(self, group: _Group, num_groups: int) -> Tensor:
        """bool [1 or F of the group, 1, G * T, C + T]."""
        width, num_new = max(group.counts), self._visible.shape[0]
        is_even = min(group.counts) == width
        key = (width,) if is_even else group.counts
        if key not in self._masks:
            counts = _uploaded(group.counts[:1] if is_even else group.counts, self._visible.device)
            old = torch.arange(width, device=counts.device) < counts[:, None]
            old = old[:, None].expand(-1, num_new, -1)
            mask = torch.cat([old, self._visible.expand(len(counts), -1, -1)], dim=-1)
            self._masks[key] = mask.repeat(1, num_groups, 1)[:, None]
        return self._masks[key]


@contextmanager
def forked_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give a model the attention that `Forks` describe, and its own back afterwards."""
    config = text_config(model.config)
    before = config._attn_implementation
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def attention_of_any_shape() -> Iterator[None]:
    """Keep torch from cuDNN's attention, which plans each shape for longer than a pass takes: most are new here."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _uploaded(values: Sequence[int], device: torch.device) -> Tensor:
    """int64, without waiting for the device: layers whose counts differ each ask for some."""
    return torch.tensor(values).to(device, non_blocking=True)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    forks: Forks | None = kwargs.get(KEYWORD)
    if forks is None:
        raise ModelError(
            f"{type(module).__name__} does not get the model's further arguments, which forks of a prompt need: "
            "score each configuration with SparseScorer"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    return forks.attend(layer_idx, query, key, value, scale), None


def _no_mask(**kwargs: Any) -> None:
    """What a token sees is the forks' business."""
