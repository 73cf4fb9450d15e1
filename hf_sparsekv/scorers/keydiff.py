"""KeyDiff: keys unlike the others."""

from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.scorers.base import ScoreInputs, Scorer


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Scorer):
    """Negative cosine between a key and the mean direction of all keys: what is unusual stays.

    Source: Park et al., KeyDiff (arXiv 2504.15364, section 3). Ours differs: sinks and recent tokens are protected, and
    decoding goes on with the rank of each kept key, mixed with the attention it gets.
    """

    name = "keydiff"
    queries = "none"
    is_query_aware = False
    is_probability = False

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        return inputs.key_diversity()
