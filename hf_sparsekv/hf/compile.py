"""Compile a model's decoder layers one by one: one compilation serves all of them and every batch size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_sparsekv.errors import ModelError
from hf_sparsekv.hf.paged import is_running


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal language model.

    Raises:
        ModelError: the model keeps them elsewhere.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"{type(model).__name__} has no list of decoder layers to compile or watch: in the engine set compile=False"
        )
    return layers


def compile_layers(model: PreTrainedModel) -> None:
    """Let every decoder layer compile at its next call; undone by `uncompile_layers`."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def uncompile_layers(model: PreTrainedModel) -> None:
    """Give the layers their plain forward back."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


@contextmanager
def compiled_steps(model: PreTrainedModel) -> Iterator[None]:
    """Inside, layers run compiled where the thread has a step running; other threads have them as they are.

    What was compiled stays with PyTorch, so that the next time takes no compilation.

    Raises:
        ModelError: the model keeps its decoder layers elsewhere.
    """
    layers = decoder_layers(model)
    compile_layers(model)
    for layer in layers:
        layer._compiled_call_impl = partial(_call_layer, layer, layer._compiled_call_impl)
    try:
        yield
    finally:
        uncompile_layers(model)


def _call_layer(layer: nn.Module, compiled: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    assert compiled is not None
    return compiled(*args, **kwargs) if is_running() else layer._call_impl(*args, **kwargs)
