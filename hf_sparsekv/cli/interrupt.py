"""Ctrl-C while modules are imported: seconds in which Python prints a long traceback, or a callback swallows it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code: 128 and the number of SIGINT."""
MESSAGE = "interrupted"


@contextmanager
def importing() -> Iterator[None]:
    """Leave at once when interrupted inside: there is nothing to put back yet. Whoever handles SIGINT goes on to."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)
