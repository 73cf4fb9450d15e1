"""A prompt's text as a picture: monospaced, each token on the colour of its rank.

Shapes: N token.
"""

from typing import Any
from unicodedata import east_asian_width

from hf_sparsekv.plots.canvas import COLOURS

LINE_CHARACTERS = 110
"""Cells of a line; a wide character takes two."""
_FIRST_OF_A_WORD = "\u2581\u0120"
"""How tokenizers write a blank before a token."""
_LINE_END = "\u010a"
"""How byte-level tokenizers write a line's end."""
_NOT_SHOWN = "\u00b7"
_NO_GLYPH = "\u25a1"
_FONT = "monospace"
_WIDE_FONT = "CJK"
"""Part of the names of fonts that have what the other lacks."""


def readable(token: str) -> str:
    """A token's text on one line, as the tokenizer's vocabulary writes it or decoded."""
    text = "".join(" " if c in _FIRST_OF_A_WORD else "\u21b5" if c in ("\n", _LINE_END) else c for c in token)
    return "".join(c if c.isprintable() else _NOT_SHOWN for c in text) or _NOT_SHOWN


def lines_of(tokens: list[str]) -> list[list[str]]:
    """Tokens in lines that fit; one that is longer than a line is cut."""
    lines: list[list[str]] = [[]]
    room = 0
    for token in (_cut(token) for token in tokens):
        if lines[-1] and cells_of(token) > room:
            lines.append([])
        room = (room if lines[-1] else LINE_CHARACTERS) - cells_of(token)
        lines[-1].append(token)
    return lines


def cells_of(text: str) -> int:
    """How many cells a text takes."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def _cut(token: str) -> str:
    while cells_of(token) > LINE_CHARACTERS:
        token = token[:-1]
    return token


def draw_text(axis: Any, lines: list[list[str]], rank_N: Any) -> None:
    """Monospaced text, one cell a character or two, each token on the colour of its rank."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours, place, fonts = colormaps[COLOURS], 0, _Fonts()
    for row, line in enumerate(lines):
        column = 0
        for token in line:
            rank = float(rank_N[place])
            axis.add_patch(Rectangle((column, row), cells_of(token), 1, color=colours(rank), linewidth=0))
            look = {"color": "black" if rank > 0.6 else "white", "ha": "center", "va": "center", "fontsize": 8}
            for character in token:
                cells = cells_of(character)
                font, glyph = fonts.of(character)
                axis.text(column + cells / 2, row + 0.5, glyph, family=font, parse_math=False, **look)
                column += cells
            place += 1
    axis.set(xlim=(0, LINE_CHARACTERS), ylim=(len(lines), 0))
    axis.set_axis_off()


class _Fonts:
    """Which font has a character: without asking, matplotlib would warn of each that it draws as a box."""

    def __init__(self) -> None:
        from matplotlib import font_manager
        from matplotlib.ft2font import FT2Font

        wide = sorted(name for name in font_manager.get_font_names() if _WIDE_FONT in name)[:1]
        self._charmaps = {name: FT2Font(font_manager.findfont(name)).get_charmap() for name in (_FONT, *wide)}

    def of(self, character: str) -> tuple[str, str]:
        """A font's name, and the character, or a box where no font has it."""
        for name, charmap in self._charmaps.items():
            if ord(character) in charmap:
                return name, character
        return _FONT, _NO_GLYPH
