"""From the host to the device without waiting for either."""

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`; the copy is only queued.

    Pinned memory comes from PyTorch's caching host allocator, which hands a block out again only when the copies from
    it are done.
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
