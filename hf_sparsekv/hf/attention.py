"""The function registered as attention implementation "sparsekv", with transformers' signature."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_sparsekv import ops
from hf_sparsekv.attention.forward import attend
from hf_sparsekv.cache.modes import in_plain_modes
from hf_sparsekv.errors import CacheError, InputError, ModelError
from hf_sparsekv.hf.dense import dense_attention
from hf_sparsekv.hf.masks import dense_mask, is_step_mask
from hf_sparsekv.hf.paged import packed_attention
from hf_sparsekv.hf.sharding import shard_of_call
from hf_sparsekv.ops.prefill_choice import using

if TYPE_CHECKING:
    from hf_sparsekv.hf.cache_layer import CacheLayer

LAYER_KEYWORD = "sparsekv_layer"
"""How a cache layer reaches the attention function on transformers >= 5.24: injected into the call's kwargs."""
LAYER_ATTRIBUTE = "_sparsekv_layer"
"""How it does before: on the view of the key that `Cache.update` returns."""

_UNSUPPORTED = {
    "sliding_window": "a sliding window",
    "softcap": "logit softcapping",
    "output_attentions": "output_attentions (no attention matrix is ever built)",
    "s_aux": "attention sinks as learned logits",
    "position_bias": "a position bias",
}


def sparsekv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a sparse cache, or plain sdpa when the forward pass has none.

    Args:
        module: the model's attention module.
        query: [B, H, T, D] after RoPE. key, value: [B, K, T, D] with our cache, [B, K, N, D] otherwise.
        attention_mask: what `sparsekv_mask` returned, or the `step_mask` of a packed step that the thread has running.
        scaling: factor on the logits; default D ** -0.5.
        dropout: applied only without our cache.
        kwargs: the model's other arguments; features that cannot work raise.
    Returns:
        output [B, T, H, D] and None, the attention weights that are never built.
    Raises:
        ModelError: the model asks for a feature that a sparse cache does not support.
        InputError: packed sequences or a custom 4D mask together with a sparse cache.
        CacheError: the cache cannot take these tokens; in a backward pass, always.
    """
    if is_step_mask(attention_mask):
        return packed_attention(query, key, value, scaling), None
    layer: CacheLayer | None = kwargs.pop(LAYER_KEYWORD, None) or getattr(key, LAYER_ATTRIBUTE, None)
    if layer is None:
        mask = dense_mask(attention_mask, query, key.shape[2], allow_none=True)
        output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return output, None
    for name, feature in _UNSUPPORTED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ModelError(f"{type(module).__name__} asks for {feature}, which a sparse cache does not support")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise InputError(
            f"a sparse cache takes a 2D padding mask [batch, tokens], got {list(attention_mask.shape)} "
            "(packed sequences and custom 4D masks need the dense cache)"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = _as_autocast_has_them(query, key, value)
    attend = _attend_between_graphs if torch.compiler.is_compiling() else _attend_in_plain_modes
    output = attend(module, layer, query, key, value, attention_mask, scale)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        output = _NoGradient.apply(output, query, key, value)
    return output, None


class _NoGradient(torch.autograd.Function):
    """Output of attention whose past is storage: what it depends on is overwritten, so it has no gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        """The output as it is; the inputs only make it part of the graph."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        """Refuse: a gradient without the stored tokens' part would be wrong."""
        raise CacheError(
            "a sparse cache has no gradients: run the model under torch.no_grad(), or train without a cache "
            "(use_cache=False)"
        )


def _as_autocast_has_them(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What sdpa would cast under the caller's autocast: the rotation makes queries and keys fp32, values are not."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


@in_plain_modes
def _attend_in_plain_modes(
    module: nn.Module,
    layer: "CacheLayer",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scale: float,
) -> Tensor:
    _check_call(module, layer, query, key)
    return _attend(module, layer, query, key, value, attention_mask, scale)


# What a layer holds changes from step to step: a compiled model ends its graph here and begins another behind.
_attend_between_graphs = torch.compiler.disable(_attend_in_plain_modes)


def _attend(
    module: nn.Module,
    layer: "CacheLayer",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scale: float,
) -> Tensor:
    step = layer.begin(query, attention_mask, scale, getattr(module, "config", None))
    padding = layer.state.padding
    is_plain = padding.is_token is None and layer.cache.config.chunk_tokens is not None

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if is_plain and 1 < query.shape[2] < key.shape[2]:  # a mask of a chunk over a long prompt would be large
            return ops.attention(query, key, value, scale, None, True)[0].transpose(1, 2)
        is_token = padding.new_tokens(key.shape[2])
        return dense_attention(module, query, key, value, attention_mask, scale, layer.cache.backend, is_token)

    with using(layer.cache.named_backend):
        return attend(
            layer.state,
            query,
            key,
            value,
            scale,
            dense,
            is_decode=step.is_decode,
            is_prompt_end=step.is_prompt_end,
        )


def _check_call(module: nn.Module, layer: "CacheLayer", query: Tensor, key: Tensor) -> None:
    """Refuse keys that are not handed over once a layer and as the cache is to hold them."""
    cache = layer.cache
    if not layer.is_awaiting_attention:
        raise ModelError(
            f"{type(module).__name__} attends more than once to one layer's keys, which a sparse cache does not support"
        )
    if key.shape[3] != cache.shape.head_dim:
        raise CacheError(
            f"the cache is for heads of {cache.shape.head_dim} dimensions, {type(module).__name__} makes keys of "
            f"{key.shape[3]}: make it from this model's configuration, SparseKVCache(model.config, ...)"
        )
    if key.shape[1] != cache.shape.num_kv_heads:
        cache.take_shard(*shard_of_call(module, query, key, cache.shape))
    layer.state.check_kind(key)
