"""Hybrid: what the last rows look at, in union with tokens unlike the others or with those the newest row looks at."""

from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.scorers.base import Pooling, ScoreInputs, Scorer, TwoLists
from hf_sparsekv.scorers.checks import check_flag, check_fraction, check_int

RESTS = ("keys_and_values", "keys", "newest_row")
DEFAULT_REST_WIDTH = 7


@dataclass(frozen=True, kw_only=True)
class Hybrid(Scorer):
    """A share of the budget by attention from the prompt's last rows, the rest by diversity or by the newest row.

    The window score takes the maximum over rows and spreads widely, so that what stands around an attended token stays
    with it; diversity saves what a question that comes later may ask for; the newest row, which is not spread, what the
    answer's first token reads.

    In a bounded prefill the window of an early chunk is not that of the question. There diversity has all of the
    budget, so that the last chunk's window finds more of what it looks for.

    Source: ours; its parts are SnapKV's window (arXiv 2404.14469) and, see `KVDiversity`, KeyDiff's key diversity
    (arXiv 2504.15364), or TOVA's row (arXiv 2401.06104).
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
    rest: str = "keys_and_values"
    """What the rest goes by: "keys_and_values" (scorer `kv_diversity`), "keys" (scorer `keydiff`) or "newest_row"
    (scorer `tova`)."""
    rest_width: int = DEFAULT_REST_WIDTH
    """Width of the average pooling of diversity, odd; the newest row is not pooled."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_fraction("share", self.share)
        if self.rest not in RESTS:
            raise ConfigError(f"rest must be one of {', '.join(RESTS)}: got {shown(self.rest)}")
        check_flag("value_norm", self.value_norm)
        check_int("rest_width", self.rest_width, at_least=1, at_most=41)
        if self.rest_width % 2 == 0:
            raise ConfigError(f"rest_width must be odd: got {self.rest_width}")
        if self.rest == "newest_row" and self.rest_width != DEFAULT_REST_WIDTH:
            raise ConfigError(f"rest_width={self.rest_width} has no effect with rest='newest_row': leave it out")

    def score(self, inputs: ScoreInputs) -> TwoLists:
        """See the class."""
        is_pooled = self.rest != "newest_row"
        return TwoLists(
            primary=inputs.attention_received(value_norm=self.value_norm),
            secondary=self._rest(inputs),
            share=self._share(inputs),
            secondary_pooling="avg" if is_pooled else "none",
            secondary_width=self.rest_width if is_pooled else 1,
        )

    def _share(self, inputs: ScoreInputs) -> float:
        """Of the window score: none of it where the prompt goes on, if what fills the budget then is diversity."""
        return self.share if inputs.is_last or self.rest == "newest_row" else 0.0

    def _rest(self, inputs: ScoreInputs) -> Tensor:
        """fp32 [B, K, N]: what the rest goes by."""
        if self.rest == "newest_row":
            return inputs.attention_received(num_rows=1, row_reduction="mean")
        return inputs.key_diversity() if self.rest == "keys" else inputs.kv_diversity()
