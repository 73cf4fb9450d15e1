"""What one layer of a cache consists of, and the operations that do not depend on attention."""

from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.cache.columns import ColumnStore
from hf_sparsekv.cache.padding import Padding
from hf_sparsekv.cache.slots import SlotStore
from hf_sparsekv.cache.tail import QueryTail
from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import CacheError
from hf_sparsekv.plan import LayerSpec
from hf_sparsekv.scorers.base import ALL_HEADS


class FullLayer:
    """Keeps every token: columns, nothing else."""

    def __init__(self, spec: LayerSpec, padding: Padding) -> None:
        """An empty layer; `padding` is shared by the whole cache."""
        self.spec = spec
        self.padding = padding
        self.columns = ColumnStore()
        self.num_seen = 0
        """Columns seen."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that this layer holds."""
        return self.columns.nbytes

    @property
    def stored_keys(self) -> Tensor | None:
        """Some keys that this layer holds, for their dtype and device; None while it holds none."""
        return self.columns.keys if self.columns.num_columns else None

    def check_kind(self, key: Tensor) -> None:
        """Refuse keys that cannot stand beside the stored ones.

        Raises:
            CacheError: another dtype or device.
        """
        stored = self.stored_keys
        if stored is not None and (stored.dtype != key.dtype or stored.device != key.device):
            raise CacheError(
                f"the cache holds {stored.dtype} keys on {stored.device}, the model now makes {key.dtype} keys on "
                f"{key.device}: cast or move the model before its first token, and use a new cache"
            )

    def select_rows(self, rows: Tensor) -> None:
        """Make request i what request rows[i] was; rows may repeat."""
        self.columns.select_rows(rows)


@dataclass(frozen=True)
class PromptRecord:
    """What a selection did to one request, per KV head."""

    seen: int
    """Tokens seen when it was made."""
    kept: int
    """Tokens it kept."""
    evicted: int
    """Tokens that this and earlier selections dropped."""
    budget: int
    """Tokens allowed from then on."""


class WindowLayer(FullLayer):
    """Keeps at most its budget.

    Until something has to be evicted, all tokens are in `columns`, exactly as a dense cache has them, and `slots` is
    None. From the first eviction on, kept tokens are in `slots`, and `columns` holds only the tokens of a new turn
    that is not over yet.
    """

    def __init__(self, spec: LayerSpec, padding: Padding, config: SparseKVConfig, inv_freq: Tensor | None) -> None:
        """An empty layer.

        Args:
            spec: its budget.
            padding: shared by the whole cache.
            config: the method's options.
            inv_freq: fp32 [D / 2] RoPE frequencies for scorers that undo the rotation, or None.
        """
        super().__init__(spec, padding)
        self.config = config
        self.inv_freq = inv_freq
        self.heads = ALL_HEADS
        """Which KV heads of the model's layer these are."""
        self.slots: SlotStore | None = None
        rows = {"none": 0, "last": config.observation_window, "all": None}[config.scorer_object.queries]
        self.tail = QueryTail(rows)
        self.is_prompt_open = False
        """Whether tokens have come that no selection has seen yet."""
        self.num_unselected = 0
        """Columns since the last selection, decoded ones not counted."""
        self.column_scores: Tensor | None = None
        """fp32 [B, K, >= num_columns] while nothing was evicted: what decoding will replace by."""
        self.chunk_scores: Tensor | None = None
        """fp32 [B, K, C or columns] between the chunks of a bounded prefill: what the scorer gave to what is stored."""
        self.prompts: list[PromptRecord] = []
        """What the last selection left, per request; empty before the first."""
        self.num_decoded = 0
        """Tokens decoded since the last selection; the same for all requests."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that this layer holds."""
        scores = sum(t.nbytes for t in (self.column_scores, self.chunk_scores) if t is not None)
        return self.columns.nbytes + scores + self.tail.nbytes + (0 if self.slots is None else self.slots.nbytes)

    @property
    def stored_keys(self) -> Tensor | None:
        """Some keys that this layer holds, for their dtype and device; None while it holds none."""
        return super().stored_keys if self.slots is None else self.slots.keys

    def select_rows(self, rows: Tensor) -> None:
        """Make request i what request rows[i] was; rows may repeat."""
        super().select_rows(rows)
        self.tail.select_rows(rows)
        if self.slots is not None:
            self.slots.select_rows(rows)
        if self.column_scores is not None:
            self.column_scores = self.column_scores.index_select(0, rows.to(self.column_scores.device))
        if self.chunk_scores is not None:
            self.chunk_scores = self.chunk_scores.index_select(0, rows.to(self.chunk_scores.device))
        if len(set(self.prompts)) > 1:
            self.prompts = [self.prompts[i] for i in rows.tolist()]
        else:
            self.prompts = self.prompts[:1] * len(rows)

    def num_stored(self, row: int) -> int:
        """Tokens of a request that this layer holds, in slots or columns, those of an open turn included."""
        if self.slots is None:
            return self.padding.tokens[row]
        return self.num_in_slots(row) + self.num_new(row)

    def num_in_slots(self, row: int) -> int:
        """Slots in use by a request, known without asking the device."""
        record = self.prompts[row]
        stored = record.kept + self.num_decoded
        return stored if self.config.decode_mode == "grow" else min(stored, record.budget)

    def num_new(self, row: int) -> int:
        """Tokens of a request that have come since its last selection, decoded ones not counted."""
        selected = self.prompts[row].seen if self.prompts else 0
        return self.padding.tokens[row] - selected - self.num_decoded
