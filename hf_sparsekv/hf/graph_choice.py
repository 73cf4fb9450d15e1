"""Whether decode steps of `generate` run as CUDA graphs, and if not, why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.hf.models import text_config
from hf_sparsekv.hf.sharding import tp_mesh
from hf_sparsekv.ops.kernels import decode_obstacle
from hf_sparsekv.plan import LayerPlan

MIN_NEW_TOKENS = 32
"""A capture costs about what two or three launched steps do, and the warm-up before it one."""

OTHER_LOOPS = ("custom_generate", "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "synced_gpus")
"""Options that give the loop to somebody else."""
PER_LAYER = ("output_attentions", "output_hidden_states")
_KNOWN_INPUTS = ("input_ids", "attention_mask", "position_ids")
_MOVING_ROPE = ("dynamic", "longrope")
"""RoPE variants whose factors go by the longest position so far."""


@dataclass(frozen=True)
class GraphWish:
    """What a caller wants of decode steps."""

    cuda_graphs: bool | None = None
    """Replay them as CUDA graphs; None = where there is neither obstacle nor doubt."""
    compile: bool = False
    """Capture compiled layers; asks for graphs."""

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            ConfigError: a value that is none, or a contradiction.
        """
        if self.cuda_graphs is not None and not isinstance(self.cuda_graphs, bool):  # 0 would not be False below
            raise ConfigError(f"cuda_graphs must be True, False or None: got {shown(self.cuda_graphs)}")
        if not isinstance(self.compile, bool):
            raise ConfigError(f"compile must be True or False: got {shown(self.compile)}")
        if self.compile and self.cuda_graphs is False:
            raise ConfigError("compile=True compiles what CUDA graphs hold, and cuda_graphs=False leaves them out")

    @property
    def asks(self) -> str | None:
        """The option that asks for graphs, if one does."""
        return "compile=True" if self.compile else "cuda_graphs=True" if self.cuda_graphs else None

    def why_not(self, obstacle: str | None, doubt: str | None) -> str | None:
        """The reason why decode steps are launched one kernel at a time; None if CUDA graphs run them.

        Args:
            obstacle: why there cannot be graphs.
            doubt: why they are left out unless somebody asks.
        Raises:
            ConfigError: they are asked for where there is an obstacle.
        """
        if self.cuda_graphs is False:
            return "cuda_graphs=False"
        if self.asks is None:
            return doubt if obstacle is None else obstacle
        if obstacle is not None:
            raise ConfigError(f"{self.asks}, but {obstacle}: leave it out")
        return None


def graph_obstacle(model: PreTrainedModel, batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> str | None:
    """Why decode steps cannot be replayed; None if they can, as far as can be told without trying.

    Args:
        model: the model.
        batch: what the model gets with the prompt, by name.
        options: in force for the generation, from wherever they were given.
    """
    return next(_obstacles(model, batch, options), None)


def graph_doubt(plan: LayerPlan, config: PreTrainedConfig, prompt_length: int, new_tokens: int) -> str | None:
    """Why graphs are left out unless asked for; None if they pay.

    Args:
        plan: what each layer keeps.
        config: of the model.
        prompt_length: tokens of the longest prompt, all earlier turns included.
        new_tokens: to be generated, at most.
    """
    if new_tokens < MIN_NEW_TOKENS:
        return f"{new_tokens} new tokens do not pay for a capture, {MIN_NEW_TOKENS} do"
    if _num_experts(text_config(config)) > 1:
        return "layers with experts may ask the device which ones they need"
    last = prompt_length + new_tokens - 1  # the last token is never fed back
    if all(_keeps_all(plan, index, prompt_length, last) for index in range(len(plan.layers))):
        return "no layer has to evict anything, and plain steps are then the dense cache's to the last bit"
    return None


def _keeps_all(plan: LayerPlan, index: int, prompt_length: int, last: int) -> bool:
    spec = plan.layers[index]
    if spec.is_full:
        return True
    kept = spec.kept_tokens(prompt_length)
    return kept >= (prompt_length if plan.grows else last)


def _obstacles(model: PreTrainedModel, batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> Iterator[str]:
    yield from _machine_obstacles(model)
    yield from _model_obstacles(model)
    if (options.get("num_beams") or 1) > 1:
        yield f"num_beams={options['num_beams']} reorders the cache after every token"
    for name in OTHER_LOOPS:
        if options.get(name):
            yield f"{name} has a loop of its own"
    for name in PER_LAYER:
        if options.get(name):
            yield f"{name} hands out what a replay writes over"
    others = [name for name in batch if name not in _KNOWN_INPUTS]
    others += [name for name, value in options.items() if isinstance(value, Tensor)]
    if others:
        yield f"{others[0]} is an input that changes outside of the graph"
    if torch.is_autocast_enabled("cuda"):
        yield "autocast is on, which casts the weights anew in every forward pass"


def _machine_obstacles(model: PreTrainedModel) -> Iterator[str]:
    if model.device.type != "cuda":
        yield f"the model is on {model.device}"
        return
    if tp_mesh(model) is not None:
        yield "several processes share the model"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        yield f"the model is on several devices, {', '.join(sorted(devices))}"


def _model_obstacles(model: PreTrainedModel) -> Iterator[str]:
    config = text_config(model.config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if (obstacle := decode_obstacle(model.dtype, head_dim, heads // kv_heads)) is not None:
        yield obstacle
    if moving := [kind for kind in _rope_types(config) if kind in _MOVING_ROPE]:
        yield f"rope_type {moving[0]!r} has factors that go by the longest position"
    if model.training:
        yield "the model is in training mode: call model.eval()"
    for name, module in model.named_modules():
        where = name or type(module).__name__
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            yield f"{where} has a forward hook, which a replay would not call"
        if module._compiled_call_impl is not None:
            yield f"{where} is compiled"


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """RoPE variants of a decoder, of all kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [kind for each in sets if isinstance(kind := each.get("rope_type"), str)]


def _num_experts(config: PreTrainedConfig) -> int:
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts"))
    return max((count for count in counts if isinstance(count, int)), default=0)
