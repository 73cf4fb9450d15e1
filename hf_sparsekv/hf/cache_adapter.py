"""SparseKVCache: the sparse cache as transformers' `Cache`, for `model(...)` and `model.generate(...)`."""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_sparsekv.attention.forward import begin_forward
from hf_sparsekv.attention.prompt import finish_prompt
from hf_sparsekv.cache.layer import FullLayer, WindowLayer
from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import CacheError, ConfigError
from hf_sparsekv.hf.attention import BACKENDS, LAYER_ATTRIBUTE, LAYER_KEYWORD
from hf_sparsekv.hf.models import model_shape, rope_inv_freq, text_config
from hf_sparsekv.hf.register import ATTENTION_NAME
from hf_sparsekv.hf.report import build_report
from hf_sparsekv.plan import LayerPlan


@dataclass(frozen=True)
class ForwardStep:
    """What one forward pass is to a layer."""

    is_decode: bool
    is_prompt_end: bool
    backend: str


class CacheLayer(CacheLayerMixin):
    """One layer of a `SparseKVCache`, as transformers sees it. What it holds is in `state`."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: "SparseKVCache", state: FullLayer) -> None:
        """Wrap a layer's storage."""
        super().__init__()
        self.cache = cache
        self.state = state
        self.is_awaiting_attention = False

    def begin(self, query: Tensor, mask: Tensor | None, scale: float) -> ForwardStep:
        """Called by the attention function: says what this pass is, after the cache has prepared for it."""
        self.is_awaiting_attention = False
        return self.cache._begin(self.state, query, mask, scale)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage takes its shape from the first keys."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand this layer over to the attention function, which stores and attends in one go."""
        if self.is_awaiting_attention:
            raise CacheError(
                f"the model did not call the attention function {ATTENTION_NAME!r} after the last update: load it "
                f"with attn_implementation={ATTENTION_NAME!r}"
            )
        self.is_initialized = self.is_awaiting_attention = True
        call_kwargs = kwargs.get("kwargs")
        if call_kwargs is not None:
            call_kwargs[LAYER_KEYWORD] = self
            return key_states, value_states
        key_states = key_states.view_as(key_states)  # a view of our own to carry the layer
        setattr(key_states, LAYER_ATTRIBUTE, self)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens seen, padding columns included; not what is stored."""
        return self.cache.padding.num_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Mask over everything seen and the new tokens."""
        return self.cache.padding.num_columns + query_length, 0

    def get_max_length(self) -> int:
        """No limit on tokens seen."""
        return -1

    def reset(self) -> None:
        """Reset the whole cache: its layers share one history."""
        self.cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder this layer's requests; `SparseKVCache.reorder_cache` also moves the shared history."""
        self.state.select_rows(beam_idx)

    def crop(self, *args: int) -> NoReturn:
        """Layers are never cropped one by one."""
        raise CacheError("crop the whole cache, not one layer of it")


