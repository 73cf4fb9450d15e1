"""One process of several that a command was launched in: its part of the model, and what it does with it."""

from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_sparsekv.cli.loading import UNLOADABLE, ModelSource, load_weights, pick_device, pick_dtype
from hf_sparsekv.cli.progress import status
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.sharded import FollowingEngine
from hf_sparsekv.errors import ConfigError, InputError
from hf_sparsekv.hf.sharding import check_tp_size, load_sharded
from hf_sparsekv.parallel.group import join_replica
from hf_sparsekv.parallel.place import Place
from hf_sparsekv.parallel.ranks import losing_others


def load_replica(
    place: Place, source: ModelSource, *, dtype: str, device: str, replicas_per_gpu: int = 1, console: Console
) -> PreTrainedModel:
    """This process's model: whole, or its part of the one that the ranks of its replica share.

    Raises:
        ConfigError: the ranks do not fit the model or the machine, an unknown dtype or a device that is not there.
        InputError: no safetensors, or files that cannot be read.
    """
    where = pick_device(device).split(":")[0]
    if replicas_per_gpu > 1 and where == "cpu":
        raise ConfigError(f"--replicas-per-gpu {replicas_per_gpu} has no effect on a CPU: leave it out")
    if place.world_size == 1 and place.tp_size == 1:
        return load_weights(source, dtype=dtype, device=device, console=console)
    check_tp_size(source.config, place.tp_size)
    mesh = join_replica(place, where, replicas_per_gpu=replicas_per_gpu)
    if mesh is None:
        return load_weights(source, dtype=dtype, device=where, console=console)
    transformers_logging.disable_progress_bar()  # each rank would draw one
    with status(console, f"loading the weights on {place.tp_size} ranks ({where})"):
        try:
            return load_sharded(
                source.path_or_id,
                mesh,
                dtype=pick_dtype(dtype, where),
                use_safetensors=True,
                trust_remote_code=source.trust_remote_code,
                local_files_only=source.is_offline,
            )
        except UNLOADABLE as error:
            raise InputError(f"cannot load {source.path_or_id}: {error}") from error


def follow(network: PreTrainedModel, method: SparseKVConfig, options: EngineConfig) -> None:
    """Do what rank 0 of the replica does, until it is done.

    Raises:
        ReplicaLostError: another rank has ended before.
    """
    with losing_others(), Engine(network, method, options) as engine:
        assert isinstance(engine, FollowingEngine)
        engine.follow()
