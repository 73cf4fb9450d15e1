"""One layer of a `SparseKVCache`, as transformers sees it, and what a forward pass is to it."""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hf_sparsekv.cache.layer import FullLayer
from hf_sparsekv.errors import CacheError
from hf_sparsekv.hf.attention import LAYER_ATTRIBUTE, LAYER_KEYWORD

if TYPE_CHECKING:
    from hf_sparsekv.hf.cache_adapter import SparseKVCache


@dataclass(frozen=True)
class ForwardStep:
    """What one forward pass is to a layer."""

    is_decode: bool
    is_prompt_end: bool


class CacheLayer(CacheLayerMixin):
    """One layer of a `SparseKVCache`, as transformers sees it. What it holds is in `state`."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: "SparseKVCache", state: FullLayer) -> None:
        """Wrap a layer's storage."""
        super().__init__()
        self.state = state
        self.belong_to(cache)
        self.is_awaiting_attention = False

    @property
    def cache(self) -> "SparseKVCache":
        """The cache that the layer is part of.

        Raises:
            CacheError: nobody has it any more.
        """
        found = None if self._cache is None else self._cache()
        if found is None:
            raise CacheError("the SparseKVCache of this layer is gone: keep the cache, not only its layers")
        return found

    def belong_to(self, cache: "SparseKVCache") -> None:
        """Share a cache's history. The reference is weak, or a cache's memory would wait for the garbage collector."""
        self._cache: weakref.ref[SparseKVCache] | None = weakref.ref(cache)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the cache that is copied takes its layers again."""
        return {**vars(self), "_cache": None}

    def begin(self, query: Tensor, mask: Tensor | None, scale: float, config: PreTrainedConfig | None) -> ForwardStep:
        """Called by the attention function: says what this pass is, after the cache has prepared for it.

        Args:
            query, mask, scale: as the attention function got them.
            config: what the attention module reads, if it has one.
        """
        self.is_awaiting_attention = False
        return self.cache._begin(self.state, query, mask, scale, config)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage takes its shape from the first keys."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand this layer over to the attention function, which stores and attends in one go."""
        self.is_initialized = self.is_awaiting_attention = True
        call_kwargs = kwargs.get("kwargs")
        if call_kwargs is not None:
            call_kwargs[LAYER_KEYWORD] = self
            return key_states, value_states
        key_states = key_states.view_as(key_states)  # a view of our own to carry the layer
        setattr(key_states, LAYER_ATTRIBUTE, self)
        return key_states, value_states

    def require_attention(self) -> None:
        """Refuse to go on after an update that our attention function never got.

        Raises:
            CacheError: the model uses another one. Nothing was stored, so the cache is still good.
        """
        if not self.is_awaiting_attention:
            return
        self.is_awaiting_attention = False
        raise self.cache._wrong_attention()

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

    def offload(self) -> NoReturn:
        """A layer stays where the model's layer is."""
        raise CacheError("a sparse cache cannot be offloaded: it is small; use a smaller budget, or the dense cache")

    def prefetch(self) -> NoReturn:
        """There is nothing to fetch back, see `offload`."""
        self.offload()
