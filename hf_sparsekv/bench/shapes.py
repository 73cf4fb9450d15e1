"""Models by shape: a configuration and random weights, made where they are used; nothing is read or downloaded."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from hf_sparsekv.errors import ConfigError

WEIGHT_STD = 0.02

_LLAMA3: Mapping[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 262144,  # twice the real one: prompts of 131072 tokens need room for output
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b-shape": {
        **_LLAMA3,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "llama3-70b-shape": {
        **_LLAMA3,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "llama3-1b-shape": {
        **_LLAMA3,
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "smollm2-135m-shape": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
"""LlamaConfig options by name."""


def shape_config(name: str) -> PreTrainedConfig:
    """The configuration behind a name.

    Raises:
        ConfigError: no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}: choose one of {', '.join(SHAPES)}")
    return LlamaConfig(**SHAPES[name])


def dummy_model(config: PreTrainedConfig, *, dtype: torch.dtype, device: str, seed: int = 0) -> PreTrainedModel:
    """A model in evaluation mode with random matrices of standard deviation `WEIGHT_STD`, norms of one, biases of zero.

    Made on the device in its final dtype, so that a GPU has it in well under a second and the host never holds it.

    Args:
        config: of a causal language model.
        dtype: of the weights.
        device: where they are made.
        seed: of the weights; the global random state is left as it was.
    """
    text = config.get_text_config(decoder=True)
    text.initializer_range = WEIGHT_STD
    cuda = [device] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return model
