"""TOVA: attention of the last row alone."""

from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.scorers.base import ScoreInputs, Scorer


@dataclass(frozen=True, kw_only=True)
class TOVA(Scorer):
    """Attention that a key gets from the newest row; while decoding, the least attended token goes at every step.

    Source: Oren et al., Token Omission Via Attention (arXiv 2401.06104, section 3.2). Ours differs: the mean is over
    the query heads of a KV head, not over all heads of the layer, and sinks and recent tokens are protected.
    """

    name = "tova"
    queries = "last"
    uses_group_reduction = True
    default_prompt_share = 0.0
    decode_decay = 0.0
    decode_gain = 1.0

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        return inputs.attention_received(num_rows=1, row_reduction="mean")
