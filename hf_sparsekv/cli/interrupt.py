"""SIGINT and SIGTERM: each ends a command in one line on stderr and exit code 128 + its number, never a traceback."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_BASE = 128
MESSAGES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
"""For a terminal on which a spinner was drawn."""


class Terminated(BaseException):
    """SIGTERM came: like KeyboardInterrupt, nothing but the end of the program handles it."""


class Interrupted(BaseException):
    """SIGINT came: KeyboardInterrupt by a name that typer does not know, which some of its releases end in silence."""


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` inside, so that what is open is closed. Whoever handles SIGTERM goes on to."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def importing() -> Iterator[None]:
    """Leave at once when a signal comes inside: there is nothing to put back yet. Whoever handles one goes on to.

    Importing takes seconds, in which Python prints a long traceback, or a callback swallows what a handler raises.
    """
    before = {number: signal.getsignal(number) for number in MESSAGES}
    ours = [number for number, handler in before.items() if handler in (_DEFAULTS[number], _raise)]
    for number in ours:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _leave(number: int, frame: FrameType | None) -> None:
    start = _SHOW_CURSOR if os.isatty(2) else b""
    os.write(2, start + f"{MESSAGES[signal.Signals(number)]}\n".encode())
    os._exit(EXIT_BASE + number)
