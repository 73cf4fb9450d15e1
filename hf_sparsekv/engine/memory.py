"""Initialise: how many blocks and rows fit, and the plan that says so."""

from dataclasses import dataclass
from functools import cached_property

from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.engine.config import EngineConfig
from hf_sparsekv.engine.tables import RequestTables
from hf_sparsekv.errors import ConfigError
from hf_sparsekv.plan import LayerPlan

_SHORTEST = 2
"""Tokens of the shortest request: a prompt and an output."""


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
    sampler_row_bytes: int
    """Of a row's bookkeeping, the part that is the same for every configuration: sampling options."""
    max_model_len: int
    """Tokens of the longest request, prompt and output."""
    chunk_limit: int
    """Tokens of the longest prompt that is computed whole; window layers stage longer ones."""

    @classmethod
    def build(
        cls,
        layers: LayerPlan,
        dense: LayerPlan,
        config: EngineConfig,
        *,
        kv_bytes: int,
        element_bytes: int,
        model_length: int,
        sampler_row_bytes: int,
    ) -> "MemoryPlan":
        """Share `kv_bytes` out between rows and blocks.

        There are as many rows as requests of at least a window layer's budget can be held, at most `max_num_seqs`:
        every row costs its bookkeeping whether used or not.

        Raises:
            ConfigError: the memory does not hold one request of `max_model_len` tokens.
        """
        size, shape = config.block_size, layers.shape
        block_bytes = PagePool.page_bytes(shape.num_kv_heads, size, shape.head_dim, element_bytes)
        floor = sum(-(-spec.kept_tokens(1) // size) for spec in layers.layers if not spec.is_full) + 1

        def shared_out(length: int) -> MemoryPlan:
            row_bytes = RowState.row_bytes(layers, shape.num_kv_heads, size, length) + sampler_row_bytes
            num_rows = max(1, min(config.max_num_seqs, kv_bytes // (row_bytes + floor * block_bytes)))
            num_blocks = (kv_bytes - num_rows * row_bytes) // block_bytes
            return cls(
                layers, dense, size, block_bytes, num_blocks, num_rows, sampler_row_bytes, length, config.chunk_limit
            )

        plan = shared_out(min(config.max_model_len or model_length, model_length))
        while plan.peak_of(layers, plan.max_model_len) > plan.num_blocks - 1:
            if config.max_model_len is not None or plan.max_model_len <= _SHORTEST:
                raise ConfigError(plan._refusal(kv_bytes))
            plan = shared_out(max(_SHORTEST, plan.longest()))  # shorter rows may be more rows: look again
        return plan

    @cached_property
    def row_bytes(self) -> int:
        """Bookkeeping of one row: tables, positions, scores, sampling options."""
        return self._row_bytes(self.layers)

    def row_bytes_of(self, layers: LayerPlan) -> int:
        """The same for requests of a configuration of their own."""
        return self.row_bytes if layers is self.layers else self._row_bytes(layers)

    def _row_bytes(self, layers: LayerPlan) -> int:
        rows = RowState.row_bytes(layers, layers.shape.num_kv_heads, self.block_size, self.max_model_len)
        return rows + self.sampler_row_bytes

    def blocks_of(self, layers: LayerPlan, length: int) -> int:
        """Blocks that a request takes once it has `length` tokens, its prompt all but one of them."""
        return self._tables_of(layers, length).demand(length, staged=False)

    def peak_of(self, layers: LayerPlan, length: int) -> int:
        """Blocks that the same request takes at its worst moment: a prompt computed in pieces is staged."""
        tables = self._tables_of(layers, length)
        return tables.demand(length, staged=tables.is_staged(self.chunk_limit))

    def longest(self) -> int:
        """The longest request that fits alone, in whole blocks."""
        low, high = 1, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak_of(self.layers, middle) <= self.num_blocks - 1:
                low = middle
            else:
                high = middle - 1
        return low

    def concurrent(self, layers: LayerPlan, length: int) -> int:
        """Requests of `length` tokens that the blocks hold at once; rows are not counted.

        One is at its worst moment while the others decode: there is one prompt between chunks at a time.
        """
        beside = self.num_blocks - 1 - self.peak_of(layers, length)
        return max(0, 1 + beside // self.blocks_of(layers, length))

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

    def _tables_of(self, layers: LayerPlan, length: int) -> RequestTables:
        return RequestTables(layers, max(1, length - 1), length, self.block_size)

    def _refusal(self, kv_bytes: int) -> str:
        peak, whole = (f(self.layers, self.max_model_len) for f in (self.peak_of, self.blocks_of))
        missing = (peak + 1) * self.block_bytes + self.num_rows * self.row_bytes
        chunk, extra = self.layers.chunk_tokens, (peak - whole) * self.block_bytes
        staging = (
            f", {extra:,} of it to stage a prompt over {self.chunk_limit:,} tokens (raise max_batch_tokens, and "
            "prefill_chunk_tokens if set, to compute it whole)"
        )
        if chunk is not None:
            staging = f", {extra:,} of it for chunks of {chunk:,} tokens (lower the method's prefill_chunk_tokens)"
        return (
            f"kv_memory_bytes={kv_bytes:,} does not hold one request of max_model_len={self.max_model_len:,} tokens, "
            f"which takes {missing:,}{staging if peak > whole else ''}: raise kv_memory_bytes, or lower max_model_len "
            "or the budget"
        )
