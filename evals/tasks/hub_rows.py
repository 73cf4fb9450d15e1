"""Rows of long-context data sets: read from the hub, or from a file of JSON lines with the same fields.

Both sets that are read here have a context, a question, the beginning of the answer, and reference answers.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sparsekv.errors import InputError, shown

SPLIT = "test"


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What a data set calls its fields; where there are several names, the first one that a row has."""

    answers: str
    question: tuple[str, ...] = ("question",)
    task: tuple[str, ...] = ("task",)
    answer_prefix: str | None = None
    """Stands for the field where a row has none; None: every row needs one."""


@dataclass(frozen=True, kw_only=True)
class HubRow:
    """One question."""

    place: str
    """Where it stands, for messages."""
    task: str
    context: str
    question: str
    """May be empty, where the context asks."""
    answer_prefix: str
    answers: tuple[str, ...]
    """At least one."""
    classes: tuple[str, ...] = ()
    """All answers that there are; empty where they are not given."""


def load_rows(source: str, config: str | None, fields: Fields) -> list[HubRow]:
    """All rows, in the order of the source.

    Args:
        source: a path of JSON lines, which is a text that ends in .jsonl, or a data set's id on the hub.
        config: of the data set; a file has none.
        fields: their names.
    Raises:
        InputError: a row is not what it should be (by line and field), no row, or the source cannot be read.
    """
    if source.endswith(".jsonl"):
        path = Path(source)
        rows = [_row(f"{path}, line {n}", values, fields) for n, values in _lines(path)]
    else:
        rows = [_row(f"{source}/{config}, row {n}", v, fields) for n, v in enumerate(_downloaded(source, config))]
    if not rows:
        raise InputError(f"{source} has no row")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at other characters of texts
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read rows from {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: no JSON ({error})") from error


def _downloaded(source: str, config: str | None) -> Iterator[Any]:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{source} needs the package datasets: pip install 'hf-sparsekv[eval]', or give a .jsonl file"
        ) from error
    try:
        rows = datasets.load_dataset(source, config, split=SPLIT)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"cannot load {source}, configuration {shown(config)}, from the hub: {said}. Check the name and the "
            "network, or give a .jsonl file"
        ) from error
    return iter(rows)


def _row(place: str, values: Any, fields: Fields) -> HubRow:
    if not isinstance(values, Mapping):
        raise InputError(f"{place}: a JSON object is needed: got {shown(values)}")
    question, task = (_first(names, values) for names in (fields.question, fields.task))
    if fields.answer_prefix is not None and "answer_prefix" not in values:
        values = {**values, "answer_prefix": fields.answer_prefix}
    return HubRow(
        place=place,
        task=_text(place, values, task, may_be_empty=False),
        context=_text(place, values, "context", may_be_empty=False),
        question=_text(place, values, question, may_be_empty=True),
        answer_prefix=_text(place, values, "answer_prefix", may_be_empty=True),
        answers=_texts(place, values, fields.answers),
        classes=_texts(place, values, "all_classes") if values.get("all_classes") else (),
    )


def _first(names: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """The first name that is there; none: the first one, for the message."""
    return next((name for name in names if name in values), names[0])


def _text(place: str, values: Mapping[str, Any], name: str, *, may_be_empty: bool) -> str:
    _need(place, values, name)
    value = values[name]
    if not isinstance(value, str) or not (may_be_empty or value.strip()):
        limit = "a text" if may_be_empty else "a text that is not empty"
        raise InputError(f"{place}: field {name!r} must be {limit}: got {shown(value)}")
    return value


def _texts(place: str, values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    _need(place, values, name)
    found = values[name]
    if not isinstance(found, list) or not found or not all(isinstance(v, str) and v.strip() for v in found):
        raise InputError(
            f"{place}: field {name!r} must be a list of texts, at least one, none empty: got {shown(found)}"
        )
    return tuple(found)


def _need(place: str, values: Mapping[str, Any], name: str) -> None:
    if name not in values:
        raise InputError(f"{place}: field {name!r} is missing; there are {shown(sorted(values))}")
