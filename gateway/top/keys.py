"""Decode the bytes of a terminal into keys: characters, or names such as ``page up``."""

from __future__ import annotations

import codecs
import re

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
