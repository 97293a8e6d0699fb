"""Read JSON documents of any version: what is missing or of another type is empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]


def field(document: object, *path: str) -> object:
    """Return the value at a path; None if there is none."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def number(document: object, *path: str) -> float | None:
    """Return a finite number; None if there is none."""
    return as_number(field(document, *path))


def as_number(value: object) -> float | None:
    """Return a value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def count(document: object, *path: str) -> int:
    """Return a whole number that is not negative; 0 if there is none."""
    return max(0, int(number(document, *path) or 0))


def text(document: object, *path: str) -> str:
    """Return a text; a number as a text; else an empty one."""
    value = field(document, *path)
    if isinstance(value, str):
        return value
    known = as_number(value)
    return "" if known is None else f"{known:g}"


def flag(document: object, *path: str) -> bool:
    """Tell whether a value is true."""
    return field(document, *path) is True


def objects(document: object, *path: str) -> list[Document]:
    """Return a list of objects; whatever else is in it is left out."""
    value = field(document, *path)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def numbers(document: object, *path: str) -> list[float | None]:
    """Return a list of numbers, None for each that is not known."""
    value = field(document, *path)
    return [as_number(each) for each in value] if isinstance(value, list) else []


def texts(document: object, *path: str) -> list[str]:
    """Return the texts of a list."""
    value = field(document, *path)
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def by_name(document: object, *path: str) -> dict[str, float]:
    """Return the numbers of an object that are above 0."""
    value = field(document, *path)
    if not isinstance(value, Mapping):
        return {}
    known = {str(name): as_number(each) for name, each in value.items()}
    return {name: each for name, each in known.items() if each is not None and each > 0}
