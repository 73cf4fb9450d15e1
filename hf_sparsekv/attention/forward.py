"""One layer's attention with a sparse cache: store the new tokens, attend, and keep the books.

Shapes: B request, H query head, K KV head, G query heads per KV head, T new token, N column, C slot, D head dim.
"""

from typing import Protocol

import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.attention.prompt import (
    check_pass_length,
    column_scores,
    finish_chunk,
    finish_prompt,
    is_chunk_full,
    make_room,
)
from hf_sparsekv.cache.layer import FullLayer, WindowLayer
from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.errors import CacheError


class DenseAttention(Protocol):
    """Causal attention over columns as the dense model computes it."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Output [B, T, H, D] for queries [B, H, T, D], the last T of the columns of key and value [B, K, N, D].

        Padding columns are hidden by the mask of the forward pass, which the caller has bound.
        """
        ...


def begin_forward(
    layers: list[FullLayer],
    padding: Padding,
    batch_size: int,
    num_new: int,
    mask: Tensor | None,
    scale: float,
    is_decode: bool,
) -> None:
    """What has to happen before the first layer of a forward pass.

    Decoding ends the prompts and turns that are still open, in every layer; so does, of a bounded prefill, the chunk
    that the new columns would make too long.

    Args:
        layers: all layers of the cache.
        padding: their common history.
        batch_size, num_new: B and T of this pass.
        mask: bool [B, N], which of all columns, the T new ones included, are tokens; None = all.
        scale: factor on the logits, for scoring.
        is_decode: the new column is a generated token of every request.
    Raises:
        CacheError: an earlier pass did not reach every layer, the batch has another size, or a decode step has padding.
        InputError: the mask contradicts the columns seen before, or a pass is longer than a bounded prefill allows.
    """
    check_complete(layers, padding)
    padding.check_mask(batch_size, mask, is_decode)
    windows = [layer for layer in layers if isinstance(layer, WindowLayer)]
    if windows:
        check_pass_length(windows[0], num_new)
    for layer in windows:
        if is_decode:
            finish_prompt(layer, scale)
            make_room(layer)
        elif is_chunk_full(layer, num_new):
            finish_chunk(layer, scale)
    padding.extend(batch_size, num_new, None if is_decode else mask)


def attend(
    layer: FullLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dense: DenseAttention,
    *,
    is_decode: bool,
    is_prompt_end: bool,
) -> Tensor:
    """Attention of T new tokens over what the layer holds, the new tokens included.

    Args:
        layer: storage; changed.
        query: [B, H, T, D] after RoPE. key, value: [B, K, T, D], key after RoPE.
        scale: factor on the logits.
        dense: runs while every token is in columns: its result is the dense model's, bit for bit.
        is_decode: as told to `begin_forward`.
        is_prompt_end: a prompt or turn is known to end with these tokens: select now and free the rest.
    Returns:
        [B, T, H, D].
    Raises:
        CacheError: an earlier pass did not reach this layer.
    """
    num_new = query.shape[2]
    if layer.num_seen + num_new != layer.padding.num_columns:
        raise _interrupted(layer, layer.padding.num_columns - num_new)
    if not isinstance(layer, WindowLayer):
        layer.columns.append(key, value)
        output = dense(query, layer.columns.keys, layer.columns.values)
    elif is_decode:
        output = _decode(layer, query, key, value, scale, dense)
    else:
        output = _prefill(layer, query, key, value, scale, dense)
    layer.num_seen += num_new  # last: a layer that was interrupted has not seen the tokens
    if isinstance(layer, WindowLayer) and not is_decode:
        if is_prompt_end:
            finish_prompt(layer, scale)
        elif is_chunk_full(layer):
            finish_chunk(layer, scale)
    return output


