"""The results of single samples on disk: JSON lines that a later run goes on with, if it is the same experiment."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hf_sparsekv.engine.part_files import PartFiles
from hf_sparsekv.errors import InputError, shown

HEADER_ID = "run"
_MODEL_FACTS = ("weights_sha256", "dtype", "device")
"""Of a model that must not change; what it is called may."""


def sample_parts(
    path: Path, order: Callable[[], Sequence[str]] = tuple, *, replica: int = 0, num_replicas: int = 1
) -> PartFiles:
    """A file of results, and the parts that it has while several processes measure.

    Args:
        path: of the file.
        order: the ids of the results, asked for when parts are merged.
        replica, num_replicas: which of how many processes this is.
    """

    def places() -> dict[str, int]:
        return {line_id: number for number, line_id in enumerate([HEADER_ID, *order()])}

    return PartFiles(
        path, places, replica=replica, num_replicas=num_replicas, fields=frozenset(("id",)), first_field=None
    )


class SampleLines:
    """A context manager: locked, mended and read on entry, on the disk on exit.

    Args:
        parts: of the file, see `sample_parts`; it is made if it is not there.
        facts: what made the results; the first line.
    """

    def __init__(self, parts: PartFiles, facts: Mapping[str, Any]) -> None:
        self.path, self.facts = parts.output, dict(facts)
        self.known: dict[str, dict[str, Any]] = {}
        """Lines by id."""
        self._parts, self._file = parts, parts.whole()

    def __enter__(self) -> "SampleLines":
        """Open the file, cut off a torn line, and read the others; before that, merge what lies in parts.

        Raises:
            InputError: it holds something else, or results of another experiment, or is being written to.
        """
        self._parts.merge_leftovers()
        self._file.__enter__()
        try:
            lines = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
            self.known = {str(line["id"]): line for line in lines}
            header = self.known.pop(HEADER_ID, None)
            if header is not None:
                self._check_header(header)
            elif self.known:
                raise InputError(f"{self.path} holds results of something else: give another file")
            else:
                self._file.write(HEADER_ID, self.facts)
        except BaseException as error:
            self._file.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write through to the disk and let the file go."""
        self._file.__exit__(kind, error, trace)

    def holds(self, line_id: str, expected: Mapping[str, Any]) -> bool:
        """Whether a result is there.

        Args:
            line_id: of a sample and a configuration.
            expected: values that tell whether it is of the same sample and configuration.
        Raises:
            InputError: one is there, of something else by the same name.
        """
        if line_id not in self.known:
            return False
        changed = [name for name, value in expected.items() if self.known[line_id].get(name) != value]
        if changed:
            raise InputError(
                f"{self.path}: the result {line_id} was made with another {changed[0]} (the essay, the tokenizer or an "
                "option has changed): give another file"
            )
        return True

    def add(self, line_id: str, line: dict[str, Any]) -> None:
        """Append a result."""
        self._file.write(line_id, line)
        self.known[line_id] = line

    def _check_header(self, found: Mapping[str, Any]) -> None:
        for name, value in self.facts.items():
            there, here = found.get(name), value
            if name == "model" and isinstance(there, Mapping):
                there, here = ({fact: facts.get(fact) for fact in _MODEL_FACTS} for facts in (there, here))
            if there != here:
                raise InputError(
                    f"{self.path} was begun with {name} {shown(there)}, this is {shown(here)}: give another file"
                )
