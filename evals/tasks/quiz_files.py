"""Facts out of the data files of BSD's quiz game: capitals of countries and of states of the US, chemical elements.

A line has fields parted by colons, each a pattern for the answers that the game accepts: `{x}` may be left out, `[x|y]`
is one of some, and so is `x|y`. Of each pattern one spelling is taken.
Source: quiz(6), FILES, in Debian's bsdgames.
"""

from collections.abc import Sequence

QUIZ_FILES = ("africa", "america", "asia", "europe", "state", "elements")
"""In the order in which `quiz_text` takes their contents."""
COUNTRY, STATE, ELEMENT = "country", "state", "element"
KINDS = (COUNTRY, STATE, ELEMENT)
_FIELDS = {"state": (STATE, 0, 1), "elements": (ELEMENT, 0, 3)}
"""Kind, and the fields that are subject and answer; the other files are capitals of countries."""
_CLOSING = {"{": "}", "[": "]"}


def quiz_text(files: Sequence[bytes]) -> str:
    """Lines of kind, subject and answer with tabs between them, each subject of a kind once.

    Args:
        files: contents of `QUIZ_FILES`.
    Raises:
        ValueError: a line or a pattern is no such thing.
    """
    known: dict[tuple[str, str], str] = {}
    for name, data in zip(QUIZ_FILES, files, strict=True):
        kind, subject, answer = _FIELDS.get(name, (COUNTRY, 0, 1))
        for line in data.decode("utf-8").splitlines():
            fields = line.split(":")
            if len(fields) <= max(subject, answer):
                raise ValueError(f"{name} has a line without an answer: {line!r}")
            known.setdefault((kind, spelling(fields[subject])), spelling(fields[answer]))
    return "".join(f"{kind}\t{subject}\t{answer}\n" for (kind, subject), answer in known.items())


def spelling(pattern: str) -> str:
    """One text that a pattern stands for: what may be left out is kept, the first choice is taken.

    Within brackets it is the first one of letters, since others write accents beside their letter.

    Raises:
        ValueError: brackets that do not match.
    """
    text, rest = _alternative(pattern, "")
    if rest:
        raise ValueError(f"a pattern with an unmatched bracket: {pattern!r}")
    return " ".join(text.split())


def _alternative(pattern: str, closing: str) -> tuple[str, str]:
    """What a pattern stands for up to a closing bracket (or its end), and what comes after that."""
    choices = [""]
    while pattern:
        symbol, pattern = pattern[0], pattern[1:]
        if symbol in _CLOSING:
            inner, pattern = _alternative(pattern, _CLOSING[symbol])
            choices[-1] += inner
        elif symbol == "|":
            choices.append("")
        elif symbol == closing:
            closing = ""
            break
        elif symbol in _CLOSING.values():
            return choices[0], symbol + pattern
        else:
            choices[-1] += symbol
    if closing:
        raise ValueError(f"a pattern without its {closing!r}")
    plain = [choice for choice in choices if choice.replace(" ", "").isalpha() or choice == " "]
    return (plain or choices)[0], pattern
