"""Decode the bytes of a terminal into keys."""

from __future__ import annotations

import codecs
import re
from enum import Enum


class Key(Enum):
    """A key that is no character."""

    UP = "up"
    DOWN = "down"
    LEFT = "left"
    RIGHT = "right"
    PAGE_UP = "page up"
    PAGE_DOWN = "page down"
    HOME = "home"
    END = "end"
    TAB = "tab"
    BACK_TAB = "back tab"
    ENTER = "enter"
    BACKSPACE = "backspace"
    CLEAR = "clear"
    ESCAPE = "escape"
    LEAVE = "leave"


_FINAL = {
    "A": Key.UP,
    "B": Key.DOWN,
    "C": Key.RIGHT,
    "D": Key.LEFT,
    "H": Key.HOME,
    "F": Key.END,
    "Z": Key.BACK_TAB,
}
_NUMBERED = {
    "1": Key.HOME,
    "4": Key.END,
    "5": Key.PAGE_UP,
    "6": Key.PAGE_DOWN,
    "7": Key.HOME,
    "8": Key.END,
}
_CONTROL = {
    "\t": Key.TAB,
    "\r": Key.ENTER,
    "\n": Key.ENTER,
    "\x7f": Key.BACKSPACE,
    "\x08": Key.BACKSPACE,
    "\x15": Key.CLEAR,
    "\x03": Key.LEAVE,
    "\x04": Key.LEAVE,
    "\x02": Key.PAGE_UP,
    "\x06": Key.PAGE_DOWN,
}
_SEQUENCE = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|O([@-~]))")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?")
_LONGEST = 32
"""Characters of a sequence: a longer one is none."""

Pressed = Key | str
"""A key, or a character."""


class KeyDecoder:
    """Decodes bytes, which may come in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[Pressed]:
        """Return the keys that are complete."""
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        keys: list[Pressed] = []
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
                keys.append(Key.ESCAPE)
                text = text[1:]
        return keys

    @property
    def waits(self) -> bool:
        """Return whether a sequence has begun, or the key Escape was pressed."""
        return bool(self._rest)

    def flush(self) -> list[Pressed]:
        """Return what is left, as no more bytes came: the key Escape."""
        rest, self._rest = self._rest, ""
        return [Key.ESCAPE] if rest == "\x1b" else []


def _key_of(character: str) -> list[Pressed]:
    if key := _CONTROL.get(character):
        return [key]
    return [character] if character.isprintable() else []


def _key_of_sequence(found: re.Match[str]) -> list[Pressed]:
    parameters, final = found[1] or "", found[2] or found[3]
    name = parameters.partition(";")[0]
    key = _NUMBERED.get(name) if final == "~" else _FINAL.get(final)
    return [key] if key else []
