"""Padding: which columns of a batch hold tokens, and how many tokens each request has seen."""

import torch
from torch import Tensor

from hf_sparsekv.cache.late_check import LateCheck
from hf_sparsekv.errors import CacheError, InputError


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
        self._late_check = LateCheck()
        """Of the masks of decode steps on a GPU."""

    def check_mask(self, batch_size: int, mask: Tensor | None, is_decode: bool) -> None:
        """Refuse a forward pass that contradicts the history, before anything is changed.

        What has been stored cannot become padding later, nor the other way round. Of decode steps on a GPU the answer
        is not waited for: their error comes with a later step.

        Args:
            batch_size: B.
            mask: bool [B, N], which of all columns, the new ones included, are tokens; None = all.
            is_decode: the new column is a token of every request.
        Raises:
            CacheError: another batch size, or a decode step with padding.
            InputError: the mask is not that of the columns seen before.
        """
        if self.tokens:
            self._check_batch(batch_size)
        if self._late_check.has_failed() if is_decode else self._late_check.will_fail():
            raise CacheError(
                "an earlier decode step came with an attention mask that contradicts what the cache holds, or with "
                "padding for some request: call reset(), or take a new cache"
            )
        if mask is None:
            if self.is_token is not None:
                raise InputError(
                    f"no attention mask, but some of the {self.num_columns} columns seen before were padding: pass the "
                    "mask of the whole conversation"
                )
            return
        seen = self.num_columns
        is_right = mask if is_decode else mask[:, :seen]
        if self.is_token is not None:
            is_right = is_right == torch.nn.functional.pad(self.is_token, (0, is_right.shape[1] - seen), value=True)
        if is_decode and mask.is_cuda:
            self._late_check.note(is_right.all())
        elif not is_right.all():
            raise _contradiction(is_right, seen)

    def extend(self, batch_size: int, num_new: int, mask: Tensor | None) -> None:
        """Take note of `num_new` columns.

        Args:
            batch_size: B; must not change without `select_rows`.
            num_new: columns of this forward pass.
            mask: bool [B, >= num_new], True = token, its last `num_new` columns being the new ones; None = all tokens.
        """
        if not self.tokens:
            self.tokens = [0] * batch_size
        self._check_batch(batch_size)
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

    def _check_batch(self, batch_size: int) -> None:
        if batch_size != len(self.tokens):
            raise CacheError(
                f"the cache holds {len(self.tokens)} requests, got a batch of {batch_size}: use a new cache"
            )

    @staticmethod
    def _columns(batch_size: int, count: int, is_token: Tensor | None, device: torch.device) -> Tensor:
        if is_token is not None:
            return is_token
        return torch.ones(batch_size, count, dtype=torch.bool, device=device)


def _contradiction(is_right: Tensor, seen: int) -> CacheError | InputError:
    """The error for a mask with entries that cannot be: among the `seen` columns, or else in a decode step's."""
    row, column = (~is_right).nonzero()[0].tolist()
    if column < seen:
        return InputError(
            f"the attention mask contradicts the cache at column {column} of request {row}: what was stored as a token "
            "or as padding stays that; pass the mask of the whole conversation, 1 for generated tokens"
        )
    return CacheError(
        f"request {row} has padding in a decode step, where every request of a batch gets one token: feed the requests "
        "that go on in a batch of their own (batch_select_indices)"
    )
