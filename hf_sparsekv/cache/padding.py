"""Padding: which columns of a batch hold tokens, and how many tokens each request has seen."""

import torch
from torch import Tensor

from hf_sparsekv.errors import CacheError


class Padding:
    """The history of a batch, column by column, shared by all layers of a cache.

    The host knows every request's number of tokens, so that decoding never asks the device.
    """

    def __init__(self) -> None:
        """An empty history; the batch size comes with the first columns."""
        self.num_columns = 0
        self.tokens: list[int] = []
        """Tokens seen, per request."""
        self.is_token: Tensor | None = None
        """bool [B, num_columns], or None while no column was padding."""

    def extend(self, batch_size: int, num_new: int, mask: Tensor | None) -> None:
        """Take note of `num_new` columns.

        Args:
            batch_size: B; must not change without `select_rows`.
            num_new: columns of this forward pass.
            mask: bool [B, >= num_new], True = token, its last `num_new` columns being the new ones; None = all tokens.
        """
        if not self.tokens:
            self.tokens = [0] * batch_size
        if batch_size != len(self.tokens):
            raise CacheError(
                f"the cache holds {len(self.tokens)} requests, got a batch of {batch_size}: use a new cache"
            )
        new = None if mask is None else mask[:, -num_new:]
        counts = [num_new] * batch_size if new is None else new.sum(dim=-1).tolist()
        if self.is_token is not None or min(counts) < num_new:
            device = new.device if new is not None else self.is_token.device  # type: ignore[union-attr]
            old = self._columns(batch_size, self.num_columns, self.is_token, device)
            self.is_token = torch.cat([old, self._columns(batch_size, num_new, new, device)], dim=1)
        self.tokens = [seen + count for seen, count in zip(self.tokens, counts, strict=True)]
        self.num_columns += num_new

    def new_tokens(self, num_new: int) -> Tensor | None:
        """bool [B, num_new] for the last columns, None when all hold tokens."""
        return None if self.is_token is None else self.is_token[:, self.num_columns - num_new : self.num_columns]

    def columns_of(self, row: int, start: int) -> Tensor | slice:
        """Where request `row` has tokens among the columns from `start` on, counted from `start`."""
        if self.is_token is None:
            return slice(0, self.num_columns - start)
        index = self.is_token[row, start:].nonzero().flatten()
        first, last = int(index[0]) if len(index) else 0, int(index[-1]) + 1 if len(index) else 0
        return slice(first, last) if last - first == len(index) else index

    def select_rows(self, rows: Tensor) -> None:
        """Make request i what request rows[i] was; rows may repeat."""
        if not self.tokens:
            return
        if self.is_token is not None:
            self.is_token = self.is_token.index_select(0, rows.to(self.is_token.device))
        if len(set(self.tokens)) > 1:
            self.tokens = [self.tokens[i] for i in rows.tolist()]
        else:
            self.tokens = self.tokens[:1] * len(rows)

    @staticmethod
    def _columns(batch_size: int, count: int, is_token: Tensor | None, device: torch.device) -> Tensor:
        if is_token is not None:
            return is_token
        return torch.ones(batch_size, count, dtype=torch.bool, device=device)
