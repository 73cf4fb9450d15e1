"""Range checks of the scorers' hyper-parameters; every message names the value and its limits."""

from math import isfinite

from hf_sparsekv.errors import ConfigError
from hf_sparsekv.ops.reference.select import MAX_POOL_WIDTH

MAX_SCORE = 1e30
"""Largest magnitude of a score: fp32 then has room for sums over a pooling window, and for those of many turns."""
MAX_SEED = 2**40
"""Seeds are mixed with the layer's index and must still fit a generator's 64 bits."""


def check_int(name: str, value: object, *, at_least: int, at_most: int | None = None) -> None:
    """A whole number in a closed range, or ConfigError."""
    limit = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an int {limit}: got {value!r}")
    if value < at_least or (at_most is not None and value > at_most):
        raise ConfigError(f"{name} must be an int {limit}: got {value}")


def check_fraction(name: str, value: object) -> None:
    """A number in [0, 1], or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number in [0, 1]: got {value!r}")


def check_positive(name: str, value: object) -> None:
    """A finite number above 0, or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
        raise ConfigError(f"{name} must be a finite number > 0: got {value!r}")


def check_gain(name: str, value: object) -> None:
    """A number in [0, MAX_SCORE], or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SCORE:
        raise ConfigError(f"{name} must be a number in [0, {MAX_SCORE:g}]: got {value!r}")


def check_flag(name: str, value: object) -> None:
    """True or False, or ConfigError: a string such as "false" would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False: got {value!r}")


def check_seed(value: object) -> None:
    """A seed that a generator can take, or ConfigError."""
    check_int("seed", value, at_least=0, at_most=MAX_SEED)


def is_pool_width(value: object) -> bool:
    """Whether `pool_scores` takes this as its width."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value % 2 == 1 and 1 <= value <= MAX_POOL_WIDTH