class SparseKVCache(Cache):
    """A cache whose full layers keep every token and whose window layers keep a budget.

    Pass it to `generate` or to the model, under the name that transformers uses for caches; the model must use
    attn_implementation="sparsekv" (see `hf_sparsekv.register`). All state lives in this object: a new request needs a
    new cache or `reset()`.

    A window layer selects when the first token after a prompt is decoded, since the chunks of a chunked prefill do
    not say which is the last. With `prompt_length` it selects as soon as it has seen that many tokens, layer by layer,
    so that no two window layers hold the whole prompt at once.
    """

    layers: list[CacheLayer]  # type: ignore[assignment]  # narrower than the base class, which never adds to it

    def __init__(
        self,
        model_config: PreTrainedConfig,
        config: SparseKVConfig | None = None,
        *,
        backend: str = "sdpa",
        prompt_length: int | None = None,
    ) -> None:
        """An empty cache for one model.

        Args:
            model_config: `model.config`.
            config: the method's options; defaults if None.
            backend: dense attention used while every token is at hand, "sdpa" or "eager".
            prompt_length: tokens of the coming prompt, padding included, if known.
        Raises:
            ModelError: the model has a feature that a sparse cache does not support.
            ConfigError: the options do not fit the model, or the backend is unknown.
        """
        self.config = SparseKVConfig() if config is None else config
        if not isinstance(self.config, SparseKVConfig):
            raise ConfigError(f"config must be a SparseKVConfig, got {type(config).__name__}")
        if backend not in BACKENDS:
            raise ConfigError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")
        self.backend = backend
        self.model_config = text_config(model_config)
        self.shape = model_shape(model_config)
        self.plan = LayerPlan.build(self.config, self.shape)
        self._inv_freq = rope_inv_freq(model_config, self.shape.head_dim)
        self.prompt_end: int | None = None
        self._clear()
        super().__init__(layers=list(self.layers))
        if prompt_length is not None:
            self.expect_prompt(prompt_length)

    # --- what transformers calls ----------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention modules, once a layer and forward pass."""
        implementation = self.model_config._attn_implementation
        if implementation != ATTENTION_NAME:
            raise CacheError(
                f"a SparseKVCache needs attn_implementation={ATTENTION_NAME!r}, the model uses {implementation!r}: "
                f"call hf_sparsekv.register() and model.set_attn_implementation({ATTENTION_NAME!r})"
            )
        if layer_idx >= len(self.layers):
            raise CacheError(f"the cache has {len(self.layers)} layers, the model asks for layer {layer_idx}")
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def reset(self) -> None:
        """Forget everything, as if newly made."""
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make request i what request beam_idx[i] was: keys, values, positions, scores and counters together."""
        for layer in self.layers:
            layer.state.select_rows(beam_idx)
        self.padding.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every request `repeats` times in a row."""
        rows = torch.arange(len(self.padding.tokens)).repeat_interleave(repeats)
        self.reorder_cache(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the requests `indices`."""
        self.reorder_cache(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget tokens: a sparse cache cannot go back.

        Args:
            tokens_to_remove: negative = columns to drop, 0 = none; positive (the older meaning) = columns to keep.
        Raises:
            CacheError: unless nothing would be dropped.
        """
        seen = self.padding.num_columns
        target = tokens_to_remove if tokens_to_remove > 0 else seen + tokens_to_remove
        if target < seen:
            raise CacheError(
                f"cannot crop a sparse cache from {seen} to {target} tokens: what was evicted meanwhile cannot come "
                "back; assisted and prompt-lookup decoding need the dense cache"
            )

    # --- ours -----------------------------------------------------------------------------------------------------

    def expect_prompt(self, num_tokens: int) -> None:
        """Announce that the next `num_tokens` tokens (padding included) are one prompt or turn.

        Window layers then select as soon as they have seen them, in place of at the first decode step.
        """
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 1:
            raise ConfigError(f"prompt_length must be a positive int: got {num_tokens!r}")
        self.prompt_end = self.padding.num_columns + num_tokens

    def compress(self) -> None:
        """End the current prompt or turn now: every window layer selects and frees the rest."""
        self.prompt_end = None
        for state in self._window_layers():
            finish_prompt(state, self._scale)

    def report(self, *, positions: bool = False) -> dict[str, Any]:
        """What the cache holds, measured; JSON-able.

        Args:
            positions: also list the stored positions per layer, request and KV head.
        """
        return build_report(self, positions=positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the cache holds: keys, values, scores, positions, tables."""
        padding = self.padding.is_token
        return sum(layer.state.nbytes for layer in self.layers) + (0 if padding is None else padding.nbytes)

    def _clear(self) -> None:
        self.padding = Padding()
        self.prompt_end = None
        self._scale = self.shape.head_dim**-0.5
        self.layers = []
        for spec in self.plan.layers:
            state = (
                FullLayer(spec, self.padding)
                if spec.is_full
                else WindowLayer(spec, self.padding, self.config, self._inv_freq)
            )
            self.layers.append(CacheLayer(self, state))

    def _window_layers(self) -> list[WindowLayer]:
        return [layer.state for layer in self.layers if isinstance(layer.state, WindowLayer)]

    def _begin(self, state: FullLayer, query: Tensor, mask: Tensor | None, scale: float) -> ForwardStep:
        """Classify this pass; the first layer to arrive also prepares all of them."""
        batch_size, num_new = query.shape[0], query.shape[2]
        before = state.num_seen
        is_prompt = self.prompt_end is not None and before < self.prompt_end
        is_decode = num_new == 1 and before > 0 and not is_prompt
        if before == self.padding.num_columns:
            self._scale = scale
            states = [layer.state for layer in self.layers]
            begin_forward(states, self.padding, batch_size, num_new, mask, scale, is_decode)
        ends = is_prompt and self.prompt_end is not None and before + num_new >= self.prompt_end
        return ForwardStep(is_decode=is_decode, is_prompt_end=ends, backend=self.backend)
