"""Random weights spread over the ranks of a replica: each makes its own part on its device, nobody holds the whole."""

from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_sparsekv.bench.shapes import WEIGHT_STD
from hf_sparsekv.hf.sharding import shard_meta_model


def sharded_dummy_model(
    config: PreTrainedConfig, mesh: DeviceMesh, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """This rank's part of a model in evaluation mode with random matrices, norms of one and biases of zero.

    Args:
        config: of a causal language model whose KV heads divide.
        mesh: one-dimensional, of the ranks.
        dtype: of the weights.
        device: this rank's.
        seed: of the weights. What every rank holds whole is the same on all; the rest is drawn part by part, so the
            model is another one than on a single device.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = shard_meta_model(model, mesh)
    made: dict[int, nn.Parameter] = {}
    generator = torch.Generator(device)
    for name, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:  # tied weights stay tied
                whole: Tensor = parameter
                is_split = isinstance(whole, DTensor) and whole.to_local().shape != whole.shape
                own = 1 + mesh.get_local_rank() if is_split else 0
                generator.manual_seed(crc32(f"{seed} {name}.{key} {own}".encode()))
                made[id(parameter)] = _materialised(parameter, device, generator)
            module._parameters[key] = made[id(parameter)]
        if "inv_freq" in module._buffers:  # rotary tables are computed, not drawn
            with device:
                model.set_submodule(name, type(module)(config))
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"nothing made {left}"
    model.eval()
    return model


def _materialised(parameter: nn.Parameter, device: torch.device, generator: torch.Generator) -> nn.Parameter:
    whole: Tensor = parameter
    local = torch.empty_like(whole.to_local() if isinstance(whole, DTensor) else whole, device=device)
    if whole.dim() > 1:
        local.normal_(std=WEIGHT_STD, generator=generator)
    else:
        local.fill_(1.0)
    if not isinstance(whole, DTensor):
        return nn.Parameter(local, requires_grad=False)
    value = DTensor.from_local(
        local, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride(), run_check=False
    )
    return nn.Parameter(value, requires_grad=False)
