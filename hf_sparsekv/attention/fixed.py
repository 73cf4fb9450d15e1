"""Decode steps whose launches are all alike, so that a CUDA graph can hold one of them.

A plain decode step decides on the host: how many columns are in use, whether a buffer has to grow, whether a layer
begins to replace. `FixedDecode` settles this in advance for a number of steps, and keeps what moves on the device.

Shapes: B request, H query head, K KV head, N column, D head dim.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from hf_sparsekv import ops
from hf_sparsekv.attention.forward import check_complete, decode_slots
from hf_sparsekv.attention.prompt import finish_prompt, start_replacing
from hf_sparsekv.cache.columns import ColumnStore
from hf_sparsekv.cache.layer import FullLayer, WindowLayer
from hf_sparsekv.cache.modes import in_plain_modes
from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.plan import FULL_LAYER_BLOCK

Result = TypeVar("Result")


class FixedDecode:
    """Up to `num_left` decode steps of one cache, all with the same launches on the same addresses.

    Every window layer replaces in slots from the start, as it otherwise does once its budget is used up: the same
    tokens stay, but attention runs on the decode kernels even while nothing has been evicted. Full layers get room for
    all steps, and hold the tokens of each request before its padding until `close`.
    """

    @in_plain_modes
    def __init__(self, layers: list[FullLayer], padding: Padding, num_steps: int, scale: float) -> None:
        """End the prompt and make room.

        Args:
            layers: all layers of the cache, their prompt complete.
            padding: their common history.
            num_steps: decode steps to have room for, at least 1.
            scale: factor on the logits, for scoring.
        Raises:
            CacheError: an earlier pass did not reach every layer, or a request got no token in its turn.
        """
        check_complete(layers, padding)
        self.num_left = num_steps
        """Steps that there is room for."""
        self._layers, self._padding = layers, padding
        self._full = [layer.columns for layer in layers if not isinstance(layer, WindowLayer)]
        self._capacities: dict[int, int] = {}
        """Slots that growing layers had before, by layer."""
        for layer in layers:
            if isinstance(layer, WindowLayer):
                finish_prompt(layer, scale)
                self._make_room(layer)
        for columns in self._full:
            columns.reserve(padding.num_columns + num_steps)
        self._moved: list[ColumnStore] = []
        self._order = None if not self._full else _tokens_first(padding, self._full[0].capacity)
        self._to_tokens_first()
        like = next(keys for layer in layers if (keys := layer.stored_keys) is not None)
        tokens = torch.tensor(padding.tokens, dtype=torch.int32, device=like.device)
        self._lengths = tokens
        """int32 [B], tokens in every full layer; the current one included from `advance` on."""
        self._slots = (tokens.long() - 1)[:, None].repeat(1, like.shape[1])
        """int64 [B, K], where full layers store the current token."""

    def step(self, launch: Callable[[], Result]) -> Result:
        """Count one more token of every request around what launches its forward pass."""
        assert self.num_left > 0
        self._padding.extend(len(self._padding.tokens), 1, None)
        result = launch()
        for layer in self._layers:  # after it: layers of an interrupted pass have not seen the token
            layer.num_seen += 1
            if isinstance(layer, WindowLayer):
                layer.num_decoded += 1
            else:
                layer.columns.num_columns += 1
        self.num_left -= 1
        return result

    def advance(self) -> None:
        """Let full layers take one more token; part of a step's launches, before its first layer."""
        self._lengths += 1
        self._slots += 1

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store one token of every request in a layer and attend over what the layer holds.

        Args:
            layer_idx: which layer.
            q: [B, H, D] after RoPE. k, v: [B, K, D], k after RoPE.
            scale: factor on the logits.
        Returns:
            [B, H, D].
        """
        layer = self._layers[layer_idx]
        if isinstance(layer, WindowLayer):
            return decode_slots(layer, q, k, v, scale)
        keys, values = layer.columns.buffers
        ops.write_slots(keys, values, k, v, self._slots)
        return ops.attend_slots(q, keys, values, self._lengths, scale, layer.columns.capacity)

    def launch_sizes(self) -> set[tuple[int, bool]]:
        """Of each kind of decode launch: the slots of a request, and whether it is a `decode_step`."""
        windows = {
            (layer.slots.capacity, True) for layer in self._layers if isinstance(layer, WindowLayer) and layer.slots
        }
        return windows | {(columns.capacity, False) for columns in self._full}

    @in_plain_modes
    def close(self) -> None:
        """Put the columns of full layers back in their order of arrival, and return unused room; no step may follow."""
        self.num_left = 0
        while self._moved:
            assert self._order is not None
            self._moved[-1].reorder(self._order.argsort(dim=1))
            self._moved.pop()
        for layer in self._layers:
            if not isinstance(layer, WindowLayer):
                layer.columns.trim()
            elif layer.spec.layer_idx in self._capacities:
                assert layer.slots is not None
                layer.slots.trim(_grown(self._capacities[layer.spec.layer_idx], _longest(layer)))

    def _make_room(self, layer: WindowLayer) -> None:
        if layer.slots is None:
            start_replacing(layer)
        assert layer.slots is not None
        if layer.config.decode_mode == "grow":
            capacity = self._capacities[layer.spec.layer_idx] = layer.slots.capacity
            layer.slots.reserve(_grown(capacity, _longest(layer) + self.num_left))

    def _to_tokens_first(self) -> None:
        if self._order is None:
            return
        try:
            for columns in self._full:
                columns.reorder(self._order)
                self._moved.append(columns)
        except BaseException:  # out of memory, or an interrupt: the layers must agree
            self.close()
            raise


def _longest(layer: WindowLayer) -> int:
    """Slots in use by the request that has most."""
    return max(layer.num_in_slots(row) for row in range(len(layer.prompts)))


def _grown(capacity: int, num_slots: int) -> int:
    """What a growing layer's capacity comes to when it holds `num_slots`: see `make_room`."""
    return capacity + -(-max(0, num_slots - capacity) // FULL_LAYER_BLOCK) * FULL_LAYER_BLOCK


def _tokens_first(padding: Padding, capacity: int) -> Tensor | None:
    """int64 [B, capacity]: columns with tokens, then those that are free, then padding; None where nothing is padding.

    A token that comes at column `num_columns` is then the next behind the request's tokens.
    """
    if padding.is_token is None:
        return None
    is_padding = torch.nn.functional.pad(~padding.is_token, (0, capacity - padding.num_columns), value=False)
    return is_padding.byte().argsort(dim=1, stable=True)
