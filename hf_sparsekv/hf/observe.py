"""Watch a dense forward pass: every layer's queries, keys and values, and the residual stream between the layers.

What watches may also say what attention returns. Nothing stays on the model.

Shapes: B request, H query head, K KV head, T query row, N key, D head dim.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_sparsekv.errors import ModelError
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.compile import decoder_layers
from hf_sparsekv.hf.masks import dense_mask, sparsekv_mask

OBSERVED_NAME = "sparsekv_observed"

_numbers = count()


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention, about to happen."""

    layer_idx: int
    module: nn.Module
    """The model's attention module."""
    query: Tensor
    """[B, H, T, D] after RoPE, the last T of the N tokens."""
    key: Tensor
    """[B, K, N, D] after RoPE."""
    value: Tensor
    """[B, K, N, D]."""
    scale: float
    """Factor on the logits."""

    def dense(self) -> Tensor:
        """[B, T, H, D]: what the model computes."""
        mask = dense_mask(None, self.query, self.key.shape[2], allow_none=True)
        output, _ = sdpa_attention_forward(self.module, self.query, self.key, self.value, mask, scaling=self.scale)
        return output

    def project(self, output: Tensor) -> Tensor:
        """[B, T, hidden]: what an attention output [B, T, H, D] adds to the residual stream, a bias included.

        Raises:
            ModelError: the module calls its output projection something else than o_proj.
        """
        projection = getattr(self.module, "o_proj", None)
        if not isinstance(projection, nn.Module):
            raise ModelError(f"{type(self.module).__name__} has no output projection o_proj")
        projected: Tensor = projection(output.flatten(2))
        return projected


OnAttention = Callable[[AttentionCall], Tensor | None]
"""Returns what attention gives, or None for what the dense model computes."""
OnHidden = Callable[[int, Tensor], None]
"""Gets a layer's index and what it reads of the residual stream, [B, T, hidden]."""


@contextmanager
def observed(
    model: PreTrainedModel, on_attention: OnAttention | None = None, on_hidden: OnHidden | None = None
) -> Iterator[None]:
    """Let every forward pass inside be watched; afterwards the model has its own attention again.

    The pass must be plain: no padding, no packed sequences. Nobody else may use the model meanwhile.

    Args:
        model: a decoder that a sparse cache supports.
        on_attention, on_hidden: called once a layer, the latter first.
    """
    with ExitStack() as stack:
        if on_attention is not None:
            stack.enter_context(_attention(model, on_attention))
        if on_hidden is not None:
            for layer_idx, layer in enumerate(decoder_layers(model)):
                hook = _hidden_hook(layer_idx, on_hidden)
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


class DenseRun:
    """A prompt that a model reads once, and any number of continuations of it, each forgotten when it was read."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Nothing was read yet."""
        self._model = model
        self._cache = DynamicCache(config=model.config)

    def read(self, ids: Tensor) -> None:
        """Read the prompt, int64 [1, N]."""
        self._forward(ids, logits_to_keep=1)

    def continue_with(self, ids: Tensor) -> Tensor:
        """Logits [1, T, V] after each token of a continuation int64 [1, T]; the cache then holds the prompt alone."""
        logits = self._forward(ids)
        self._cache.crop(-ids.shape[1])
        return logits

    def _forward(self, ids: Tensor, **options: int) -> Tensor:
        with torch.no_grad():
            output = self._model(ids, use_cache=True, **{CACHE_KEYWORD: self._cache}, **options)
        logits: Tensor = output.logits
        return logits


@contextmanager
def _attention(model: PreTrainedModel, on_attention: OnAttention) -> Iterator[None]:
    name = f"{OBSERVED_NAME}_{next(_numbers)}"

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None, "only plain causal passes are observed"
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        call = AttentionCall(int(module.layer_idx), module, query, key, value, scale)  # type: ignore[arg-type]
        output = on_attention(call)
        return call.dense() if output is None else output, None

    before = model.config._attn_implementation
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sparsekv_mask)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)


def _hidden_hook(layer_idx: int, on_hidden: OnHidden) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_hidden(layer_idx, args[0] if args else kwargs["hidden_states"])

    return hook
