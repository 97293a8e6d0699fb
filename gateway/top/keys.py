"""Decode the bytes of a terminal into keys: characters, or names such as ``page up``."""

from __future__ import annotations

import codecs
import re

_FINAL = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "Z": "back tab",
}
_NUMBERED = {
    "1": "home",
    "4": "end",
    "5": "page up",
    "6": "page down",
    "7": "home",
    "8": "end",
}
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
        keys: list[str] = []
        while text:
            if text[0] != "\x1b":
                keys += _key_of(text[0])
                text = text[1:]
            elif found := _SEQUENCE.match(text):
                keys += _key_of_sequence(found)
                text = text[found.end() :]
            elif _UNFINISHED.fullmatch(text) and len(text) < _LONGEST:
                self._rest = text
                break
            else:
                keys.append("escape")
                text = text[1:]
        return keys

    @property
    def waits(self) -> bool:
        """Return whether a sequence has begun, or the key Escape was pressed."""
        return bool(self._rest)

    def flush(self) -> list[str]:
        """Return what is left, as no more bytes came: the key Escape."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest == "\x1b" else []


def _key_of(character: str) -> list[str]:
    if key := _CONTROL.get(character):
        return [key]
    return [character] if character.isprintable() else []


def _key_of_sequence(found: re.Match[str]) -> list[str]:
    parameters, final = found[1] or "", found[2] or found[3]
    name = parameters.partition(";")[0]
    key = _NUMBERED.get(name) if final == "~" else _FINAL.get(final)
    return [key] if key else []
