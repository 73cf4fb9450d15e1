"""The modes that a caller may be in, and that what a cache stores must not depend on."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

_DEVICE_TYPES = ("cpu", "cuda")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_plain_modes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Inside the function nothing has gradients, and the caller's inference mode and autocast do not hold.

    What is made in inference mode could not be written to outside it, and autocast would score in half precision.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if _are_plain():  # a decode step of generate: once a layer, so entering nothing is worth it
            return function(*args, **kwargs)
        with _plain_modes():
            return function(*args, **kwargs)

    return run


def _are_plain() -> bool:
    is_casting = any(torch.is_autocast_enabled(device_type) for device_type in _DEVICE_TYPES)
    return not (torch.is_inference_mode_enabled() or torch.is_grad_enabled() or is_casting)


@contextmanager
def _plain_modes() -> Iterator[None]:
    cpu, cuda = (torch.autocast(device_type, enabled=False) for device_type in _DEVICE_TYPES)
    # no_grad comes last: leaving inference mode switches gradients on.
    with cpu, cuda, torch.inference_mode(False), torch.no_grad():
        yield
