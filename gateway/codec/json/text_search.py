"""Finds parts of JSON text without parsing it."""

from __future__ import annotations

import re

_ID = re.compile(rb'"id"[ \t\r\n]*:[ \t\r\n]*"([ !#-\[\]-~]*)"')
"""An id of ASCII characters without escapes."""


def contains(text: bytes, part: bytes) -> bool:
    """Tell whether a text contains a part; four times as fast as ``in``, which raises inside."""
    return text.find(part) >= 0


def end_of_numbers(text: bytes, start: int, end: int) -> int:
    """Return where text that begins among numbers certainly stops being numbers, or ends.

    Numbers contain no quotes and no braces.
    """
    for mark in (b'"', b"{", b"}"):
        at = text.find(mark, start, end)
        if at >= 0:
            end = at
    return end


def split_id(text: bytes) -> tuple[bytes, str | None]:
    """Return a JSON text with an empty id, and its id; the id is None if it stays in the text.

    Clients send a new id with each request: without it, the texts of many are the same.
    """
    at = text.find(b'"id"')
    if at < 0:
        return text, None
    found = _ID.match(text, at)
    if found is None or text.find(b'"id"', at + 1) > 0:
        return text, None
    start, end = found.span(1)
    return text[:start] + text[end:], text[start:end].decode()
