"""The attention of packed forward passes: one row of tokens of many requests, no transformers cache.

The model calls `paged_attention`, which is a single opaque operator: whatever compiles the model's layers sees one
call with three tensors and a number, and nothing that differs between engines, for which it would compile anew. The
step is the one that the calling thread has running. Layers are told apart by the order of the calls: a compiled layer
that read its own index would be compiled once per layer.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hf_sparsekv.errors import ModelError
from hf_sparsekv.hf.compat import check_version
from hf_sparsekv.hf.models import text_config

PAGED_NAME = "sparsekv_paged"
"""Attention implementation; it has no mask function, so transformers builds no mask and asks the device nothing."""


class Step(Protocol):
    """What one forward pass does in every layer."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Output [T, H, D] for q [T, H, D] and k, v [T, K, D] of T packed tokens."""
        ...


@dataclass
class _Running:
    step: Step
    next_layer: int = 0


class _Thread(threading.local):
    """What the current thread has running."""

    now: _Running | None = None


_thread = _Thread()

_library = torch.library.Library("hf_sparsekv", "FRAGMENT")  # noqa: TOR901 (its lifetime is the process's)
_library.define("paged_attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor")


def _paged_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    now = _now()
    layer_idx, now.next_layer = now.next_layer, now.next_layer + 1
    return now.step.attend(layer_idx, q, k, v, scale)


def _fake_paged_attention(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


_library.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
torch.library.register_fake("hf_sparsekv::paged_attention", _fake_paged_attention, lib=_library)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature for a packed forward pass.

    Args:
        module: the model's attention module.
        query: [1, H, T, D] after RoPE. key, value: [1, K, T, D].
        attention_mask: None.
        scaling: factor on the logits; default D ** -0.5.
        dropout: ignored, the engine only infers.
        kwargs: ignored.
    Returns:
        output [1, T, H, D] and None.
    Raises:
        ModelError: a forward pass that is not the engine's, or layers that do not attend once each, in order.
    """
    if not torch.compiler.is_compiling():
        _check_call(module)
    return packed_attention(query, key, value, scaling), None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """The attention of the next layer of the step that the thread has running.

    Args:
        query: [1, H, T, D] after RoPE. key, value: [1, K, T, D].
        scaling: factor on the logits; default D ** -0.5.
    Returns:
        output [1, T, H, D].
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t.transpose(1, 2)[0] for t in (query, key, value))
    output: Tensor = torch.ops.hf_sparsekv.paged_attention(q, k, v, scale)
    return output[None]


def is_running() -> bool:
    """Whether the thread has a step running."""
    return _thread.now is not None


def _now() -> _Running:
    if _thread.now is None:
        raise ModelError(
            f"attention {PAGED_NAME!r} runs inside an Engine only: call engine.close() before using its model elsewhere"
        )
    return _thread.now


def _check_call(module: nn.Module) -> None:
    expected, layer_idx = _now().next_layer, getattr(module, "layer_idx", None)
    if layer_idx != expected:
        raise ModelError(
            f"{type(module).__name__} of layer {layer_idx} attends where layer {expected} should: the engine serves "
            "models whose layers attend once each, in order"
        )


@contextmanager
def running(step: Step, num_layers: int) -> Iterator[None]:
    """The one forward pass inside, of the current thread, belongs to `step`.

    Raises:
        ModelError: not every layer called it: the model's attention is not the engine's any more.
    """
    now = _thread.now = _Running(step)
    try:
        yield
    finally:
        _thread.now = None
    if now.next_layer != num_layers:
        raise ModelError(
            f"the model's attention was set to something other than {PAGED_NAME!r} while an Engine had it: "
            "close the engine first"
        )


def use_paged_attention(model: PreTrainedModel) -> str:
    """Give a model the paged attention; returns the name of what it had.

    Raises:
        ModelError: it has the paged attention already.
    """
    check_version()
    AttentionInterface.register(PAGED_NAME, paged_attention)
    before: str = text_config(model.config)._attn_implementation
    if before == PAGED_NAME:
        raise ModelError(
            f"the {type(model).__name__} is in use by another Engine: close that one first, or, if it is lost, "
            "call model.set_attn_implementation('sdpa')"
        )
    model.set_attn_implementation(PAGED_NAME)
    return before
