"""The process group of one replica, and accelerate's mesh over it.

Replicas have groups of their own and never wait for one another: one that dies takes none with it.
"""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from hf_sparsekv.errors import ConfigError
from hf_sparsekv.parallel.place import Place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

START_TIMEOUT = timedelta(minutes=10)
"""For all processes to come, and for each collective of the model."""
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def join_replica(place: Place, device_type: str, *, replicas_per_gpu: int = 1) -> "DeviceMesh | None":
    """Join the group of this process's replica; the mesh of its tensor-parallel ranks, None where there is only one.

    On a GPU the process's own becomes the current device.

    Args:
        place: of this process.
        device_type: "cpu" (gloo) or "cuda" (NCCL).
        replicas_per_gpu: processes that may share a GPU; no two of one replica do, which NCCL would refuse.
    Raises:
        ConfigError: fewer GPUs than processes on this machine, or a group that is there has another size.
    """
    if device_type == "cuda":
        torch.cuda.set_device(place.gpu(torch.cuda.device_count(), replicas_per_gpu))
    if place.tp_size == 1:
        return None
    from accelerate import ParallelismConfig  # takes seconds, and a single process needs none of it

    if not dist.is_initialized():
        _init(place, device_type)
    if dist.get_world_size() != place.tp_size:
        raise ConfigError(
            f"torch.distributed has a group of {dist.get_world_size()} processes already, but tp={place.tp_size}: "
            "leave init_process_group out"
        )
    sizes = ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, cp_size=1, tp_size=place.tp_size)
    mesh: DeviceMesh = sizes.get_device_mesh(device_type)
    return mesh


def leave_replica() -> None:
    """End the group, if there is one. Close engines first: CUDA graphs hold the communicator."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _init(place: Place, device_type: str) -> None:
    # Graphs and plain launches take turns on one stream, so NCCL need not order them among each other.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    store, _, _ = next(iter(rendezvous("env://", place.rank, place.world_size, timeout=START_TIMEOUT)))
    dist.init_process_group(
        _BACKENDS[device_type],
        store=distributed_c10d.PrefixStore(f"replica-{place.replica}", store),
        rank=place.tp_rank,
        world_size=place.tp_size,
        timeout=START_TIMEOUT,
        device_id=torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else None,
    )
