"""Mailbox: what one consumer of a stream has not taken yet: at most one output, however slow the consumer is."""

import threading
from collections.abc import Callable
from dataclasses import replace

from hf_sparsekv.engine.output import RequestOutput


class Mailbox:
    """Filled by the engine's thread, emptied by its consumer.

    Args:
        wake: tells the consumer that there is something to take: once for an output and what is merged with it, and
            again for an error.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output; one that still lies here is merged with it."""
        with self._lock:
            is_news = self._output is None
            self._output = output if self._output is None else merged(self._output, output)
        if is_news:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Let the consumer meet an error once it has taken everything else."""
        with self._lock:
            self._error = error
        self._wake()

    def take(self) -> RequestOutput | None:
        """What is new, or None.

        Raises:
            BaseException: what `fail` was given, when there is nothing else.
        """
        with self._lock:
            output, self._output = self._output, None
        if self._error is None:
            return output
        if output is None:
            raise self._error
        self._wake()  # for the error, which is still to be taken
        return output


def merged(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two outputs of one request that follow each other, as if the first had never been made."""
    text = later.new_text
    if text is not None:
        text = (earlier.new_text or "") + text
    return replace(later, new_token_ids=earlier.new_token_ids + later.new_token_ids, new_text=text)
