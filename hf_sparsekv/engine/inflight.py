"""Tokens on their way from the device to the host: copied without waiting, read one step later."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.engine.batch import Batch, Sampled
from hf_sparsekv.engine.request import Request
from hf_sparsekv.engine.runner import StepTokens
from hf_sparsekv.scorers.checks import MAX_SCORE

BAD_LOGITS = "the model's logits hold NaN, or no finite value: no token can be sampled"
BAD_SCORES = (
    f"a scorer returned NaN, infinity or more than {MAX_SCORE:g} for this prompt: nothing can be selected by it"
)


@dataclass(frozen=True)
class HostTokens:
    """The sampled tokens of one group, on the host."""

    ids: list[int]
    is_bad: list[bool]
    """Whether the logits could not be sampled from."""
    logprobs: list[float] | None
    top: list[list[tuple[int, float]]] | None


class InFlight:
    """One launched step."""

    def __init__(self, batch: Batch, tokens: StepTokens) -> None:
        """Start copying; the device does not wait for the host, nor the host for the device."""
        self.sampled: list[list[Sampled]] = [part.sampled for part in batch.groups]
        self.scored: list[Request] = batch.scored
        """Requests whose prompts were scored, in the order of the flags."""
        ended = [chunk for chunk in batch.step.chunks if chunk.is_last and chunk.score_bounds]
        self._problems = [chunk.remains.problems for chunk in ended]
        self._groups = [
            [_to_host(t) for t in (s.ids, s.is_bad, s.logprobs, s.top_ids, s.top_logprobs)] for s in tokens.groups
        ]
        self._can_rank = _to_host(tokens.can_rank)
        self._event: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> tuple[list[HostTokens], dict[str, str]]:
        """The tokens by group and row, and by request id why a prompt could not be scored."""
        if self._event is not None:
            self._event.synchronize()
        groups = []
        for ids, is_bad, logprobs, top_ids, top_logprobs in self._groups:
            assert ids is not None and is_bad is not None
            top = None
            if top_ids is not None and top_logprobs is not None:
                pairs = zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)
                top = [list(zip(i, p, strict=True)) for i, p in pairs]
            chosen = None if logprobs is None else logprobs.tolist()
            groups.append(HostTokens(ids.tolist(), is_bad.tolist(), chosen, top))
        return groups, self._failures()

    def _failures(self) -> dict[str, str]:
        can_rank = [] if self._can_rank is None else self._can_rank.tolist()
        failures = {}
        for request, is_good, problems in zip(self.scored, can_rank, self._problems, strict=True):
            if problems or not is_good:
                failures[request.request_id] = problems[0] if problems else BAD_SCORES
        return failures


def _to_host(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
