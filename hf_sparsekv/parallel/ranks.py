"""Ranks: what the processes that share one model tell each other, beside what the model's own layers do.

Rank 0 leads: what it sampled and what it decided holds for all. `Ranks` itself is the form for a single process, where
there is nobody to tell.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_sparsekv.errors import ReplicaLostError, SparseKVError
from hf_sparsekv.hf.sharding import check_tp_size, tp_mesh
from hf_sparsekv.plan import ModelShape
from hf_sparsekv.scorers.base import ALL_HEADS, HeadShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_IDLE = timedelta(days=365)
"""How long a rank waits for rank 0 to have something to do."""
_PACKET = 2048
"""Bytes of a message that need a single broadcast."""
_LENGTH = 8
_GLOO = "gloo"
"""What the words of its errors have in common, which are plain RuntimeErrors."""


class Ranks:
    """One process with a whole model."""

    size = 1
    rank = 0

    @property
    def heads(self) -> HeadShard:
        """Which KV heads this rank has."""
        return ALL_HEADS

    def local_shape(self, shape: ModelShape) -> ModelShape:
        """This rank's part of a model."""
        return shape

    def same_tokens(self, ids: Tensor, is_bad: Tensor) -> tuple[Tensor, Tensor]:
        """What rank 0 sampled: token ids int64 [B] and bool [B]. On the device, without waiting for it."""
        return ids, is_bad

    def least(self, value: int) -> int:
        """The smallest of the ranks' numbers."""
        return value

    def total(self, value: int) -> int:
        """The sum of the ranks' numbers."""
        return value

    def union(self, values: Mapping[str, str]) -> dict[str, str]:
        """The entries of all ranks; of equal keys, the lowest rank's."""
        return dict(values)

    def share(self, message: Any = None) -> Any:
        """What rank 0 says; what the others pass is ignored."""
        return message


class TensorRanks(Ranks):
    """The ranks of one replica. Every method but `heads` and `local_shape` must be called by all of them, in order."""

    def __init__(self, mesh: "DeviceMesh", shape: ModelShape) -> None:
        """To be made by all ranks at the same time.

        Args:
            mesh: one-dimensional, of the ranks that share the model.
            shape: of the whole model; its KV heads divide.
        """
        self._group = mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self._shape = shape
        # Host messages go over the host: NCCL would make them wait for the device.
        members = dist.get_process_group_ranks(self._group)
        is_part = len(members) < dist.get_world_size()
        self._control = dist.new_group(members, _IDLE, "gloo", use_local_synchronization=is_part)

    @property
    def heads(self) -> HeadShard:
        """Which KV heads this rank has."""
        return HeadShard(self.rank * self._shape.num_kv_heads // self.size, self._shape.num_kv_heads)

    def local_shape(self, shape: ModelShape) -> ModelShape:
        """This rank's part of a model."""
        return shape.split(self.size)

    def same_tokens(self, ids: Tensor, is_bad: Tensor) -> tuple[Tensor, Tensor]:
        """One broadcast on the device; CUDA graphs may capture it."""
        packed = ids * 2 + is_bad
        dist.broadcast(packed, group=self._group, group_src=0)
        return packed >> 1, (packed & 1).bool()

    def least(self, value: int) -> int:
        """One reduction on the host."""
        return self._reduced(value, dist.ReduceOp.MIN)

    def total(self, value: int) -> int:
        """One reduction on the host."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def union(self, values: Mapping[str, str]) -> dict[str, str]:
        """One exchange on the host."""
        gathered: list[Any] = [None] * self.size
        with losing_others():
            dist.all_gather_object(gathered, dict(values), group=self._control)
        merged: dict[str, str] = {}
        for part in reversed(gathered):
            merged |= part
        return merged

    def share(self, message: Any = None) -> Any:
        """One broadcast on the host, two if the message is long.

        Raises:
            ReplicaLostError: rank 0 is gone.
        """
        data = pickle.dumps(message) if self.rank == 0 else b""
        first = torch.zeros(_PACKET, dtype=torch.uint8)
        if self.rank == 0:
            head = len(data).to_bytes(_LENGTH, "little") + data[: _PACKET - _LENGTH]
            first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(first)
        received = bytes(first.numpy())
        length = int.from_bytes(received[:_LENGTH], "little")
        rest = length - (_PACKET - _LENGTH)
        if rest > 0:
            tail = torch.zeros(rest, dtype=torch.uint8)
            if self.rank == 0:
                tail = torch.frombuffer(bytearray(data[-rest:]), dtype=torch.uint8)
            self._broadcast(tail)
            received += bytes(tail.numpy())
        return message if self.rank == 0 else pickle.loads(received[_LENGTH : _LENGTH + length])

    def _reduced(self, value: int, how: "dist.ReduceOp.RedOpType") -> int:
        reduced = torch.tensor([value], dtype=torch.int64)
        with losing_others():
            dist.all_reduce(reduced, how, group=self._control)
        return int(reduced)

    def _broadcast(self, data: Tensor) -> None:
        with losing_others():
            dist.broadcast(data, group=self._control, group_src=0)


@contextmanager
def losing_others() -> Iterator[None]:
    """Say what it means when a collective of the ranks inside fails.

    Raises:
        ReplicaLostError: another rank has ended.
    """
    try:
        yield
    except SparseKVError:
        raise
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or _GLOO in str(error).lower()):
            raise
        raise ReplicaLostError(
            f"another rank of this replica has ended ({_first_line(error)}); start all processes again"
        ) from error


def ranks_of(model: PreTrainedModel, shape: ModelShape) -> Ranks:
    """The ranks that share a model; to be called by all of them.

    Args:
        model: loaded with a DistributedConfig of transformers, or whole.
        shape: of the whole model.
    Raises:
        ConfigError: its KV heads do not divide.
    """
    mesh = tp_mesh(model)
    if mesh is None:
        return Ranks()
    check_tp_size(model.config, mesh.size())
    return TensorRanks(mesh, shape)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
