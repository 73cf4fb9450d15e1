"""Ctrl-C: never in the middle of the books, where it would leave blocks that belong to nobody.

Python raises a KeyboardInterrupt between any two instructions of the main thread. Neither torch nor requests here.
"""

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from hf_sparsekv.errors import RequestError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class HeldInterrupts:
    """While it is entered, the first Ctrl-C waits for the end, or for `raise_noted`; a second one is raised at once.

    In the main thread alone, and where nobody else handles the signal: others get no KeyboardInterrupt from it.
    """

    def __enter__(self) -> "HeldInterrupts":
        """Hold them; inside another one, that goes on doing so."""
        is_main = threading.current_thread() is threading.main_thread()
        self._is_noted, self._is_holding = False, False
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._is_holding = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def raise_noted(self) -> None:
        """Let the Ctrl-C that has come, if one did, have its effect here."""
        if self._is_noted:
            self._is_noted = False
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go, and do what `raise_noted` does."""
        if self._is_holding:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.raise_noted()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def one_step(lock: threading.Lock) -> Iterator[HeldInterrupts]:
    """The right to step an engine: one thread at a time has it, and holds interrupts meanwhile.

    Raises:
        RequestError: another thread has the lock.
    """
    with HeldInterrupts() as interrupts:
        if not lock.acquire(blocking=False):
            raise RequestError("step() while another thread is in it: let one thread step, or use stream()")
        try:
            yield interrupts
        finally:
            lock.release()


def holding_interrupts(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function, at the end of which a Ctrl-C is raised that comes meanwhile."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with HeldInterrupts():
            return function(*args, **kwargs)

    return run