def decode_slots(layer: WindowLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One decode step of a layer that holds slots; only tensors change, the host's counters do not.

    Args:
        layer: a layer with slots.
        query: [B, H, D]. key, value: [B, K, D].
        scale: factor on the logits.
    Returns:
        [B, H, D].
    """
    config, slots = layer.config, layer.slots
    assert slots is not None
    decay, gain = config.decode_weights
    return ops.decode_step(
        query,
        key,
        value,
        slots.keys,
        slots.values,
        slots.positions,
        slots.scores,
        slots.lengths,
        slots.budgets,
        slots.victims,
        slots.next_positions,
        scale,
        decay,
        gain,
        config.num_sink_tokens,
        config.num_recent_tokens,
        config.decode_mode == "ring",
    )


def check_complete(layers: list[FullLayer], padding: Padding) -> None:
    """Refuse to go on where some layer has not seen what the others have.

    Raises:
        CacheError: an earlier pass did not reach every layer.
    """
    for layer in layers:
        if layer.num_seen != padding.num_columns:
            raise _interrupted(layer, padding.num_columns)


def _interrupted(layer: FullLayer, expected: int) -> CacheError:
    return CacheError(
        f"an earlier forward pass was interrupted: layer {layer.spec.layer_idx} has seen {layer.num_seen} tokens, the "
        f"cache {expected}; what it holds cannot be used any more: call reset(), or take a new cache"
    )


def _prefill(
    layer: WindowLayer, query: Tensor, key: Tensor, value: Tensor, scale: float, dense: DenseAttention
) -> Tensor:
    num_new = query.shape[2]
    layer.columns.append(key, value)
    layer.tail.append(query, layer.padding.new_tokens(num_new))
    layer.num_unselected += num_new
    layer.is_prompt_open = True
    if layer.slots is not None:
        return _attend_stored_and_new(layer, query, scale)
    return dense(query, layer.columns.keys, layer.columns.values)


def _decode(
    layer: WindowLayer, query: Tensor, key: Tensor, value: Tensor, scale: float, dense: DenseAttention
) -> Tensor:
    layer.num_decoded += 1
    if layer.slots is not None:
        return decode_slots(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], scale)[:, None]
    config = layer.config
    decay, gain = config.decode_weights
    layer.columns.append(key, value)
    scores = column_scores(layer)
    if config.decode_mode == "ring":
        ages = torch.tensor(layer.padding.tokens, dtype=torch.float32, device=scores.device) - 1.0
        scores[:, :, -1] = ages[:, None]
    else:
        scores[:, :, -1] = 0.0
        scores.mul_(decay).add_(_column_weights(layer, query, scale), alpha=gain)
    return dense(query, layer.columns.keys, layer.columns.values)


def _column_weights(layer: WindowLayer, query: Tensor, scale: float) -> Tensor:
    """Softmax weight fp32 [B, K, N] of each column for one query row, mean over the group, 0 for padding."""
    keys = layer.columns.keys
    grouped = query.float().view(query.shape[0], keys.shape[1], -1, query.shape[3])
    logits = torch.matmul(grouped, keys.float().transpose(-1, -2)).mul_(scale)
    if layer.padding.is_token is not None:
        logits.masked_fill_(~layer.padding.is_token[:, None, None], float("-inf"))
    weights: Tensor = logits.softmax(dim=-1).mean(dim=2)
    return weights


def _attend_stored_and_new(layer: WindowLayer, query: Tensor, scale: float) -> Tensor:
    """Rows of a new turn over [stored slots ; columns of the turn], causal and aligned at the last column."""
    slots, columns = layer.slots, layer.columns
    assert slots is not None
    num_new, num_staged = query.shape[2], columns.num_columns
    in_use = {layer.num_in_slots(row) for row in range(query.shape[0])}
    if layer.padding.is_token is None and len(in_use) == 1:
        stored = in_use.pop()
        keys = torch.cat([slots.keys[:, :, :stored], columns.keys], dim=2)
        values = torch.cat([slots.values[:, :, :stored], columns.values], dim=2)
        return ops.attention(query, keys, values, scale, None, True)[0].transpose(1, 2)
    device = query.device
    is_stored = torch.arange(slots.capacity, device=device)[None] < slots.lengths[:, None]
    column, row = torch.arange(num_staged, device=device), torch.arange(num_new, device=device)
    visible = (column[None] <= row[:, None] + (num_staged - num_new))[None].expand(query.shape[0], -1, -1)
    is_token = layer.padding.new_tokens(num_staged)
    if is_token is not None:
        visible = visible & is_token[:, None]
    mask = torch.cat([is_stored[:, None].expand(-1, num_new, -1), visible], dim=2)
    keys = torch.cat([slots.keys, columns.keys], dim=2)
    values = torch.cat([slots.values, columns.values], dim=2)
    output, _ = ops.attention(query, keys, values, scale, mask, False)
    return output.transpose(1, 2)
