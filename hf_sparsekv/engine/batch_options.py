"""What made the results of a batch run, kept beside them: a run with other options does not go on by mistake."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_sparsekv.errors import InputError, shown

_SHOWN_CHANGES = 3
_WAY_OUT = (
    "it says with which options the results there were made; if they are the same, remove it, else give another -o"
)


def check_options(output: Path, options: Mapping[str, Any], *, has_results: bool, may_mix: bool) -> None:
    """Refuse to go on with other options; to be called under the output's lock.

    Results of which nobody has written down the options are gone on with.

    Args:
        output: of the run; its options lie beside it.
        options: by name, JSON-able: those that decide what an answer is.
        has_results: whether the output, or a part of it, has any; without them an earlier run's options do not matter.
        may_mix: go on all the same, this time: the next run is held to the first one's again.
    Raises:
        InputError: names the options that differ, or the file that no longer says what they were.
    """
    path, given = options_of(output), json.loads(json.dumps(options))
    if not has_results:
        _store(path, given)
        return
    if may_mix:
        return
    stored = _stored(path)
    if stored is None or stored == given:
        return
    changed = [name for name in given if name in stored and stored[name] != given[name]]
    if changed:
        changes = [f"{name} was {shown(stored[name])}, is {shown(given[name])}" for name in changed[:_SHOWN_CHANGES]]
        more = f" and {len(changed) - _SHOWN_CHANGES} more" if len(changed) > _SHOWN_CHANGES else ""
        raise InputError(
            f"the results in {output} were made with other options ({'; '.join(changes)}{more}): give the same ones, "
            "another -o, or --mix-options to go on with these"
        )
    _store(path, given)


def options_of(output: Path) -> Path:
    """Where the options of an output lie."""
    real = output.resolve()
    return real.with_name(f".{real.name}.options.json")


def _stored(path: Path) -> dict[str, Any] | None:
    """What a run has written down, None if none has; a file that cannot be read is no such run's."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}: {_WAY_OUT}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} does not hold the options of a run: {_WAY_OUT}")
    return values


def _store(path: Path, options: Mapping[str, Any]) -> None:
    target = path.with_name(f"{path.name}.new")
    try:
        with target.open("w", encoding="utf-8") as file:
            json.dump(options, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        target.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
