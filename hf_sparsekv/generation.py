"""`generate`: the whole job in one call: set the attention, build the cache, generate, report, put everything back."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import ConfigError, InputError, ModelError
from hf_sparsekv.hf.cache_adapter import SparseKVCache
from hf_sparsekv.hf.compat import CACHE_KEYWORD
from hf_sparsekv.hf.models import text_config
from hf_sparsekv.hf.switch import sparse_attention

_NEEDS_CROP = ("assistant_model", "prompt_lookup_num_tokens")
_CACHE_ARGUMENTS = ("past_key_values", "cache", "cache_implementation", "use_cache")


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns."""

    sequences: Tensor
    """int64 [B, prompt + new tokens], as `model.generate` returns them; prompts are padded on the left."""
    new_tokens: Tensor
    """int64 [B, new tokens]: `sequences` without the prompt."""
    text: list[str] | None
    """The new tokens as text, special tokens left out; None without a tokenizer."""
    report: dict[str, Any]
    """`SparseKVCache.report()` at the end."""
    seconds: float
    """Wall time of the whole generation, prefill included."""
    cache: SparseKVCache
    """The cache, for a next turn."""

    def __repr__(self) -> str:
        batch, count = self.new_tokens.shape
        first = f", text[0]={shorten(self.text[0], 60)!r}" if self.text else ""
        return f"GenerateOutput({batch} x {count} new tokens in {self.seconds:.2f} s{first}, cache={self.cache!r})"


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Tensor] | str | list[str],
    config: SparseKVConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    cache: SparseKVCache | None = None,
    **options: Any,
) -> GenerateOutput:
    """Generate with a sparse cache; the model is left as it was found.

    Args:
        model: a causal language model of transformers, with any attention implementation.
        inputs: token ids int64 [B, T], a mapping with `input_ids` and perhaps `attention_mask` (what a tokenizer
            returns), or text, which needs `tokenizer`. What is padded on the right is padded on the left instead:
            `model.generate` would write the new tokens behind the padding.
        config: the method's options; defaults if None.
        tokenizer: turns text into ids and the result into text.
        cache: the cache of an earlier turn, in place of `config`; `inputs` then hold the whole conversation.
        options: what `model.generate` takes (max_new_tokens, do_sample, num_beams, streamer, ...).
    Raises:
        InputError: no prompt, or one too long for the model.
        ConfigError: options that contradict a sparse cache.
        ModelError: not a model, or the model has a feature that a sparse cache does not support.
    """
    if not (isinstance(model, nn.Module) and hasattr(model, "generate")):
        raise ModelError(
            f"model must be a causal language model of transformers, got {_named(model)}: load it first, "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    for name in _NEEDS_CROP:
        if options.get(name) is not None:
            raise ConfigError(f"{name} needs a cache that can go back; a sparse cache cannot: leave it out")
    for name in _CACHE_ARGUMENTS:
        if options.get(name) is not None:
            raise ConfigError(f"{name} is set by this function: give config= or cache= instead")
    if cache is not None and config is not None:
        raise ConfigError("give config= for a new cache or cache= to go on with one, not both")
    batch = _model_inputs(model, inputs, tokenizer)
    prompt_length = batch["input_ids"].shape[1]
    _check_length(model, prompt_length, options)
    if cache is None:
        cache = SparseKVCache(model.config, config)
    if prompt_length <= cache.get_seq_length():
        raise InputError(
            f"the cache has seen {cache.get_seq_length()} tokens, the inputs have {prompt_length}: pass the whole "
            "conversation, the new turn at its end"
        )
    batch = _padded_on_the_left(batch, int(cache.get_seq_length()))
    cache.expect_prompt(prompt_length - int(cache.get_seq_length()))
    start = time.perf_counter()
    with sparse_attention(model), torch.no_grad():
        result = model.generate(  # type: ignore[operator]
            **batch, **{CACHE_KEYWORD: cache}, **options
        )
    seconds = time.perf_counter() - start
    sequences: Tensor = result if isinstance(result, Tensor) else result.sequences
    new_tokens = sequences[:, prompt_length:]
    text = None if tokenizer is None else tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    return GenerateOutput(sequences, new_tokens, text, cache.report(), seconds, cache)


def _model_inputs(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Tensor] | str | list[str],
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Tensor]:
    if isinstance(inputs, str) or (isinstance(inputs, list) and all(isinstance(i, str) for i in inputs)):
        if tokenizer is None:
            raise InputError("text needs a tokenizer: pass tokenizer=, or token ids")
        texts = [inputs] if isinstance(inputs, str) else inputs
        if not texts or any(not text.strip() for text in texts):
            raise InputError("the prompt is empty: give at least one token")
        inputs = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, padding_side="left")
    if not isinstance(inputs, (Tensor, Mapping)):
        raise InputError(f"inputs must be token ids, a mapping with input_ids, or text: got {type(inputs).__name__}")
    batch = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        got = f"shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"input_ids must be a tensor [batch, tokens], got {got}")
    if ids.numel() == 0:
        raise InputError(f"the prompt is empty: input_ids has shape {list(ids.shape)}")
    vocab = text_config(model.config).vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise InputError(f"token ids must be in [0, {vocab}): got {int(ids.min())} to {int(ids.max())}")
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != ids.shape:
        raise InputError(f"attention_mask {list(mask.shape)} must have the shape of input_ids {list(ids.shape)}")
    if mask is not None and bool((mask.sum(dim=-1) == 0).any()):
        raise InputError(f"request {int((mask.sum(dim=-1) == 0).nonzero()[0])} of the batch has no token at all")
    return {name: value.to(model.device) for name, value in batch.items() if isinstance(value, Tensor)}


def _padded_on_the_left(batch: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    """Move padding among the columns from `start` on before the tokens; their order stays.

    Args:
        batch: `input_ids`, and tensors of its shape that move along.
        start: columns that a cache has seen, which stay where they are.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is None or mask.shape != ids.shape or bool((mask[:, -1] != 0).all()):
        return batch
    order = (mask[:, start:] != 0).byte().argsort(dim=-1, stable=True) + start
    seen = torch.arange(start, device=ids.device).expand(len(ids), -1)
    order = torch.cat([seen, order], dim=1)
    return {name: t.gather(1, order) if t.shape == ids.shape else t for name, t in batch.items()}


def _named(value: object) -> str:
    """What was given, short."""
    return f"{type(value).__name__} {shorten(repr(value), 60)}"


def _check_length(model: PreTrainedModel, prompt_length: int, options: Mapping[str, Any]) -> None:
    limit = getattr(text_config(model.config), "max_position_embeddings", None)
    if limit is None:
        return
    new_tokens = options.get("max_new_tokens") or 1
    if prompt_length + new_tokens > limit:
        raise InputError(
            f"the prompt has {prompt_length} tokens and {new_tokens} are to be generated, but the model takes "
            f"{limit} in all: shorten the prompt or lower max_new_tokens"
        )
