"""PagePool: the one piece of memory that all layers and requests of an engine share."""

import torch
from torch import Tensor


class PagePool:
    """Keys and values in pages; a page holds `page_size` tokens of one layer of one request.

    Page 0 belongs to nobody: rows that pad a batch write there. Which page belongs to whom is known to block tables,
    not here.
    """

    def __init__(
        self, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Reserve `num_pages` pages, page 0 included."""
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        """[P, K, S, D], keys after RoPE."""
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def page_size(self) -> int:
        """S, tokens in a page."""
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.keys.nbytes + self.values.nbytes

    @staticmethod
    def page_bytes(num_kv_heads: int, page_size: int, head_dim: int, element_bytes: int) -> int:
        """Bytes of one page, keys and values."""
        return 2 * num_kv_heads * page_size * head_dim * element_bytes

    def head_rows(self, tables: Tensor) -> Tensor:
        """int64 [..., K, M]: where every head of every page behind block tables int32 [..., M] lies, for `gather`."""
        num_heads = self.num_kv_heads
        heads = torch.arange(num_heads, device=tables.device)[:, None]
        return tables.long()[..., None, :] * num_heads + heads

    def gather(self, head_rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, K, num_tokens, D] of the first tokens behind one block table, copied once.

        Args:
            head_rows: int64 [K, M], of the table.
            num_tokens: at most M pages full.
        """
        rows = head_rows[:, : -(-num_tokens // self.page_size)]
        keys, values = (
            pool.flatten(0, 1)[rows].flatten(1, 2)[None, :, :num_tokens] for pool in (self.keys, self.values)
        )
        return keys, values
