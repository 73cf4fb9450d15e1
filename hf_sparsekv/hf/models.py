"""Model facts: what a sparse cache needs to know of an architecture, and which ones it refuses."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_sparsekv.errors import ModelError, shown
from hf_sparsekv.plan import ModelShape

ROTATE_HALF = frozenset(
    {"granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3"}
    | {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"}
)
"""Model types that rotate pairs (i, i + D/2) of a head forwards, see `ops.reference.rotation`."""
_STATIC_ROPE_TYPES = ("linear", "llama3", "yarn")
"""RoPE variants whose frequencies do not depend on the length."""
_MODALITIES = ("vision", "image", "video", "audio", "speech", "vq_", "protein")
"""What the names of sub-configurations contain where a model reads more than text."""


def check_model(model: object) -> None:
    """Refuse what is no causal language model of transformers; a wrapper that generates is one.

    Raises:
        ModelError: what it is, and how to load one.
    """
    if not (isinstance(model, nn.Module) and hasattr(model, "generate")):
        got = type(model).__name__ if isinstance(model, nn.Module) else f"{type(model).__name__} {shown(model)}"
        raise ModelError(
            f"model must be a causal language model of transformers, got {got}: load it first, "
            "AutoModelForCausalLM.from_pretrained(...)"
        )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that describes the decoder."""
    if not isinstance(config, PreTrainedConfig):
        raise ModelError(f"expected a model configuration (model.config), got {type(config).__name__}")
    return config.get_text_config(decoder=True)


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Layers, heads and head dimension of a decoder.

    Raises:
        ModelError: the configuration lacks one of them, or has a feature that a sparse cache does not support.
    """
    check_supported(config)
    text = text_config(config)
    numbers = {}
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        value = getattr(text, name, None)
        if not isinstance(value, int):
            raise ModelError(
                f"model type {text.model_type!r} has no {name} in its configuration: is it a Llama-family decoder?"
            )
        numbers[name] = value
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // numbers["num_attention_heads"]
    return ModelShape(
        num_layers=numbers["num_hidden_layers"],
        num_heads=numbers["num_attention_heads"],
        num_kv_heads=numbers["num_key_value_heads"],
        head_dim=head_dim,
    )


def check_packed(config: PreTrainedConfig, max_length: int) -> None:
    """Refuse what makes a request's keys depend on the others in one packed forward pass.

    Args:
        config: of the model.
        max_length: tokens of the longest request.
    Raises:
        ModelError: rotary factors that go by the longest position of the pass.
    """
    text = text_config(config)
    parameters = getattr(text, "rope_parameters", None) or {}
    short = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
    if parameters.get("rope_type") == "longrope" and max_length > short:
        raise ModelError(
            f"model type {config.model_type!r} has rope_type 'longrope', whose factors go by the longest request of a "
            f"batch: set EngineConfig(max_model_len={short}) or less, or use generate()"
        )


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse features that would give wrong text, or that nobody tried, by name.

    Raises:
        ModelError: several modalities, mrope, a sliding window, softcap, MLA, cross attention, or layers of a kind
            other than full softmax attention.
    """
    found = [name for name, is_there in _unsupported_features(config).items() if is_there]
    if found:
        raise ModelError(
            f"model type {config.model_type!r} uses {', '.join(found)}, which a sparse cache does not support: "
            "use it with its own dense cache"
        )


def rope_inv_freq(config: PreTrainedConfig, head_dim: int) -> Tensor | None:
    """fp32 [head_dim / 2] RoPE frequencies for scorers that undo the rotation; None where they cannot.

    That is where the frequencies change with length or cover part of the head only, where some layer does not rotate,
    and for model types that are not known to rotate pairs (i, i + head_dim / 2) forwards.
    """
    text = text_config(config)
    if text.model_type not in ROTATE_HALF or not all(getattr(text, "no_rope_layers", None) or [True]):
        return None
    parameters = getattr(text, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind == "default" and "rope_theta" in parameters:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        theta: float = parameters["rope_theta"]
        return 1.0 / theta**exponent
    if kind in _STATIC_ROPE_TYPES:
        inv_freq: Tensor = ROPE_INIT_FUNCTIONS[kind](text, torch.device("cpu"))[0]
        return inv_freq
    return None


def generation_stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The end-of-sequence tokens that a model's generation configuration names.

    Raises:
        ModelError: they are no token ids.
    """
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        return ()
    each = tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    for token in each:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelError(
                f"eos_token_id={ids!r} of the model's generation configuration is no token id: set it to an int, to a "
                "list of ints, or to None"
            )
    return each


def _unsupported_features(config: PreTrainedConfig) -> dict[str, bool]:
    text = text_config(config)
    layer_types = getattr(text, "layer_types", None) or []
    has_window = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    windows = {kind for kind in layer_types if "sliding" in kind or "chunked" in kind}
    others = sorted(set(layer_types) - windows - {"full_attention"})
    return {
        "several modalities": any(word in name for name in config.sub_configs for word in _MODALITIES),
        "rotary positions of several axes (mrope)": "mrope_section" in (getattr(text, "rope_parameters", None) or {}),
        "a sliding window": bool(windows) or (not layer_types and has_window),
        f"layers of other kinds ({', '.join(others)})": bool(others),
        "logit softcapping": getattr(text, "attn_logit_softcapping", None) is not None,
        "multi-head latent attention (MLA)": getattr(text, "kv_lora_rank", None) is not None,
        "cross attention": bool(getattr(text, "is_encoder_decoder", False))
        or bool(getattr(text, "add_cross_attention", False)),
    }
