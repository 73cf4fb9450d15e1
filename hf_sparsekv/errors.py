"""Everything that can go wrong for a user, one class per kind of mistake.

Every message names the value that was given, the limit it broke, and what to do instead.
"""

from collections.abc import Collection
from difflib import get_close_matches

_SHOWN_CHARACTERS = 80
_SHOWN_BITS = 256


def shown(value: object) -> str:
    """A value as a message shows it: on one line, and not long."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # Python refuses to print the longest ones
        return f"an int of {value.bit_length()} bits"
    try:
        text = " ".join(repr(value).split())
    except RecursionError:  # lists in lists in lists, as a file may hold
        return f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def which_was_meant(name: object, known: Collection[str]) -> str:
    """What a message about an unknown option ends with: the one that looks like it, or all there are."""
    close = get_close_matches(name, known, n=1) if isinstance(name, str) else []
    return f"did you mean {close[0]!r}?" if close else f"options are {', '.join(known)}"


class SparseKVError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(SparseKVError, ValueError):
    """An option is unknown, out of range, without effect, or contradicts another one."""


class ModelError(SparseKVError, ValueError):
    """The model uses something that a sparse cache does not support."""


class CacheError(SparseKVError, RuntimeError):
    """The cache is used in a way that its contents do not allow."""


class InputError(SparseKVError, ValueError):
    """A prompt, a file or a tensor is not what the call needs."""


class ScoreError(SparseKVError, ArithmeticError):
    """A scorer returned something that cannot rank tokens: NaN, infinity, a wrong shape."""


class RequestError(SparseKVError, ValueError):
    """A request that the engine cannot serve, or that is not in the state the call needs."""


class PoolError(SparseKVError, RuntimeError):
    """Blocks were asked for that are not free, or given back that were not taken."""


class EngineError(SparseKVError, RuntimeError):
    """The engine itself has failed or was closed: nothing that it was running can go on."""


class ReplicaLostError(EngineError):
    """Another process that this one shares a model with has ended; that one knows why."""
