"""Range checks of the scorers' hyper-parameters; every message names the value and its limits."""

from hf_sparsekv.errors import ConfigError, shown
from hf_sparsekv.ops.reference.select import MAX_POOL_WIDTH

MAX_SCORE = 1e30
"""Largest magnitude of a score: fp32 then has room for sums over a pooling window, and for those of many turns."""
MAX_COUNT = 2**31 - 1
"""Largest count of tokens or layers: tables hold them in int32."""
MAX_SEED = 2**40
"""Seeds are mixed with the layer's index and must still fit a generator's 64 bits."""


def check_int(name: str, value: object, *, at_least: int, at_most: int = MAX_COUNT) -> None:
    """A whole number in a closed range, or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise ConfigError(f"{name} must be an int from {at_least} to {at_most}: got {shown(value)}")


def check_fraction(name: str, value: object) -> None:
    """A number in [0, 1], or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number in [0, 1]: got {shown(value)}")


def check_range(name: str, value: object, low: float, high: float) -> None:
    """A number in [low, high], or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}: got {shown(value)}")


def check_gain(name: str, value: object) -> None:
    """A number in [0, MAX_SCORE], or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SCORE:
        raise ConfigError(f"{name} must be a number in [0, {MAX_SCORE:g}]: got {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """True or False, or ConfigError: a string such as "false" would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False: got {shown(value)}")


def check_seed(value: object) -> None:
    """A seed that a generator can take, or ConfigError."""
    check_int("seed", value, at_least=0, at_most=MAX_SEED)


def is_pool_width(value: object) -> bool:
    """Whether `pool_scores` takes this as its width."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value % 2 == 1 and 1 <= value <= MAX_POOL_WIDTH
