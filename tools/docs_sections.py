"""How the site reads our docstrings: a section may follow the one before without a blank line between them.

`mkdocs.yml` names this file as an extension of griffe, which otherwise takes the second for text of the first.
"""

import re
from typing import Any

from griffe import Extension, Object

_SECTION = re.compile(r"(?<=\S)\n(?=(?:Args|Returns|Yields|Raises|Source):)")


class Sections(Extension):  # type: ignore[misc, unused-ignore]  # griffe is there where the site is built
    """Puts the blank lines in."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
