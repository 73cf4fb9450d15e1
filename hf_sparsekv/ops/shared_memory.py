"""Whether what a kernel keeps of a row fits into a GPU's shared memory."""

from functools import cache

import torch

SELECT_BYTES = 50 * 2**10
"""What `select` needs beside masks and lists of a row, see kernels/csrc/select.h."""
RESERVED_BYTES = 2**10
"""Of a block, for static variables and for the driver."""


def two_lists_fit(num_keys: int, capacity: int, device: torch.device) -> bool:
    """Whether a GPU's `select` takes rows of N keys with two lists, of which C are kept."""
    return two_list_bytes(num_keys, capacity) <= _bytes_per_block(device)


def two_list_bytes(num_keys: int, capacity: int) -> int:
    """Shared memory of such a row: three masks, then the passes, whose place the sorted lists take."""
    num_words = 2 * -(-num_keys // 64)
    return RESERVED_BYTES + 3 * 4 * num_words + max(SELECT_BYTES, 8 * capacity)


@cache
def _bytes_per_block(device: torch.device) -> int:
    # One block may have all but 1 KiB of what a multiprocessor has, on every architecture since Ampere.
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 2**10
