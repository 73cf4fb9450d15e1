"""Reading a paged pool as dense rows, and the chunk size that bounds temporaries."""

import torch
from torch import Tensor

TEMPORARY_BYTES = 16 * 2**20
"""No op builds a single fp32 temporary larger than this, except one key or one query row at a time, a number for every
key and query head, and the copies that `attention` and the decode ops make of all keys and values."""


def dense_rows(pool_PKSD: Tensor, block_table_BM: Tensor | None, num_slots: int) -> Tensor:
    """The first `num_slots` slots of every request, [B, K, num_slots, D].

    A view when the pool is not paged, a gathered copy otherwise. Slots behind an unused table entry (negative or
    past the pool) read page 0: callers mask them by length.
    """
    if block_table_BM is None:
        return pool_PKSD[:, :, :num_slots]
    page_size = pool_PKSD.shape[2]
    num_pages = -(-num_slots // page_size)
    table = block_table_BM[:, :num_pages].long()
    table = torch.where((table >= 0) & (table < pool_PKSD.shape[0]), table, 0)
    rows = pool_PKSD[table]  # [B, M, K, S, D]
    return rows.transpose(1, 2).flatten(2, 3)[:, :, :num_slots]


def chunk_length(bytes_per_item: int) -> int:
    """How many items of `bytes_per_item` bytes fit in one temporary; at least one."""
    return max(1, TEMPORARY_BYTES // max(1, bytes_per_item))


def valid_slots(lengths_B: Tensor, num_slots: int) -> Tensor:
    """bool [B, num_slots]: which slots hold a token."""
    slots = torch.arange(num_slots, device=lengths_B.device)
    return slots[None, :] < lengths_B[:, None]
