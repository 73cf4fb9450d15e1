"""Group: the running requests that share one sparse configuration, and which row of the device state each has."""

import torch

from hf_sparsekv.cache.rows import RowState
from hf_sparsekv.engine.request import Request
from hf_sparsekv.engine.sampler import SamplerFeatures, SamplerState


class Group:
    """Rows 0 to n - 1 belong to the n requests that decode; a request that leaves is replaced by the last one."""

    def __init__(self, rows: RowState, sampler: SamplerState) -> None:
        """A group without requests."""
        self.rows, self.sampler = rows, sampler
        self.requests: list[Request] = []
        """By row."""

    @property
    def features(self) -> SamplerFeatures:
        """What sampling has to do for the requests of now."""
        return SamplerFeatures.of([request.params for request in self.requests])

    def admit(self, request: Request) -> int:
        """Give the next row to a request whose prompt ends in this step."""
        request.row = len(self.requests)
        self.requests.append(request)
        return request.row

    def feed_known(self) -> None:
        """Requests that were preempted decode the tokens they had, not the ones sampled again."""
        replaying = [request for request in self.requests if request.is_replaying]
        for request in replaying:
            count = len(request.output_ids)
            if request.num_scheduled_outputs == count:  # the next token is new: the sampler knows the true ones again
                assert request.row is not None
                tokens = request.prompt_ids + request.output_ids
                self.sampler.set_row(request.row, request.params, request.seed, tokens, num_outputs=count)
        known = [(r.row, r.output_ids[r.num_scheduled_outputs - 1]) for r in replaying]
        if known:
            rows, tokens = torch.tensor(known, device=self.rows.tokens.device).T
            self.rows.tokens[rows] = tokens

    def retire(self, request: Request) -> None:
        """Take a request's row away, if it has one; what was launched before is not disturbed."""
        row = request.row
        if row is None:
            return
        last = self.requests.pop()
        request.row = None
        if last is request:
            self.rows.clear(slice(row, row + 1))
            self.sampler.clear_row(row)
            return
        self.rows.move(last.row, row)  # type: ignore[arg-type]  # a request in the list has a row
        self.sampler.move_row(last.row, row)  # type: ignore[arg-type]
        last.row = row
        self.requests[row] = last
