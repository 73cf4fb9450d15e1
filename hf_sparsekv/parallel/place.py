"""Place: which of the launched processes this one is, and what is its part."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from hf_sparsekv.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What torchrun and `accelerate launch` set."""
_LOCAL_SIZE = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process among `world_size`: neighbouring ranks are the `tp_size` ranks of one replica of the model."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the processes of this machine."""
    local_world_size: int = 1
    """Processes of this machine."""
    tp_size: int = 1

    def __post_init__(self) -> None:
        """The replicas must be whole.

        Raises:
            ConfigError: `tp_size` does not divide the number of processes.
        """
        if self.tp_size < 1:
            raise ConfigError(f"tp must be at least 1: got {self.tp_size}")
        if self.world_size % self.tp_size:
            fitting = [str(n) for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            raise ConfigError(
                f"tp={self.tp_size} does not divide {self.world_size} process{'es' * (self.world_size > 1)}: start a "
                f"multiple of {self.tp_size} (torchrun --nproc-per-node), or choose tp={' or '.join(fitting)}"
            )

    @classmethod
    def of_environment(cls, tp_size: int = 1, environment: Mapping[str, str] | None = None) -> Self:
        """The place that a launcher gave this process; alone without one.

        Raises:
            ConfigError: `tp_size` does not fit the number of processes, or a variable holds no number.
        """
        given = os.environ if environment is None else environment
        if any(name not in given for name in _VARIABLES[:2]):
            return cls(tp_size=tp_size)
        try:
            rank, world_size, local_rank = (int(given.get(name, given["RANK"])) for name in _VARIABLES)
            local_world_size = int(given.get(_LOCAL_SIZE, local_rank + 1))
        except ValueError as error:
            raise ConfigError(f"{', '.join(_VARIABLES)} must be numbers, as torchrun sets them: {error}") from error
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            tp_size=tp_size,
        )

    def gpu(self, num_gpus: int, replicas_per_gpu: int = 1) -> int:
        """The number of this process's GPU; equal on all machines for equal local ranks.

        Args:
            num_gpus: of this machine.
            replicas_per_gpu: processes that may share one; those of one replica of the model never do.
        Raises:
            ConfigError: more processes than that on this machine.
        """
        if self.tp_size > num_gpus:
            raise ConfigError(f"tp={self.tp_size}, but this machine has {num_gpus} GPU{'s' * (num_gpus != 1)}")
        if self.local_world_size > num_gpus * replicas_per_gpu:
            raise ConfigError(
                f"{self.local_world_size} processes on a machine with {num_gpus} GPU{'s' * (num_gpus != 1)}, of which "
                f"each takes {replicas_per_gpu}: start fewer processes, or let more replicas of a small model share "
                f"a GPU with --replicas-per-gpu {-(-self.local_world_size // num_gpus)}"
            )
        return self.local_rank % num_gpus

    @property
    def replica(self) -> int:
        """Which replica this process belongs to."""
        return self.rank // self.tp_size

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.world_size // self.tp_size

    @property
    def tp_rank(self) -> int:
        """Its number within the replica; 0 leads."""
        return self.rank % self.tp_size
