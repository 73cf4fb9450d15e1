"""Hybrid: what the last rows look at, in union with tokens unlike the others."""

from dataclasses import dataclass

from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.scorers.base import Pooling, ScoreInputs, Scorer, TwoLists
from hf_sparsekv.scorers.checks import check_flag, check_fraction, check_int

DIVERSITIES = ("keys_and_values", "keys")


@dataclass(frozen=True, kw_only=True)
class Hybrid(Scorer):
    """A share of the budget by attention from the prompt's last rows, the rest by diversity.

    The window score takes the maximum over rows and spreads widely, so that what stands around an attended token stays
    with it; diversity saves what a question that comes later may ask for.

    Source: ours; its parts are SnapKV's window (arXiv 2404.14469) and, see `KVDiversity`, KeyDiff's key diversity
    (arXiv 2504.15364).
    """

    name = "hybrid"
    queries = "last"
    uses_row_reduction = True
    uses_group_reduction = True
    default_row_reduction = "max"
    default_pooling = Pooling("avg", 21)

    share: float = 0.5
    """Part of the free budget that the window score fills, in [0, 1]."""
    value_norm: bool = False
    """Multiply the window score by the norm of the key's value, relative to the mean norm."""
    diversity: str = "keys_and_values"
    """What the rest goes by: "keys_and_values" (scorer `kv_diversity`) or "keys" (scorer `keydiff`)."""
    diversity_width: int = 7
    """Width of the average pooling of diversity, odd."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_fraction("share", self.share)
        if self.diversity not in DIVERSITIES:
            raise ConfigError(f"diversity must be one of {', '.join(DIVERSITIES)}: got {shown(self.diversity)}")
        check_flag("value_norm", self.value_norm)
        check_int("diversity_width", self.diversity_width, at_least=1, at_most=41)
        if self.diversity_width % 2 == 0:
            raise ConfigError(f"diversity_width must be odd: got {self.diversity_width}")

    def score(self, inputs: ScoreInputs) -> TwoLists:
        """See the class."""
        return TwoLists(
            primary=inputs.attention_received(value_norm=self.value_norm),
            secondary=inputs.key_diversity() if self.diversity == "keys" else inputs.kv_diversity(),
            share=self.share,
            secondary_pooling="avg",
            secondary_width=self.diversity_width,
        )
