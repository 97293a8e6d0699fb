"""How much memory Python's objects of a JSON text take, told without a look at each of them."""

from __future__ import annotations

import numpy as np

from gateway.codec.json.structure_scan import mask_strings

_MIN_SCANNED = 2 * 1024
"""Bytes of text that are not looked at: what they come to is little in any case."""
_PER_BYTE = 8
"""Bytes for each byte of such a text: 1 to 28, and some 8 where it is a plain request."""

# Bytes of CPython's objects, with the place of each in what holds it, measured by tracemalloc.
_LIST = 56
_DICT = 140
_EMPTY_DICT = 64
_KEY = 50
_ITEM = 8
_STRING = 49
_NUMBER = 28
_DIGIT = 10
"""For each digit but the first of an integer: small integers are there already."""

_WIDE_CHARACTERS = ((0xF0, 4), (0xC4, 2))
"""First bytes of characters, and how many bytes Python takes for any in the same string."""


def estimate_parsed_size(text: bytes) -> int:
    """Estimate the bytes of memory that a valid JSON text takes when it is parsed."""
    if len(text) <= _MIN_SCANNED:
        return _PER_BYTE * len(text)
    codes, inside = mask_strings(text)
    outside = (inside ^ 1).view(np.bool_)

    def count(mark: bytes) -> int:
        return int(np.count_nonzero((codes == ord(mark)) & outside))

    lists, dicts, keys, items = count(b"["), count(b"{"), count(b":"), count(b",")
    empty_dicts = text.count(b"{}")
    strings = max(0, count(b'"') - keys - text.count(b'""'))
    digits = int(np.count_nonzero((codes - ord(".") <= ord("9") - ord(".")) & outside))
    others = items + 1 - strings - text.count(b"[]") - empty_dicts
    numbers = max(0, min(digits, others))
    return (
        _LIST * lists
        + _DICT * (dicts - empty_dicts)
        + _EMPTY_DICT * empty_dicts
        + _KEY * keys
        + _ITEM * items
        + _STRING * strings
        + _character_width(text, codes) * int(np.count_nonzero(inside))
        + min(_NUMBER * numbers, _DIGIT * (digits - numbers))
    )


def _character_width(text: bytes, codes: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Give the bytes that Python takes for a character, at most."""
    if b"\\u" in text:
        return 4
    largest = int(codes.max())
    return next((width for first, width in _WIDE_CHARACTERS if largest >= first), 1)
