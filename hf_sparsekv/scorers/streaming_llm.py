"""StreamingLLM: sinks and the most recent tokens."""

from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.scorers.base import ScoreInputs, Scorer


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Scorer):
    """The newest tokens beside the sinks, whatever they say.

    Source: Xiao et al., StreamingLLM (arXiv 2309.17453, section 3.2). Ours differs: positions are not renumbered
    inside the cache, so that full and window layers agree about them.
    """

    name = "streaming_llm"
    queries = "none"
    is_query_aware = False
    is_probability = False
    default_decode = "ring"
    ring_freezes_selection = False

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        return inputs.key_positions().float()
