"""Place: which of the launched processes this one is, and what is its part."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from hf_sparsekv.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What torchrun and `accelerate launch` set."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process among `world_size`: neighbouring ranks are the `tp_size` ranks of one replica of the model."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the processes of this machine: the number of its GPU."""
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
        except ValueError as error:
            raise ConfigError(f"{', '.join(_VARIABLES)} must be numbers, as torchrun sets them: {error}") from error
        return cls(rank=rank, world_size=world_size, local_rank=local_rank, tp_size=tp_size)

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
