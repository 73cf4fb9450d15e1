"""Tiny models with random weights: built from a configuration, never downloaded.

They are small enough for a test to run in milliseconds and keep what matters to a cache: several layers,
query heads that share KV heads, rotary positions. The same arguments give the same weights on every machine.
"""

from collections.abc import Callable
from typing import TypedDict, TypeVar, Unpack

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Model = TypeVar("Model", bound=PreTrainedModel)

MAX_POSITIONS = 4096
WEIGHT_STD = 0.2
"""Ten times the usual: attention then prefers some keys to others, and a wrong selection shows in the output."""
BOS_TOKEN_ID, EOS_TOKEN_ID = 1, 2


class TinyOptions(TypedDict, total=False):
    """What else a tiny model can be asked for; the defaults are those of `_built`."""

    head_dim: int
    """Size of a head, 16; the hidden size is `num_heads * head_dim`."""
    vocab_size: int
    """Token ids, 256; 1 and 2 are begin and end of sequence."""
    seed: int
    """Of the weights, 0; the global random state is left as it was."""
    dtype: torch.dtype
    """Of the weights, float32; drawn in fp32 and then cast, so that dtypes differ by rounding alone."""
    attn_implementation: str
    """Name registered with transformers, "sdpa"."""


def tiny_llama(
    num_layers: int = 4, num_heads: int = 8, num_kv_heads: int = 2, **options: Unpack[TinyOptions]
) -> LlamaForCausalLM:
    """A random Llama in evaluation mode, on the CPU.

    Args:
        num_layers: decoder layers.
        num_heads, num_kv_heads: query heads and KV heads; the former a multiple of the latter.
        options: see `TinyOptions`.
    """
    return _built(LlamaForCausalLM, LlamaConfig, num_layers, num_heads, num_kv_heads, **options)


def tiny_qwen2(
    num_layers: int = 4, num_heads: int = 8, num_kv_heads: int = 2, **options: Unpack[TinyOptions]
) -> Qwen2ForCausalLM:
    """A random Qwen2 (Llama with biases on q, k and v); arguments as `tiny_llama`."""
    return _built(Qwen2ForCausalLM, Qwen2Config, num_layers, num_heads, num_kv_heads, **options)


def tiny_qwen3(
    num_layers: int = 4, num_heads: int = 8, num_kv_heads: int = 2, **options: Unpack[TinyOptions]
) -> Qwen3ForCausalLM:
    """A random Qwen3 (queries and keys normalised per head before rotation); arguments as `tiny_llama`."""
    return _built(Qwen3ForCausalLM, Qwen3Config, num_layers, num_heads, num_kv_heads, **options)


def _built(
    kind: type[Model],
    config_kind: Callable[..., PretrainedConfig],
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    head_dim: int = 16,
    vocab_size: int = 256,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> Model:
    config = config_kind(
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=num_heads * head_dim,
        intermediate_size=2 * num_heads * head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=WEIGHT_STD,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
        tie_word_embeddings=False,
    )
    config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    # Biases start at zero: give them values, or a model with biases would be one without.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=WEIGHT_STD)
    model.to(dtype=dtype)  # type: ignore[call-arg]  # decorated without types
    model.eval()
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose 256 tokens are bytes, the space ending and padding."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="Ġ", pad_token="Ġ")
