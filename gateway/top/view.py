"""The keys of a terminal, and what the operator has chosen by them.

It is the panel, how far it is scrolled, and what it is filtered by.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

_NAMES = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "Z": "back tab",
    "H": "home",
    "1": "home",
    "7": "home",
    "F": "end",
    "4": "end",
    "8": "end",
    "5": "page up",
    "6": "page down",
}
"""The keys by the end of their sequence, or by the number before a ``~`` at the end."""
_CONTROL = {
    "\t": "tab",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x15": "clear",
    "\x03": "leave",
    "\x04": "leave",
    "\x02": "page up",
    "\x06": "page down",
}
_SEQUENCE = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|O([@-~]))")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?")
_LONGEST = 32
"""Characters of a sequence: a longer one is none."""


class KeyDecoder:
    """Decodes bytes, which may come in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Return the keys that are complete."""
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        keys: list[str | None] = []
        while text:
            size = 1
            if text[0] != "\x1b":
                keys.append(_CONTROL.get(text[0], text[0] if text[0].isprintable() else None))
            elif found := _SEQUENCE.match(text):
                final = found[2] or found[3]
                number = (found[1] or "").partition(";")[0]
                keys.append(_NAMES.get(number if final == "~" else final))
                size = found.end()
            elif _UNFINISHED.fullmatch(text) and len(text) < _LONGEST:
                self._rest = text
                break
            else:
                keys.append("escape")
            text = text[size:]
        return [key for key in keys if key]

    @property
    def waits(self) -> bool:
        """Return whether a sequence has begun, or the key Escape was pressed."""
        return bool(self._rest)

    def flush(self) -> list[str]:
        """Return what is left, as no more bytes came: the key Escape."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest == "\x1b" else []


OVERVIEW, ENDPOINTS, MODELS, CALLS = PANELS = ("overview", "endpoints", "models", "calls")
_MOST_FILTER = 200
_ALL = 10**9
_PANELS = dict(zip("1234", PANELS, strict=True))
_STEPS = {"tab": 1, "right": 1, "back tab": -1, "left": -1}
"""The keys to other panels, and to those behind and before."""
_ROWS = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -_ALL, "g": -_ALL, "end": _ALL, "G": _ALL}
_PAGES = {"page up": -1, "page down": 1, " ": 1}
"""The keys that scroll by rows, and by pages."""


@dataclass
class View:
    """The choices; keys change them."""

    panel: str = OVERVIEW
    tops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PANELS, 0))
    """The first row that each panel shows."""
    filters: dict[str, str] = field(default_factory=lambda: dict.fromkeys(PANELS, ""))
    edits: bool = False
    """Whether the operator types a filter."""
    follows: bool = True
    """Whether new calls are shown as they come."""
    left: bool = False
    page: int = 10
    """Rows that there is room for."""

    @property
    def top(self) -> int:
        """Return the first row that the panel shows."""
        return self.tops[self.panel]

    @property
    def filter(self) -> str:
        """Return what the panel is filtered by."""
        return self.filters[self.panel]

    def limit_scroll(self, rows: int, page: int) -> None:
        """Keep the last row at the end of the room, once it is known how many rows there are."""
        self.page = max(1, page)
        self.tops[self.panel] = max(0, min(self.top, rows - page))

    def press(self, key: str) -> None:
        """Do what a key means."""
        if key == "leave" or (key in ("q", "Q") and not self.edits):
            self.left = True
        elif self.edits:
            self._edit(key)
        elif key in _PANELS:
            self.panel = _PANELS[key]
        elif key in _STEPS:
            self.panel = PANELS[(PANELS.index(self.panel) + _STEPS[key]) % len(PANELS)]
        elif key == "f":
            self._toggle_follow()
        elif key in ("/", "escape"):
            self.edits = key == "/"
            self.filters[self.panel] = self.filter if self.edits else ""
        else:
            self.scroll(_ROWS.get(key, 0) + _PAGES.get(key, 0) * self.page)

    def scroll(self, rows: int) -> None:
        """Scroll; calls stand still once they are scrolled."""
        self.tops[self.panel] = max(0, self.top + rows)
        if self.panel == CALLS and rows > 0:
            self.follows = False

    def _toggle_follow(self) -> None:
        """Follow new calls, or let the list stand still."""
        self.follows = not self.follows
        if self.follows:
            self.tops[CALLS] = 0

    def _edit(self, key: str) -> None:
        text = self.filter
        if len(key) == 1:
            text = (text + key)[:_MOST_FILTER]
        elif key == "backspace":
            text = text[:-1]
        elif key in ("clear", "escape"):
            text = ""
        self.edits = len(key) == 1 or key in ("backspace", "clear")
        if text != self.filter:
            self.filters[self.panel] = text
            self.tops[self.panel] = 0
