"""Between the engine's thread and what surrounds it: what it needs of an engine, and who takes the outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hf_sparsekv.engine.output import RequestOutput
from hf_sparsekv.errors import EngineError


class Steps(Protocol):
    """What is needed of an engine."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        ...

    def add_request(self, prompt: str | Sequence[int], params: Any = None, *, config: Any, request_id: str) -> str:
        """Queue a request."""
        ...

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request."""
        ...

    def step(self) -> list[RequestOutput]:
        """One forward pass."""
        ...


class Consumer(Protocol):
    """Where the outputs of one request go; called in the engine's thread."""

    def put(self, output: RequestOutput) -> None:
        """Take an output."""
        ...

    def fail(self, error: BaseException) -> None:
        """Nothing more will come, because of this."""
        ...


@dataclass(frozen=True, eq=False)
class Callback:
    """A function as a consumer."""

    on_output: Callable[[RequestOutput | BaseException], object]

    def put(self, output: RequestOutput) -> None:
        """Hand it on."""
        self.on_output(output)

    def fail(self, error: BaseException) -> None:
        """Hand on what is no refusal."""
        if isinstance(error, EngineError):  # a refusal is raised by `add_request` itself
            self.on_output(error)
