"""SnapKV: attention from the end of the prompt."""

from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.scorers.base import Pooling, ScoreInputs, Scorer
from hf_sparsekv.scorers.checks import check_flag


@dataclass(frozen=True, kw_only=True)
class SnapKV(Scorer):
    """Attention that a key gets from the prompt's last rows, pooled over its neighbours.

    Source: Li et al., SnapKV (arXiv 2404.14469, section 4). Ours differs: weights are normalised over all keys, the
    window's own included; heads of a KV group share one selection; pooled edges are not padded with zeros.
    PyramidKV (Cai et al., arXiv 2406.02069) is this score with `budget_shape="pyramid"`.
    """

    name = "snapkv"
    queries = "last"
    uses_row_reduction = True
    uses_group_reduction = True
    default_pooling = Pooling("avg", 7)

    value_norm: bool = False
    """Multiply by the norm of the key's value, relative to the mean norm: what is read counts, not only how often."""

    def __post_init__(self) -> None:
        """Check the flag."""
        check_flag("value_norm", self.value_norm)

    def score(self, inputs: ScoreInputs) -> Tensor:
        """See the class."""
        return inputs.attention_received(value_norm=self.value_norm)
