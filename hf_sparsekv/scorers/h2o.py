"""H2O: attention accumulated over every row."""

from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.scorers.base import ScoreInputs, Scorer


@dataclass(frozen=True, kw_only=True)
class H2O(Scorer):
    """Heavy hitters: attention that a key got from all rows so far, summed.

    Source: Zhang et al., H2O (arXiv 2306.14048, section 4). Ours differs: the sum is taken over the prompt in one pass
    at its end and the mean over a KV group; decoding goes on with the same running sum.
    """

    name = "h2o"
    queries = "all"
    uses_group_reduction = True
    default_prompt_share = 0.0
    decode_decay = 1.0
    decode_gain = 1.0

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        num_rows = min(inputs.queries.shape[2], inputs.keys.shape[2])
        total = inputs.attention_received(row_reduction="mean") * num_rows
        return total if inputs.carried is None else total + inputs.carried
