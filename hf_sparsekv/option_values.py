"""Values of options: what a caller may write, before anybody asks what it means."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from hf_sparsekv.errors import ConfigError, shown, which_was_meant
from hf_sparsekv.scorers import scorers_with
from hf_sparsekv.scorers.checks import MAX_COUNT


class FrozenOptions(Mapping[str, Any]):
    """A scorer's options, which nobody can change: they were checked."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


def parse_json_object(text: str | bytes, what: str) -> dict[str, Any]:
    """The JSON object that a text holds; a byte order mark before it is no part of it.

    Raises:
        ConfigError: no text, no JSON, or JSON of another kind; `what` says what was looked for.
    """
    if not isinstance(text, (str, bytes)):
        raise ConfigError(f"not {what}: JSON text is needed, got {shown(text)}")
    try:
        values = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except (ValueError, RecursionError) as error:  # no UTF-8, an endless number, brackets in brackets in brackets
        raise ConfigError(f"not {what}: invalid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"not {what}: a JSON object is needed, got {type(values).__name__}")
    return values


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, and no flag."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence of things, not of characters."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def check_choice(name: str, value: object, choices: tuple[str, ...], *, is_optional: bool = True) -> None:
    """Refuse what is none of the choices, with a ConfigError that lists them."""
    if value is None and is_optional:
        return
    if not isinstance(value, str) or value not in choices:  # an array compares with each of them
        raise ConfigError(f"unknown {name} {shown(value)}: choose one of {', '.join(choices)}")


def check_names(values: Mapping[str, object], known: list[str]) -> None:
    """Refuse an option that does not exist, with a ConfigError that says where it belongs or which was meant."""
    for name in values:
        if name not in known:
            hint = which_was_meant(name, known)
            if of_scorers := scorers_with(name):
                hint = (
                    f"it is one of scorer {' or '.join(of_scorers)}: give scorer_options={{{name!r}: ...}}, on the "
                    f"command line --set scorer_options='{{\"{name}\": ...}}'"
                )
            raise ConfigError(f"unknown option {shown(name)}: {hint}")


def int_tuple(name: str, values: object) -> tuple[int, ...]:
    """Layer indices as a tuple.

    Raises:
        ConfigError: no list, or something else than ints in it.
    """
    if not is_list(values):
        raise ConfigError(f"{name} must be a list of layer indices: got {shown(values)}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_COUNT:
            raise ConfigError(f"{name} must hold ints, at most {MAX_COUNT}: got {shown(value)}")
    return tuple(values)
