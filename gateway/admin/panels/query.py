"""Reads the query of a request to the admin address."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

_MAX_TEXT = 500


def parse_text(query: Mapping[str, str], name: str) -> str:
    """Return a text of a query, cut to a length that is easy to search for; empty without one."""
    return query.get(name, "")[:_MAX_TEXT]


def parse_count(query: Mapping[str, str], name: str, default: int, most: int = 10**9) -> int:
    """Return a number of a query, which is at most ``most``. Raises ValueError."""
    text = query.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > len(str(10**9)):
        raise ValueError(f"{name}: expected a number, got {text[:100]!r}")
    return min(int(text), most)


def parse_number(query: Mapping[str, str], name: str) -> float | None:
    """Return a number with a fraction of a query; None without one. Raises ValueError."""
    if not (text := query.get(name, "")):
        return None
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise ValueError(f"{name}: expected a number, got {text[:100]!r}")
