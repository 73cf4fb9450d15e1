"""Whose an engine is: one object in one process. Neither torch nor requests here."""

import os
from typing import NoReturn, SupportsIndex

from hf_sparsekv.errors import CacheError, EngineError


class Uncopied:
    """Objects that own what cannot be there twice, such as a model's attention and a pool of blocks."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse `copy` and `pickle`.

        Raises:
            CacheError: always.
        """
        raise CacheError(
            f"an {type(self).__name__} cannot be copied or pickled, as it owns the model's attention and memory: "
            "pass the model and the configurations, and make another one where it is needed"
        )


class OneProcess:
    """The process that made this object; a fork has a copy that says so."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a child process: without the threads, and with locks as they were at the fork."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Refuse what only the owner may do.

        Raises:
            EngineError: this process is a fork of the one that made the engine.
        """
        if self.is_forked:
            raise EngineError(
                f"the engine belongs to process {self._pid}, and this is a fork of it, {os.getpid()}: make an engine "
                "here, or start processes by multiprocessing's spawn"
            )
