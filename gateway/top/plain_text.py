"""Make texts of others safe for a terminal, and as wide as a column.

Names come from clients and servers: they may hold control characters, escape sequences, characters
that turn the direction of a line, or that have no width. All these are written as escapes. What
is left has one or two cells per character in every terminal.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from rich.cells import cell_len, chop_cells, get_character_cell_size

_SAFE_ASCII = re.compile(r"[ -~]*")
_MOST = 2000
"""Characters that are looked at: no terminal shows more of a text."""
_RIGHT_TO_LEFT = frozenset({"R", "AL", "AN"})
_SHOWN = frozenset("LNPS")
"""The first letters of the categories that are shown: letters, numbers, punctuation, symbols."""
ELLIPSIS = "…"


def plain(value: str) -> str:
    """Return a text without anything that a terminal would interpret."""
    value = value[:_MOST]
    if _SAFE_ASCII.fullmatch(value):
        return value
    return "".join(map(_plain_character, value))


@lru_cache(4096)
def _plain_character(character: str) -> str:
    if character == " ":
        return character
    code = ord(character)
    combines = (
        unicodedata.category(character)[0] not in _SHOWN
        or unicodedata.bidirectional(character) in _RIGHT_TO_LEFT
        or get_character_cell_size(character) != _width(character)
        or 0x1F1E6 <= code <= 0x1F1FF  # two of them are a flag
        or 0x1F3FB <= code <= 0x1F3FF  # colours of the skin
    )
    if not combines:
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _width(character: str) -> int:
    """Return the cells of a character that has some; where sources differ, terminals do too."""
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def width_of(value: str) -> int:
    """Return how many cells a plain text takes."""
    return cell_len(value)


def cut(value: str, width: int, *, middle: bool = False) -> str:
    """Return a plain text in at most ``width`` cells, with an ellipsis for what is left out.

    Names are cut in the ``middle``, as their ends tell them apart.
    """
    if width_of(value) <= width:
        return value
    if width <= 1:
        return ELLIPSIS[:width]
    room = width - 1
    end = ""
    if middle and room > 1:
        end = chop_cells(value[::-1], room // 2)[0][::-1]
    return chop_cells(value, room - width_of(end))[0] + ELLIPSIS + end


def fit(value: str, width: int, *, right: bool = False, middle: bool = False) -> str:
    """Return a plain text in exactly ``width`` cells, at the left or at the right of them."""
    value = cut(value, width, middle=middle)
    padding = " " * (width - width_of(value))
    return padding + value if right else value + padding


def wrap(value: str, width: int, most: int) -> list[str]:
    """Return a plain text as at most ``most`` lines, which break at spaces where they can."""
    lines: list[str] = []
    rest = value
    while rest and len(lines) < most - 1 and width_of(rest) > width:
        line = chop_cells(rest, width)[0]
        at = line.rfind(" ", width // 2)
        if at > 0 and rest[len(line) : len(line) + 1] != " ":
            line = line[:at]
        if not line:
            break
        lines.append(line)
        rest = rest[len(line) :].lstrip()
    return [*lines, cut(rest, width)]
