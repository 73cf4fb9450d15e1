"""What made the results of a batch run, kept beside them: a run with other options does not go on by mistake."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_sparsekv.errors import InputError, shown

_SHOWN_CHANGES = 3


def check_options(output: Path, options: Mapping[str, Any], *, has_results: bool, may_mix: bool) -> None:
    """Refuse to go on with other options; to be called under the output's lock.

    Results of which nobody has written down the options are gone on with.

    Args:
        output: of the run; its options lie beside it.
        options: by name, JSON-able: those that decide what an answer is.
        has_results: whether the output, or a part of it, has any; without them an earlier run's options do not matter.
        may_mix: go on all the same, this time: the next run is held to the first one's again.
    Raises:
        InputError: names the options that differ.
    """
    path = options_of(output)
    stored, given = _stored(path), json.loads(json.dumps(options))
    if has_results and stored is None:
        return
    changed = [name for name in given if stored is not None and name in stored and stored[name] != given[name]]
    if has_results and changed:
        if may_mix:
            return
        assert stored is not None
        changes = [f"{name} was {shown(stored[name])}, is {shown(given[name])}" for name in changed[:_SHOWN_CHANGES]]
        more = f" and {len(changed) - _SHOWN_CHANGES} more" if len(changed) > _SHOWN_CHANGES else ""
        raise InputError(
            f"the results in {output} were made with other options ({'; '.join(changes)}{more}): give the same ones, "
            "another -o, or --mix-options to go on with these"
        )
    if stored != given:
        _store(path, given)


def options_of(output: Path) -> Path:
    """Where the options of an output lie."""
    real = output.resolve()
    return real.with_name(f".{real.name}.options.json")


def _stored(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


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
