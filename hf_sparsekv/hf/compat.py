"""What differs between the supported transformers versions, all of it."""

import warnings

import transformers
from packaging.version import Version

MINIMUM_VERSION = "5.17"
FIRST_UNTESTED_VERSION = "5.25"

_VERSION = Version(transformers.__version__)

CACHE_KEYWORD = "cache" if Version("5.24") <= _VERSION else "past_key_values"
"""Name of the cache argument of `model(...)` and `model.generate(...)`; renamed in 5.24."""
DISTRIBUTED_TAKES_MESH = Version("5.18") > _VERSION
"""Whether loading with a DistributedConfig uses the device mesh that it is given; later versions make their own."""


def check_version() -> None:
    """Refuse transformers versions that cannot work, warn about ones that nobody tried.

    Raises:
        ImportError: transformers is older than the oldest supported version.
    """
    if Version(MINIMUM_VERSION) > _VERSION:
        raise ImportError(
            f"hf_sparsekv needs transformers >= {MINIMUM_VERSION}, found {transformers.__version__}: "
            f"pip install 'transformers>={MINIMUM_VERSION},<{FIRST_UNTESTED_VERSION}'"
        )
    if Version(FIRST_UNTESTED_VERSION) <= _VERSION:
        warnings.warn(
            f"hf_sparsekv is tested with transformers >= {MINIMUM_VERSION}, < {FIRST_UNTESTED_VERSION}; "
            f"found {transformers.__version__}",
            stacklevel=3,
        )


def can_chunk_a_later_turn() -> bool:
    """Whether transformers' chunked prefill goes on where a cache ends; older ones begin again at the first token."""
    return "prefill_ids" in transformers.GenerationMixin._prefill.__code__.co_varnames
