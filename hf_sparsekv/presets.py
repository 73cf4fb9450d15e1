"""Presets: named sets of options, chosen by measurement where the name is ours, as published where it is not.

The study behind them, with its tables, is a page of the documentation: benchmarks/study.
"""

from collections.abc import Mapping
from typing import Any

from hf_sparsekv.errors import ConfigError, shown

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # What the options default to: the best on the whole, also where the question comes later.
    "balanced": {"num_full_layers": 0, "scorer": "hybrid"},
    # All of the budget by what the prompt's last rows look at: the best where the prompt ends with what is asked.
    "question-in-window": {
        "num_full_layers": 0,
        "scorer": "snapkv",
        "row_reduction": "max",
        "pool_kernel_size": 21,
    },
    # The original: three full layers, the window's mean over rows, SnapKV's pooling (arXiv 2404.14469).
    # While decoding it replaces whatever scores lowest, the prompt's tokens too.
    "published": {"num_full_layers": 3, "scorer": "snapkv", "prompt_share": 0.0},
}
PRESET_OPTIONS = frozenset(name for options in PRESETS.values() for name in options) | {"full_layers", "scorer_options"}
"""What a preset decides: options of these names that came before it no longer count."""


def without_preset_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options but those that a preset decides: what is left when a preset comes over them."""
    return {name: value for name, value in values.items() if name not in PRESET_OPTIONS}


def preset_options(name: object) -> Mapping[str, Any]:
    """The options that a preset stands for.

    Raises:
        ConfigError: no such preset.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"unknown preset {shown(name)}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
