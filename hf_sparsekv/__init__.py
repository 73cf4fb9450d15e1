"""hf_sparsekv: Hugging Face models generate with a small, layer-wise sparse KV cache.

Importing changes nothing; `register()` adds the attention implementation "sparsekv" to transformers.
"""

from hf_sparsekv.config import SparseKVConfig
from hf_sparsekv.errors import CacheError, ConfigError, InputError, ModelError, ScoreError, SparseKVError
from hf_sparsekv.generate import GenerateOutput, generate
from hf_sparsekv.hf.cache_adapter import SparseKVCache
from hf_sparsekv.hf.register import register, unregister
from hf_sparsekv.plan import LayerPlan
from hf_sparsekv.scorers import ScoreInputs, Scorer, register_scorer
from hf_sparsekv.version import __version__

__all__ = [
    "CacheError",
    "ConfigError",
    "GenerateOutput",
    "InputError",
    "LayerPlan",
    "ModelError",
    "ScoreError",
    "ScoreInputs",
    "Scorer",
    "SparseKVCache",
    "SparseKVConfig",
    "SparseKVError",
    "__version__",
    "generate",
    "register",
    "register_scorer",
    "unregister",
]
