"""Which prefill backend takes a call: one that the caller names, one that the environment names, or the first that can.

A name holds for what runs inside `using`, in the current thread; without one, the environment variable
HF_SPARSEKV_ATTENTION is asked, and without that the table in `prefill_table`, from the top.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from hf_sparsekv.errors import ConfigError
from hf_sparsekv.ops.prefill_table import BACKENDS, Backend, Problem

BACKEND_VARIABLE = "HF_SPARSEKV_ATTENTION"
"""Name of the backend that must take every call without a mask where the caller names none."""
_NO_GPU = "no GPU that torch sees"

_in_use: ContextVar[str | None] = ContextVar("hf_sparsekv_backend", default=None)


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """Inside, the named backend takes every call without a mask; None leaves the choice as it is.

    Raises:
        ConfigError: there is no such backend.
    """
    token = _in_use.set(_in_use.get() if name is None else check_known(name))
    try:
        yield
    finally:
        _in_use.reset(token)


def named() -> str | None:
    """The backend that the caller or else the environment names; None = the first that can."""
    return _in_use.get() or os.environ.get(BACKEND_VARIABLE) or None


def gives_lse() -> bool:
    """Whether the LSE that the ops return is one: a backend that was named may hide it."""
    return all(backend.lse is not None for backend in BACKENDS if backend.name == named())


def choose(problem: Problem) -> Backend:
    """Who takes a problem.

    A backend that was named takes everything but masks and empty tensors, which only the definition can.

    Raises:
        ConfigError: what was named does not exist or cannot take the problem here.
    """
    name = named()
    if name is None:
        unasked = (backend for backend in BACKENDS if not backend.is_on_request)
        return next(backend for backend in unasked if not (backend.refusal(problem) or backend.waits(problem)))
    check_known(name)
    if problem.has_mask or problem.is_empty:
        return next(backend for backend in BACKENDS if backend.is_definition)
    return check_usable(name, problem)


def check_known(name: str) -> str:
    """The name, if it is one of the table's.

    Raises:
        ConfigError: it is not; what there is on this machine, and why not the others.
    """
    if not isinstance(name, str) or name not in {backend.name for backend in BACKENDS}:
        raise ConfigError(f"{_wish(name)}: no such backend; name {_choices(obstacles())}")
    return name


def check_usable(name: str, problem: Problem) -> Backend:
    """The backend of a name, if it can take a problem here.

    Raises:
        ConfigError: there is no such backend, or it cannot: why, who can, and why not the others.
    """
    check_known(name)
    backend = next(backend for backend in BACKENDS if backend.name == name)
    if (refusal := backend.refusal(problem)) is not None:
        others = _choices({other.name: other.refusal(problem) for other in BACKENDS if other.name != name})
        raise ConfigError(f"{_wish(name)}: {name} {refusal}; leave it out, or name {others}")
    return backend


def check_prompts(
    name: str | None, device: torch.device | str, dtype: torch.dtype, head_dim: int, *, is_whole: bool
) -> None:
    """Refuse what was named if it cannot read the prompts of a model, before anything is computed.

    Args:
        name: what the caller names; None = what is named already, if anything is.
        device, dtype, head_dim: the model's.
        is_whole: nothing is ever stored before a prompt's rows.
    Raises:
        ConfigError: see `check_usable`.
    """
    wanted = name or named()
    if wanted is not None:
        check_usable(wanted, prompt_problem(device, dtype, head_dim, is_whole=is_whole))


def prompt_problem(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, *, is_whole: bool = True, has_mask: bool = False
) -> Problem:
    """A causal prompt of one request."""
    where = torch.device(device)
    return Problem(
        device=where.type,
        compute_capability=torch.cuda.get_device_capability(where)[0] if where.type == "cuda" else None,
        dtype=dtype,
        head_dim=head_dim,
        is_causal=True,
        is_whole=is_whole,
        has_mask=has_mask,
        is_empty=False,
    )


def obstacles() -> dict[str, str | None]:
    """By name: why this machine cannot run a backend on the friendliest problem, or None."""
    return {backend.name: _obstacle(backend) for backend in BACKENDS}


def _obstacle(backend: Backend) -> str | None:
    if backend.device == "cuda" and not torch.cuda.is_available():
        return backend.missing() or _NO_GPU
    device = backend.device or "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return backend.refusal(prompt_problem(device, dtype, 128))


def _wish(name: object) -> str:
    """What was asked for, as the user asked."""
    return f"{BACKEND_VARIABLE}={name}" if name == os.environ.get(BACKEND_VARIABLE) else f"backend {name!r}"


def _choices(reasons: dict[str, str | None]) -> str:
    """Who can, and why not the others."""
    names: dict[str | None, list[str]] = {None: []}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    able = ", ".join(names.pop(None))
    unable = "; ".join(f"{', '.join(of_reason)}: {reason}" for reason, of_reason in names.items())
    return f"one of: {able}" + (f" (not {unable})" if unable else "")
