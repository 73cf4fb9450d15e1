"""Tests that the host goes on while the GPU works."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, what makes the host wait for the GPU raises, as far as torch notices it.

    torch says once in a process that this is a prototype: where warnings are errors, the first use must not be one.
    """
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
