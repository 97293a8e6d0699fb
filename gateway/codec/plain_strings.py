"""The text of short strings → BYTES elements, without a Python object for each."""

from __future__ import annotations

import numpy as np

from gateway.codec.plain_numbers import REFUSALS, parsed
from gateway.codec.string_walk import codes_and_inside

_WIDTH = 4
"""Bytes of the length before each element."""

_SHORT = 16
"""Bytes of text for each string up to which this takes less time than Python's own objects."""

_MANY = 256
"""Strings from which on it does."""

_BETWEEN = b'[], \t\n\r"'
_OTHERS = bytes(code not in _BETWEEN for code in range(256))


def plain_strings(text: bytes) -> tuple[int, bytes] | None:
    """Convert a JSON array of strings, nested or flat; give how many there are, and their bytes.

    Gives None where that takes a closer look: at escapes, and what is no such array. Where there
    are few strings, or long ones, others take less time.
    """
    count = text.count(b'"') // 2
    if count < _MANY or len(text) > count * _SHORT or b"\\" in text:
        return None
    try:
        parsed(text)  # so it is JSON, and strings are UTF-8
    except REFUSALS:
        return None
    codes, inside = codes_and_inside(text)
    if (np.frombuffer(text.translate(_OTHERS), np.uint8) > inside).any():
        return None
    is_quote = codes == ord('"')
    quotes = np.flatnonzero(is_quote)
    lengths = (quotes[1::2] - quotes[::2] - 1).astype("<u4")
    elements = np.empty(int(lengths.sum()) + _WIDTH * count, np.uint8)
    # Each element begins behind those before it, and their lengths.
    begins = np.cumsum(lengths, dtype=np.intp) - lengths + np.arange(0, _WIDTH * count, _WIDTH)
    places = begins[:, np.newaxis] + np.arange(_WIDTH)
    elements[places] = lengths.view(np.uint8).reshape(-1, _WIDTH)
    is_text = np.ones(elements.size, np.bool_)
    is_text[places] = False
    elements[is_text] = codes[inside.view(np.bool_) & ~is_quote]
    return count, elements.tobytes()
