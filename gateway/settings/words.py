"""Plain words for what an operator wrote and for what was wanted instead."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

KeyPath = tuple[str | int, ...]
"""The keys and list positions that lead from the top of a file to a value."""

_SHOWN = 60  # characters of a value that a message repeats
_LISTED = 20  # names that a message lists
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


def path_text(path: KeyPath) -> str:
    """Return a path as an operator reads it: ``upstreams["a b"].endpoints[0]``."""
    return "".join(_step(part) for part in path).removeprefix(".")


def _step(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if _PLAIN_KEY.fullmatch(part) else f'["{part}"]'


def describe(value: object) -> str:
    """Return a value as it would stand in YAML, cut to a length that a message can hold."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "keys and values"
        case list() | tuple():
            return "a list"
        case _:
            text = repr(value)
            return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def among(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: the nearest known one, and all of them."""
    every = list(known)
    shown = ", ".join(every[:_LISTED]) + (", ..." if len(every) > _LISTED else "")
    near = get_close_matches(name, every, n=1)
    return f"; did you mean {near[0]}? Known: {shown}" if near else f"; known: {shown}"
