"""Pictures of what `hf_sparsekv.profile` measures or sees: one function a picture, each returns a matplotlib Figure.

`figure.savefig("x.png")` writes one. Nothing global is touched, and pyplot stays out. matplotlib comes with the extra
`plots`. A number that is not finite is refused: it would be left blank, or drawn as if it were one.
"""

from hf_sparsekv.plots.canvas import MAX_COLUMNS
from hf_sparsekv.plots.engine import layer_blocks, pool_over_time, stored_over_time
from hf_sparsekv.plots.layers import layer_budgets, layer_errors, layer_magnitudes
from hf_sparsekv.plots.prompts import MAX_TEXT_TOKENS, activation_surface, attention_patterns, kept_map, score_map
from hf_sparsekv.plots.text import LINE_CHARACTERS

__all__ = [
    "LINE_CHARACTERS",
    "MAX_COLUMNS",
    "MAX_TEXT_TOKENS",
    "activation_surface",
    "attention_patterns",
    "kept_map",
    "layer_blocks",
    "layer_budgets",
    "layer_errors",
    "layer_magnitudes",
    "pool_over_time",
    "score_map",
    "stored_over_time",
]
