"""Initialise: how many blocks and rows fit, and the plan that says so."""

from dataclasses import dataclass

from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.tables import RequestTables
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import LayerPlan


@dataclass(frozen=True)
class MemoryPlan:
    """One engine's memory, in blocks that all layers share."""

    layers: LayerPlan
    dense: LayerPlan
    """The same model with every layer full, to compare with."""
    block_size: int
    block_bytes: int
    num_blocks: int
    """Block 0, which belongs to nobody, included."""
    num_rows: int
    """Requests that can run at once, whatever their length."""
    row_bytes: int
    """Bookkeeping of one row: tables, positions, scores."""
    max_model_len: int

    @classmethod
    def build(
        cls,
        layers: LayerPlan,
        dense: LayerPlan,
        config: EngineConfig,
        *,
        kv_bytes: int,
        num_kv_heads: int,
        element_bytes: int,
        model_length: int,
    ) -> "MemoryPlan":
        """Share `kv_bytes` out between rows and blocks.

        There are as many rows as requests of at least a window layer's budget can be held, at most `max_num_seqs`:
        every row costs its bookkeeping whether used or not.

        Raises:
            ConfigError: the memory does not hold one request of `max_model_len` tokens.
        """
        size, shape = config.block_size, layers.shape
        block_bytes = PagePool.page_bytes(num_kv_heads, size, shape.head_dim, element_bytes)
        length = min(config.max_model_len or model_length, model_length)
        row_bytes = RowState.row_bytes(layers, num_kv_heads, size, length)
        floor = sum(-(-spec.kept_tokens(1) // size) for spec in layers.layers if not spec.is_full) + 1
        num_rows = max(1, min(config.max_num_seqs, kv_bytes // (row_bytes + floor * block_bytes)))
        num_blocks = (kv_bytes - num_rows * row_bytes) // block_bytes
        plan = cls(layers, dense, size, block_bytes, num_blocks, num_rows, row_bytes, length)
        needed = plan.blocks_of(layers, length)
        if needed <= num_blocks - 1:
            return plan
        if config.max_model_len is None:
            length = plan.longest()
            if length > 1:
                return cls.build(
                    layers,
                    dense,
                    config.with_(max_model_len=length),
                    kv_bytes=kv_bytes,
                    num_kv_heads=num_kv_heads,
                    element_bytes=element_bytes,
                    model_length=model_length,
                )
        missing = (needed + 1) * block_bytes + num_rows * row_bytes
        raise ConfigError(
            f"kv_memory_bytes={kv_bytes:,} does not hold one request of max_model_len={length:,} tokens, which takes "
            f"{missing:,}: raise kv_memory_bytes, or lower max_model_len or the budget"
        )

    def blocks_of(self, layers: LayerPlan, length: int) -> int:
        """Blocks that a request takes once it has `length` tokens, its prompt all but one of them."""
        tables = RequestTables(layers, max(1, length - 1), length, self.block_size)
        return tables.demand(length, staged=False)

    def longest(self) -> int:
        """The longest request that fits alone, in whole blocks."""
        low, high = 1, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_of(self.layers, middle) <= self.num_blocks - 1:
                low = middle
            else:
                high = middle - 1
        return low

    def concurrent(self, layers: LayerPlan, length: int) -> int:
        """Requests of `length` tokens that the blocks hold at once; rows are not counted."""
        return (self.num_blocks - 1) // self.blocks_of(layers, length)

    def describe(self) -> str:
        """The plan as text: blocks, and requests at a few lengths against the dense cache."""
        total = self.num_blocks * self.block_bytes
        lines = [
            f"{self.num_blocks:,} blocks of {self.block_size} tokens ({total:,} bytes), {self.num_rows} rows "
            f"({self.num_rows * self.row_bytes:,} bytes), requests of up to {self.max_model_len:,} tokens",
            f"{'tokens':>8}  {'requests':>9}  {'dense':>6}",
        ]
        length = 1024
        while length <= self.max_model_len:
            ours = min(self.num_rows, self.concurrent(self.layers, length))
            lines.append(f"{length:>8,}  {ours:>9,}  {self.concurrent(self.dense, length):>6,}")
            length *= 2
        return "\n".join(lines)
