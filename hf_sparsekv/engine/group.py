"""Group: the running requests that share one sparse configuration, and which row of the device state each has."""

import torch

from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.engine.memory import MemoryPlan
from hf_sparsekv.engine.request import Request
from hf_sparsekv.engine.sampler import SamplerFeatures, SamplerState
from hf_sparsekv.plan import LayerPlan


class Group:
    """Rows 0 to n - 1 belong to the n requests that decode; a request that leaves is replaced by the last one."""

    def __init__(self, rows: RowState, sampler: SamplerState) -> None:
        """A group without requests."""
        self.rows, self.sampler = rows, sampler
        self.requests: list[Request] = []
        """By row."""

    @property
    def features(self) -> SamplerFeatures:
        """What sampling has to do for the requests of now."""
        return SamplerFeatures.of([request.params for request in self.requests])

    def admit(self, request: Request) -> int:
        """Give the next row to a request whose prompt ends in this step."""
        request.row = len(self.requests)
        self.requests.append(request)
        return request.row

    def retire(self, request: Request) -> None:
        """Take a request's row away, if it has one; what was launched before is not disturbed."""
        row = request.row
        if row is None:
            return
        last = self.requests.pop()
        request.row = None
        if last is request:
            self.rows.clear(slice(row, row + 1))
            self.sampler.clear_row(row)
            return
        self.rows.move(last.row, row)  # type: ignore[arg-type]  # a request in the list has a row
        self.sampler.move_row(last.row, row)  # type: ignore[arg-type]
        last.row = row
        self.requests[row] = last


def new_group(
    config: SparseKVConfig,
    plan: LayerPlan,
    memory: MemoryPlan,
    num_kv_heads: int,
    vocab_size: int,
    device: torch.device,
    stop_ids: tuple[int, ...],
) -> Group:
    """A group with as many rows as the engine has."""
    rows = RowState(
        config,
        plan,
        num_rows=memory.num_rows,
        num_kv_heads=num_kv_heads,
        page_size=memory.block_size,
        max_length=memory.max_model_len,
        device=device,
    )
    return Group(rows, SamplerState(memory.num_rows, vocab_size, device, stop_ids))
