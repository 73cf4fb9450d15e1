"""Models that transformers spreads over several devices, KV head by KV head: loading one, and what it says of itself.

Parameters are DTensors, activations plain tensors, and the configuration goes on to describe the whole model: how many
heads a rank has is read from its tensors.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_sparsekv.errors import ConfigError, ModelError
from hf_sparsekv.hf.compat import DISTRIBUTED_TAKES_MESH
from hf_sparsekv.hf.models import model_shape
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.scorers.base import HeadShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_tp_size(config: PreTrainedConfig, tp_size: int) -> None:
    """Refuse to spread a model over more ranks than its KV heads allow; each must have as many.

    Raises:
        ConfigError: which sizes fit.
        ModelError: a feature that a sparse cache does not support.
    """
    shape = model_shape(config)
    if shape.num_kv_heads % tp_size:
        fitting = [n for n in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % n == 0]
        raise ConfigError(
            f"tp={tp_size} does not divide the model's {shape.num_kv_heads} KV heads: choose tp="
            f"{' or '.join(map(str, fitting))}"
        )


def tp_mesh(model: object) -> "DeviceMesh | None":
    """The one-dimensional mesh of the ranks that share a model's heads; None for a whole model.

    It is one-dimensional and without a name on transformers 5.17, has the name "tp" on 5.18, and is one of several
    dimensions from 5.19 on.
    """
    mesh: DeviceMesh | None = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    if mesh.mesh_dim_names and "tp" in mesh.mesh_dim_names and mesh.ndim > 1:
        mesh = mesh["tp"]
    return mesh if mesh.ndim == 1 and mesh.size() > 1 and isinstance(model, nn.Module) and _is_split(model) else None


def load_sharded(path_or_id: str, mesh: "DeviceMesh", **options: Any) -> PreTrainedModel:
    """A causal language model with each rank of `mesh` holding its part; every rank must call this.

    Args:
        path_or_id: a folder or a Hugging Face id.
        mesh: one-dimensional, of all processes of the default group. Only transformers 5.17 takes it; later versions
            make their own over the same processes.
        options: what `from_pretrained` takes (dtype, ...), without device_map.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    sizes: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=mesh.size())}
    if DISTRIBUTED_TAKES_MESH and mesh.device_type != "cpu":  # it would call the CPU of rank n "cpu:n"
        sizes["device_mesh"] = mesh
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path_or_id, **sizes, **options)
    model.eval()
    return model


def shard_meta_model(model: PreTrainedModel, mesh: "DeviceMesh") -> PreTrainedModel:
    """Spread a model without weights, as loading does before it reads any; its parameters become DTensors.

    Args:
        model: on the meta device.
        mesh: as for `load_sharded`.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    own: dict[str, Any] = {"device_mesh": mesh} if DISTRIBUTED_TAKES_MESH else {}
    sizes, _, where = model.prepare_distribute_model(DistributedConfig(tp_size=mesh.size()), **own)
    model.config.distributed_config = sizes
    sharded: PreTrainedModel = type(model).maybe_distribute_model(model, sizes, where)
    return sharded


def shard_of_call(module: nn.Module, query: Tensor, key: Tensor, shape: ModelShape) -> tuple[ModelShape, HeadShard]:
    """This rank's shape and heads, from the tensors of an attention call that has fewer heads than `shape`.

    Args:
        module: the attention module.
        query, key: [B, heads, T, D].
        shape: of the whole model.
    Raises:
        ModelError: the module is not spread over ranks, or not evenly.
    """
    meshes = (getattr(p, "device_mesh", None) for p in module.parameters())  # a DTensor's
    mesh: DeviceMesh | None = next((m for m in meshes if m is not None), None)
    size = 1 if mesh is None else mesh.size()
    if mesh is None or key.shape[1] * size != shape.num_kv_heads or query.shape[1] * size != shape.num_heads:
        raise ModelError(
            f"{type(module).__name__} attends with {key.shape[1]} key heads, but its configuration has "
            f"{shape.num_kv_heads}: the cache is another model's, or keys are repeated or dropped before the attention "
            "function, which a sparse cache does not support"
        )
    return shape.split(size), HeadShard(mesh.get_local_rank() * key.shape[1], shape.num_kv_heads)


def _is_split(model: nn.Module) -> bool:
    return any(getattr(p, "device_mesh", None) is not None for p in model.parameters())
