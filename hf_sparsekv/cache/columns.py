"""ColumnStore: keys and values of every token in arrival order, in buffers that grow by whole blocks."""

from torch import Tensor

from hf_sparsekv.plan import column_capacity


class ColumnStore:
    """Keys and values [B, K, columns, D]; column j of every request arrived at the same time.

    The buffers grow by blocks (see `column_capacity`), so that decoding copies the history once a block, not once a
    token.
    """

    def __init__(self) -> None:
        """An empty store; shape, dtype and device come with the first keys."""
        self.num_columns = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """View [B, K, num_columns, D] of what is stored."""
        assert self._keys is not None
        return self._keys[:, :, : self.num_columns]

    @property
    def values(self) -> Tensor:
        """View [B, K, num_columns, D] of what is stored."""
        assert self._values is not None
        return self._values[:, :, : self.num_columns]

    @property
    def capacity(self) -> int:
        """Columns that are reserved."""
        return 0 if self._keys is None else self._keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes reserved by keys and values."""
        return sum(t.nbytes for t in (self._keys, self._values) if t is not None)

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, capacity, D], reserved columns included."""
        assert self._keys is not None and self._values is not None
        return self._keys, self._values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Copy new columns [B, K, T, D] behind the others."""
        end = self.num_columns + keys.shape[2]
        if end > self.capacity:
            self._keys, self._values = (
                self._grown(self._keys, keys, end),
                self._grown(self._values, values, end),
            )
        assert self._keys is not None and self._values is not None
        self._keys[:, :, self.num_columns : end] = keys
        self._values[:, :, self.num_columns : end] = values
        self.num_columns = end

    def reserve(self, columns: int) -> None:
        """Have room for as many columns in all; what is stored stays."""
        if columns > self.capacity:
            keys, values = self.buffers
            self._keys, self._values = self._grown(keys, keys, columns), self._grown(values, values, columns)

    def trim(self) -> None:
        """Give back the columns beyond what `append` alone would have reserved."""
        capacity = column_capacity(self.num_columns)
        if capacity < self.capacity:
            self._keys, self._values = (t[:, :, :capacity].contiguous() for t in self.buffers)

    def reorder(self, order: Tensor) -> None:
        """Make column j of request i what its column order[i, j], int64 [B, capacity], was; reserved ones included."""
        index = order[:, None, :, None]
        keys, values = self.buffers
        moved = [t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3])) for t in (keys, values)]
        self._keys, self._values = moved  # both or, when memory is short, none

    def clear(self) -> None:
        """Drop everything and release the memory."""
        self.num_columns, self._keys, self._values = 0, None, None

    def select_rows(self, rows: Tensor) -> None:
        """Make request i what request rows[i] was; rows may repeat."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, rows.to(self._keys.device))
            self._values = self._values.index_select(0, rows.to(self._values.device))

    def _grown(self, old: Tensor | None, new: Tensor, columns: int) -> Tensor:
        buffer = new.new_empty(new.shape[0], new.shape[1], column_capacity(columns), new.shape[3])
        if old is not None:
            buffer[:, :, : self.num_columns] = old[:, :, : self.num_columns]
        return buffer
