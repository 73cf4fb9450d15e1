"""LateCheck: a condition that a GPU checks and the host hears of without waiting."""

import torch
from torch import Tensor


class LateCheck:
    """Whether everything noted so far has held, as far as the device has come.

    Each note ends in a copy to pinned memory that is only queued, so a failure is seen some notes late.
    """

    def __init__(self, has_failed: bool = False) -> None:
        """Nothing noted; or, of a copy, what the original knew."""
        self._failed_before = has_failed
        self._on_device: Tensor | None = None
        self._on_host: Tensor | None = None

    def note(self, holds: Tensor) -> None:
        """Add a condition, a bool scalar."""
        if self._on_device is None or self._on_host is None:
            self._on_device = torch.ones_like(holds)
            self._on_host = torch.ones((), dtype=torch.bool, pin_memory=holds.is_cuda)
        self._on_device.logical_and_(holds)
        self._on_host.copy_(self._on_device, non_blocking=True)

    def has_failed(self) -> bool:
        """Whether a failure has arrived."""
        return self._failed_before or (self._on_host is not None and not self._on_host)

    def will_fail(self) -> bool:
        """Whether anything noted has failed; waits for the device."""
        return self._failed_before or (self._on_device is not None and not self._on_device)

    def __reduce__(self) -> tuple[type["LateCheck"], tuple[bool]]:
        """Copies and pickles hold the answer: pinned memory would come back as memory of the common kind."""
        return LateCheck, (self.will_fail(),)
