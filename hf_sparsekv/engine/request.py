"""Request: one prompt on its way through the engine, and what is known of it on the host."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_sparsekv.engine.sampling_params import SamplingParams
    from hf_sparsekv.engine.tables import RequestTables
    from hf_sparsekv.plan import LayerPlan


class RequestStatus(StrEnum):
    """Where a request is: WAITING -> PREFILL -> RUNNING -> FINISHED; preemption leads back to WAITING."""

    WAITING = auto()
    """In the queue, without blocks."""
    PREFILL = auto()
    """Admitted; some of its prompt is still to be computed."""
    RUNNING = auto()
    """Its prompt and its first output are scheduled."""
    FINISHED = auto()
    """Ended, for a `FinishReason`."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = auto()
    """A stop id, a stop string or the end-of-sequence token."""
    LENGTH = auto()
    """`max_tokens` were generated."""
    ABORT = auto()
    """The caller asked for it."""
    ERROR = auto()
    """Something went wrong with this request alone; `Request.error` says what."""


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt, its progress and its outputs. Two requests are never equal."""

    request_id: str
    prompt_ids: list[int]
    params: "SamplingParams"
    """Of these the scheduler reads `max_tokens` alone."""
    plan: "LayerPlan"
    group: Hashable = None
    """The engine's key of the sparse configuration; nothing here looks at it."""
    num_query_rows: int | None = 1
    """Last tokens of the prompt that must be computed even if the prefix cache has them: their queries are read by the
    scorer, and the last one gives the first output. None = all of them, so that nothing comes from the cache."""
    arrival_s: float = 0.0

    # --- written by the scheduler ---
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    """Prompt tokens whose forward pass is scheduled."""
    num_scheduled_outputs: int = 0
    """Outputs that are scheduled to be sampled, or, after a preemption, fed again; the last chunk of a prompt schedules
    the first."""
    tables: "RequestTables | None" = None
    """Its blocks; None while it has none."""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache when it was first admitted."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    # --- written by the engine ---
    output_ids: list[int] = field(default_factory=list)
    """Outputs that have reached the host. A preemption keeps them."""
    row: int | None = None
    """Its place in the device's per-request state."""
    is_streamed: bool = True
    """Whether every token makes an output, or only the end."""
    seed: int = 0
    """Of its random numbers."""
    started_s: float | None = None
    """When its first forward pass was launched."""
    first_token_s: float | None = None
    finished_s: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def max_length(self) -> int:
        """Prompt and the most tokens it may generate."""
        return self.prompt_length + self.params.max_tokens

    @property
    def final_length(self) -> int:
        """Tokens seen by the cache at the most: the last output is sampled, but never fed."""
        return self.max_length - 1

    @property
    def cached_length(self) -> int:
        """Tokens seen by the cache once all that is scheduled has run; in a decode step, the input token included."""
        return self.num_computed + max(self.num_scheduled_outputs - 1, 0)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status is RequestStatus.FINISHED

    @property
    def is_fully_scheduled(self) -> bool:
        """Whether no output is left to be scheduled; the last ones may still be on their way to the host."""
        return self.num_scheduled_outputs >= self.params.max_tokens

    @property
    def is_replaying(self) -> bool:
        """Whether the output that was scheduled last is one that the host knows: the step samples nothing new.

        For the time between `Scheduler.schedule` and the arrival of that step's tokens.
        """
        return 0 < self.num_scheduled_outputs <= len(self.output_ids)
