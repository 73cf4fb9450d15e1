"""What an engine holds between two steps: whose each block is, and which tokens of a request are still there.

It reads the engine's own tables and changes nothing. The copies wait for the device: for looking, not for serving.

    looks = []
    while engine.has_unfinished:
        engine.step()
        looks.append(skv.profile.engine_blocks(engine))

Shapes: K KV head, S stored token. One request.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.cache.rows import LayerPlace, RowState
from hf_sparsekv.engine.engine import Engine
from hf_sparsekv.engine.request import Request
from hf_sparsekv.errors import InputError, shown


@dataclass(frozen=True)
class RequestBlocks:
    """A request that holds blocks."""

    tables: tuple[tuple[int, ...], ...]
    """Per layer, bottom first: its blocks, in the order of their slots."""
    staging: tuple[tuple[int, ...], ...]
    """The same for a prompt that is read in several chunks; empty where the layer stages nothing."""
    positions: tuple[Tensor | None, ...] | None
    """Per layer int32 [K, S] on the CPU, ascending: the tokens that are stored. None until it decodes, and once its
    last token is scheduled; of a layer, None where nobody remembers them: a window layer with decode="grow"."""

    @property
    def blocks_of_layers(self) -> tuple[int, ...]:
        """How many blocks each layer has, staging included."""
        return tuple(len(table) + len(staged) for table, staged in zip(self.tables, self.staging, strict=True))


@dataclass(frozen=True)
class EngineBlocks:
    """A whole pool."""

    num_blocks: int
    """Block 0, which belongs to nobody, included."""
    num_free: int
    num_waiting: int
    """Requests in the queue."""
    requests: Mapping[str, RequestBlocks]
    """By id, in the order of their admission."""


def engine_blocks(engine: Engine) -> EngineBlocks:
    """The state of an engine between two steps; waits for one that is under way.

    Args:
        engine: an open one.
    Raises:
        InputError: no engine.
        CacheError: the engine is closed.
    """
    if not isinstance(engine, Engine):
        raise InputError(f"engine must be an hf_sparsekv.Engine: got {shown(engine)}")
    engine._check_open("engine_blocks()")
    with engine._stepping:
        scheduler = engine._scheduler
        return EngineBlocks(
            num_blocks=engine.memory.num_blocks,
            num_free=scheduler.pool.num_free,
            num_waiting=scheduler.num_waiting,
            requests={request.request_id: _of_request(engine, request) for request in scheduler.running},
        )


def _of_request(engine: Engine, request: Request) -> RequestBlocks:
    assert request.tables is not None, "what runs holds blocks"
    positions = None
    if request.row is not None:
        rows = engine._groups[request.group].rows
        positions = tuple(_positions(rows, place, request.row) for place in rows.places)
    tables, staging = (tuple(map(tuple, lists)) for lists in (request.tables.blocks, request.tables.staging))
    return RequestBlocks(tables=tables, staging=staging, positions=positions)


def _positions(rows: RowState, place: LayerPlace, row: int) -> Tensor | None:
    if not place.is_append:
        stored = int(rows.slot_lengths[place.index, row])
        return rows.slot_positions(place)[row, :, :stored].sort(dim=-1).values.cpu()
    if not place.spec.is_full:
        return None
    seen = int(rows.append_lengths[place.index, row])
    return torch.arange(seen, dtype=torch.int32).expand(rows.plan.shape.num_kv_heads, -1)
