"""Compile a model's decoder layers one by one: one compilation serves all of them and every batch size."""

from torch import nn
from transformers import PreTrainedModel

from hf_sparsekv.errors import ModelError


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
