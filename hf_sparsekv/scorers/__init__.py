"""Which tokens matter: one published method a file, and a registry of their names.

A scorer takes tensors and returns tensors; it never sees a cache, a request or a model.
"""

from hf_sparsekv.scorers.base import Pooling, ScoreInputs, Scorer, TwoLists
from hf_sparsekv.scorers.registry import (
    build_scorer,
    describe_scorer,
    register_scorer,
    scorer_names,
    scorer_table,
    scorers_with,
    unregister_scorer,
)

__all__ = [
    "Pooling",
    "ScoreInputs",
    "Scorer",
    "TwoLists",
    "build_scorer",
    "describe_scorer",
    "register_scorer",
    "scorer_names",
    "scorer_table",
    "scorers_with",
    "unregister_scorer",
]
