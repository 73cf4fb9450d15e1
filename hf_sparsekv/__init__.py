"""hf_sparsekv: Hugging Face models generate with a small, layer-wise sparse KV cache.

Importing changes nothing; `register()` adds the attention implementation "sparsekv" to transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_sparsekv.version import __version__

if TYPE_CHECKING:
    from hf_sparsekv import plots as plots
    from hf_sparsekv import profile as profile
    from hf_sparsekv.budget_plan import BudgetPlan
    from hf_sparsekv.config import SparseKVConfig
    from hf_sparsekv.engine.config import EngineConfig
    from hf_sparsekv.engine.engine import Engine
    from hf_sparsekv.engine.output import RequestOutput
    from hf_sparsekv.engine.request import FinishReason
    from hf_sparsekv.engine.sampling_params import SamplingParams
    from hf_sparsekv.errors import (
        CacheError,
        ConfigError,
        EngineError,
        InputError,
        ModelError,
        RequestError,
        ScoreError,
        SparseKVError,
    )
    from hf_sparsekv.generation import GenerateOutput, generate
    from hf_sparsekv.hf.cache_adapter import SparseKVCache
    from hf_sparsekv.hf.compat import CACHE_KEYWORD
    from hf_sparsekv.hf.register import register, unregister
    from hf_sparsekv.models_store import builtin_model_path
    from hf_sparsekv.plan import LayerPlan
    from hf_sparsekv.scorers import ScoreInputs, Scorer, register_scorer, unregister_scorer

__all__ = [
    "CACHE_KEYWORD",
    "BudgetPlan",
    "CacheError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "FinishReason",
    "GenerateOutput",
    "InputError",
    "LayerPlan",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoreError",
    "ScoreInputs",
    "Scorer",
    "SparseKVCache",
    "SparseKVConfig",
    "SparseKVError",
    "__version__",
    "builtin_model_path",
    "generate",
    "register",
    "register_scorer",
    "unregister",
    "unregister_scorer",
]

_ROOMS = {
    "budget_plan": ("BudgetPlan",),
    "config": ("SparseKVConfig",),
    "engine.config": ("EngineConfig",),
    "engine.engine": ("Engine",),
    "engine.output": ("RequestOutput",),
    "engine.request": ("FinishReason",),
    "engine.sampling_params": ("SamplingParams",),
    "errors": (
        "CacheError",
        "ConfigError",
        "EngineError",
        "InputError",
        "ModelError",
        "RequestError",
        "ScoreError",
        "SparseKVError",
    ),
    "generation": ("GenerateOutput", "generate"),
    "hf.cache_adapter": ("SparseKVCache",),
    "hf.compat": ("CACHE_KEYWORD",),
    "hf.register": ("register", "unregister"),
    "models_store": ("builtin_model_path",),
    "plan": ("LayerPlan",),
    "scorers": ("ScoreInputs", "Scorer", "register_scorer", "unregister_scorer"),
}
_WHOLE_ROOMS = ("plots", "profile")
"""Public by their own names."""
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: torch takes seconds, and `--help` needs none of it."""
    if name in _WHOLE_ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
