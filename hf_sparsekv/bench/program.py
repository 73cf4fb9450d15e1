"""What the measuring programs beside the package (`evals/*.py`) have in common: numbers they take, and how they end."""

import argparse
import sys
from collections.abc import Callable

from hf_sparsekv.errors import SparseKVError

USAGE_ERROR, STOPPED = 2, 130


def at_least(limit: int) -> Callable[[str], int]:
    """What argparse reads a whole number with that may not be smaller."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = limit - 1
        if value < limit:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {limit} on")
        return value

    return number


def ended(main: Callable[[], int | None]) -> int:
    """The exit code of a program; a user's mistake is one line on stderr, Ctrl-C another."""
    try:
        return main() or 0
    except SparseKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
