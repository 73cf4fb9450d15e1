"""QueryTail: the last query rows of a prompt, kept until the prompt's end is known."""

import torch
from torch import Tensor


class QueryTail:
    """The last `num_rows` token rows of each request, right-aligned, however the prompt came in.

    Chunked prefill does not say which chunk is the last, so each chunk leaves its last rows here; padding rows never
    push a token out.
    """

    def __init__(self, num_rows: int | None) -> None:
        """Keep `num_rows` rows, or every row of the prompt when None."""
        self._limit = num_rows
        self._queries: Tensor | None = None
        self._is_token: Tensor | None = None

    @property
    def queries(self) -> Tensor:
        """[B, H, A, D]; rows of a request that has fewer than A tokens come first and mean nothing."""
        assert self._queries is not None
        return self._queries

    @property
    def nbytes(self) -> int:
        """Bytes held until scoring, which row is a token included."""
        return sum(t.nbytes for t in (self._queries, self._is_token) if t is not None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be scored."""
        return self._queries is None

    def num_rows(self, row: int) -> int:
        """Rows of a request that are there."""
        return self.queries.shape[2] if self._is_token is None else int(self._is_token[row].sum())

    def append(self, queries: Tensor, is_token: Tensor | None) -> None:
        """Add rows [B, H, T, D]; `is_token` bool [B, T] says which are tokens, None = all."""
        limit = self._limit
        if is_token is None and self._is_token is None:
            new = queries if limit is None else queries[:, :, max(0, queries.shape[2] - limit) :]
            old = self._queries
            if old is not None:
                new = torch.cat([old, new], dim=2)
                new = new if limit is None else new[:, :, max(0, new.shape[2] - limit) :]
            # A view would keep the whole prompt's queries alive, and a slice of one head is contiguous.
            self._queries = new.clone(memory_format=torch.contiguous_format)
            return
        both = queries if self._queries is None else torch.cat([self._queries, queries], dim=2)
        flags = self._flags(queries, is_token)
        order = flags.to(torch.uint8).argsort(dim=1, stable=True)  # padding first, then tokens in order
        order = order if limit is None else order[:, max(0, order.shape[1] - limit) :]
        self._queries = both.gather(2, order[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3]))
        self._is_token = flags.gather(1, order)

    def clear(self) -> None:
        """Forget all rows."""
        self._queries, self._is_token = None, None

    def select_rows(self, rows: Tensor) -> None:
        """Make request i what request rows[i] was."""
        if self._queries is not None:
            self._queries = self._queries.index_select(0, rows.to(self._queries.device))
        if self._is_token is not None:
            self._is_token = self._is_token.index_select(0, rows.to(self._is_token.device))

    def _flags(self, queries: Tensor, is_token: Tensor | None) -> Tensor:
        batch, num_new = queries.shape[0], queries.shape[2]
        new = is_token if is_token is not None else torch.ones(batch, num_new, dtype=torch.bool, device=queries.device)
        if self._queries is None:
            return new
        old = self._is_token
        if old is None:
            old = torch.ones(batch, self._queries.shape[2], dtype=torch.bool, device=queries.device)
        return torch.cat([old, new], dim=1)
