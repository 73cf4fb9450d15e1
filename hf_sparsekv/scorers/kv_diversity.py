"""KVDiversity: tokens whose key and value are unlike the others'."""

from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.scorers.base import Pooling, ScoreInputs, Scorer


@dataclass(frozen=True, kw_only=True)
class KVDiversity(Scorer):
    """Key diversity before RoPE plus value diversity, each standardised per head: what is unusual stays.

    The rotation turns like keys at different positions into unlike ones, so it is undone first; what a token says is in
    its value. No query is read: what a question that comes later asks for is still there.

    Source: ours; KeyDiff's key diversity (arXiv 2504.15364) on un-rotated keys, and the same of the values.
    """

    name = "kv_diversity"
    queries = "none"
    is_query_aware = False
    is_probability = False
    default_pooling = Pooling("avg", 7)

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        return inputs.kv_diversity()
