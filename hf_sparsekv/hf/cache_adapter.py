"""SparseKVCache: the sparse cache as transformers' `Cache`, for `model(...)` and `model.generate(...)`."""

import copy
import operator
import warnings
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_sparsekv.attention.forward import begin_forward
from hf_sparsekv.attention.prompt import finish_prompt
from hf_sparsekv.cache.layer import FullLayer, WindowLayer
from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import CacheError, ConfigError, InputError
from hf_sparsekv.hf.cache_layer import CacheLayer, ForwardStep
from hf_sparsekv.hf.dense import DEFAULT
from hf_sparsekv.hf.models import model_shape, rope_inv_freq, text_config
from hf_sparsekv.hf.register import ATTENTION_NAME, is_registered
from hf_sparsekv.hf.report import build_report
from hf_sparsekv.ops.prefill_choice import check_known, named
from hf_sparsekv.plan import LayerPlan, ModelShape
from hf_sparsekv.scorers.base import ALL_HEADS, HeadShard


class SparseKVCache(Cache):
    """A cache whose full layers keep every token and whose window layers keep a budget.

    Pass it to `generate` or to the model, under the name that transformers uses for caches; the model must use
    attn_implementation="sparsekv" (see `hf_sparsekv.register`). All state lives in this object: the tokens of the next
    call follow those of the last, so a new request needs a new cache, or `reset()` and `expect_prompt` again.

    A window layer selects when the first token after a prompt is decoded, since the chunks of a chunked prefill do
    not say which is the last. With `prompt_length` it selects as soon as it has seen that many tokens, layer by layer,
    so that no two window layers hold the whole prompt at once. A prompt that turns out shorter ends, with a warning, at
    the first single token after a longer pass; one fed token by token cannot be told from the announced one.
    """

    layers: list[CacheLayer]  # type: ignore[assignment]  # narrower than the base class, which never adds to it

    def __init__(
        self,
        model_config: PreTrainedConfig,
        config: SparseKVConfig | None = None,
        *,
        backend: str | None = None,
        prompt_length: int | None = None,
    ) -> None:
        """An empty cache for one model.

        Args:
            model_config: `model.config`.
            config: the method's options; defaults if None.
            backend: what reads prompts, by its name in `hf-sparsekv doctor`; None = what HF_SPARSEKV_ATTENTION names,
                or transformers' sdpa while every token is at hand and the first backend that can after that.
            prompt_length: tokens of the coming prompt, padding included, if known.
        Raises:
            ModelError: the model has a feature that a sparse cache does not support.
            ConfigError: the options do not fit the model, or the backend is unknown.
        """
        self.config = SparseKVConfig() if config is None else config
        if not isinstance(self.config, SparseKVConfig):
            raise ConfigError(f"config must be a SparseKVConfig, got {type(config).__name__}")
        self.named_backend = named() if backend is None else check_known(backend)
        self.backend = self.named_backend or DEFAULT
        self.model_config = text_config(model_config)
        self._live_config: PreTrainedConfig | None = None
        """What the model's attention modules read, known from the first forward pass on."""
        self.shape, self._heads = model_shape(model_config), ALL_HEADS
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
        if not is_registered():
            raise CacheError(
                f"attention {ATTENTION_NAME!r}, which a SparseKVCache needs, is not registered (any more): call "
                f"hf_sparsekv.register() and model.set_attn_implementation({ATTENTION_NAME!r})"
            )
        if layer_idx >= len(self.layers):
            raise CacheError(f"the cache has {len(self.layers)} layers, the model asks for layer {layer_idx}")
        if self._live_config is not None and self._live_config._attn_implementation != ATTENTION_NAME:
            raise self._wrong_attention()
        if layer_idx or len(self.layers) == 1:  # whatever model the cache meets; nothing is stored yet
            self.layers[layer_idx - 1].require_attention()
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def reset(self) -> None:
        """Forget everything, the announced prompt length included."""
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make request i what request beam_idx[i] was: keys, values, positions, scores and counters together.

        Raises:
            InputError: no indices of requests; their range is not looked at on a GPU.
            CacheError: the cache is empty.
        """
        self._check_rows("beam_idx", beam_idx)
        for layer in self.layers:
            layer.state.select_rows(beam_idx)
        self.padding.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every request `repeats` times in a row.

        Raises:
            InputError: not a positive int.
            CacheError: the cache is empty.
        """
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise InputError(f"repeats must be a positive int: got {repeats!r}")
        self.reorder_cache(torch.arange(len(self.padding.tokens)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the requests `indices`.

        Raises:
            InputError: no indices of requests.
            CacheError: the cache is empty.
        """
        self.reorder_cache(indices.cpu() if isinstance(indices, Tensor) else indices)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Refuse: see `CacheLayer.offload`."""
        self.layers[0].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Refuse: see `CacheLayer.offload`."""
        self.layers[0].offload()

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget tokens: a sparse cache cannot go back.

        Args:
            tokens_to_remove: negative = columns to drop, 0 = none; positive (the older meaning) = columns to keep.
        Raises:
            CacheError: unless nothing would be dropped.
            InputError: not an int.
        """
        try:
            tokens_to_remove = operator.index(tokens_to_remove)
        except TypeError:
            raise InputError(f"crop takes a number of tokens, an int: got {tokens_to_remove!r}") from None
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

        Raises:
            ConfigError: not a positive int.
        """
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 1:
            raise ConfigError(f"prompt_length must be a positive int: got {num_tokens!r}")
        self.prompt_end = self.padding.num_columns + num_tokens
        self._prompt_start = self.padding.num_columns
        self._longest_pass = 0

    def compress(self) -> None:
        """End the current prompt or turn now: every window layer selects and frees the rest."""
        self.prompt_end = None
        for state in self._window_layers():
            stored = state.stored_keys
            if stored is not None:
                with torch.autocast(stored.device.type, enabled=False):  # scores are fp32
                    finish_prompt(state, self._scale)

    def report(self, *, positions: bool = False) -> dict[str, Any]:
        """What the cache holds, measured; JSON-able.

        Of a window layer, `budget` is what the configuration says and `budget_tokens` what it came to for each request
        at its last selection (nothing before the first). `config` holds the options as given, for
        `SparseKVConfig.from_dict`; `in_force` what they came to, the scorer's own settings filled in.

        Args:
            positions: also list the stored positions per layer, request and KV head.
        """
        return build_report(self, positions=positions)

    def __repr__(self) -> str:
        tokens = self.padding.tokens
        seen = f"{tokens[0]}" if len(set(tokens)) == 1 else f"{min(tokens)} to {max(tokens)}" if tokens else "no"
        return (
            f"SparseKVCache({self.plan.num_full_layers} full + {len(self._window_layers())} window layers, "
            f"budget={self.config.budget}, scorer={self.config.scorer_object.name!r}, {len(tokens)} requests, "
            f"{seen} tokens seen, {self.nbytes:,} bytes)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparseKVCache":
        """A cache with the same contents, of its own; the model's configuration stays the model's."""
        for config in (self.model_config, self._live_config):
            memo[id(config)] = config
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        copied._take_layers()
        return copied

    def __copy__(self) -> "SparseKVCache":
        """A deep copy: two caches cannot share what decoding changes."""
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickles: what the model's configuration says now is of no use to another process."""
        return {**vars(self), "_live_config": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From a pickle."""
        vars(self).update(state)
        self._take_layers()

    def _take_layers(self) -> None:
        for layer in self.layers:
            layer.belong_to(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the cache holds: keys, values, scores, positions, tables."""
        padding = self.padding.is_token
        return sum(layer.state.nbytes for layer in self.layers) + (0 if padding is None else padding.nbytes)

    def _clear(self) -> None:
        self.padding = Padding()
        self.prompt_end = None
        self._prompt_start = self._longest_pass = 0
        self._scale = self.shape.head_dim**-0.5
        self.layers = []
        for spec in self.plan.layers:
            state = (
                FullLayer(spec, self.padding)
                if spec.is_full
                else WindowLayer(spec, self.padding, self.config, self._inv_freq)
            )
            self.layers.append(CacheLayer(self, state))
        self.take_shard(self.shape, self._heads)

    def take_shard(self, shape: ModelShape, heads: HeadShard) -> None:
        """Hold the KV heads of one of several ranks that share the model."""
        self.shape, self._heads, self.plan = shape, heads, replace(self.plan, shape=shape)
        for state in self._window_layers():
            state.heads = heads

    def _wrong_attention(self) -> CacheError:
        config = self.model_config if self._live_config is None else self._live_config
        name = config._attn_implementation
        return CacheError(
            f"a SparseKVCache needs attn_implementation={ATTENTION_NAME!r}, the model uses "
            f"{'another' if name == ATTENTION_NAME else repr(name)}: call hf_sparsekv.register() and "
            f"model.set_attn_implementation({ATTENTION_NAME!r})"
        )

    def _check_rows(self, name: str, rows: Tensor) -> None:
        count = len(self.padding.tokens)
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int64, torch.int32):
            got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
            raise InputError(f"{name} must be an int64 tensor [requests], the index of each request to take: got {got}")
        if count == 0:
            raise CacheError("the cache is empty: it has no requests to repeat, select or reorder yet")
        if rows.numel() == 0:
            raise InputError(f"{name} is empty: name at least one request, or call reset()")
        if rows.device.type == "cpu" and not (int(rows.min()) >= 0 and int(rows.max()) < count):
            raise InputError(f"{name} must lie in [0, {count}), the cache's requests: got {rows.tolist()}")

    def _window_layers(self) -> list[WindowLayer]:
        return [layer.state for layer in self.layers if isinstance(layer.state, WindowLayer)]

    def _begin(
        self, state: FullLayer, query: Tensor, mask: Tensor | None, scale: float, config: PreTrainedConfig | None
    ) -> ForwardStep:
        """Classify this pass; the first layer also prepares all others."""
        batch_size, num_new = query.shape[0], query.shape[2]
        before = state.num_seen
        is_first = state is self.layers[0].state
        if is_first:
            self._end_short_prompt(num_new)
        is_prompt = self.prompt_end is not None and before < self.prompt_end
        is_decode = num_new == 1 and before > 0 and not is_prompt
        if is_first:
            self._scale, self._live_config = scale, config
            states = [layer.state for layer in self.layers]
            begin_forward(states, self.padding, batch_size, num_new, mask, scale, is_decode)
        ends = is_prompt and self.prompt_end is not None and before + num_new >= self.prompt_end
        return ForwardStep(is_decode=is_decode, is_prompt_end=ends)

    def _end_short_prompt(self, num_new: int) -> None:
        """End an announced prompt that is evidently over before its number is reached.

        The chunks of a prefill are of equal length but for the last, so a single token after a longer pass that is not
        the announced last one is a generated one.
        """
        seen = self.padding.num_columns
        if self.prompt_end is None or seen >= self.prompt_end:
            return
        if num_new == 1 and self._longest_pass > 1 and seen + 1 < self.prompt_end:
            warnings.warn(
                f"prompt_length={self.prompt_end - self._prompt_start} was announced, but the prompt ended after "
                f"{seen - self._prompt_start} tokens: announce what is passed, padding included",
                stacklevel=2,
            )
            self.prompt_end = None
        self._longest_pass = max(self._longest_pass, num_new)
