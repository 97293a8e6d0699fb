"""Estimates what JSON costs that is parsed in one call, and limits its values.

Each takes memory and time, however short it is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gateway.codec.structure_scan import count_marks, mask_strings
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.tensors import MAX_TENSORS

_MIN_SCANNED = 2 * 1024
"""Shorter texts are estimated by their length: they need little memory in any case."""
_PER_BYTE = 8
"""Bytes for each byte of such a text: measured 1 to 28, and about 8 for a plain request."""

# Bytes of CPython's objects, with the reference in their container, measured by tracemalloc.
_LIST = 56
_DICT = 140
_EMPTY_DICT = 64
_KEY = 50
_ITEM = 8
_STRING = 49
_NUMBER = 28
_DIGIT = 10
"""Each digit of an integer but the first: CPython shares small integers."""

_WIDE_CHARACTERS = ((0xF0, 4), (0xC4, 2))
"""First bytes of UTF-8 characters, and the bytes that CPython uses per character from there on."""


def estimate_parsed_size(text: bytes) -> int:
    """Estimate the bytes of memory of a valid JSON text once it is parsed."""
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
    """Return the most bytes that CPython uses per character of a text."""
    if b"\\u" in text:
        return 4
    largest = int(codes.max())
    return next((width for first, width in _WIDE_CHARACTERS if largest >= first), 1)


VALUES_PER_TENSOR: Final = 32
"""More than a tensor of 16 dimensions with a few parameters. A thousand of them take some 7 ms."""

_MARKS: Final = b",[{"
"""One stands before each value, but for those of members that are alone in their object."""


def check_value_count(text: bytes | bytearray, tensor_cap: int = MAX_TENSORS) -> None:
    """Refuse JSON with more values than ``tensor_cap`` tensors need; raises GatewayError (413)."""
    cap = VALUES_PER_TENSOR * max(tensor_cap, MAX_TENSORS)
    # Quick bounds first: the second counts marks inside strings, too.
    if len(text) <= cap or sum(map(text.count, _MARKS)) <= cap:
        return
    if sum(count_marks(bytes(text), _MARKS)) > cap:
        raise GatewayError(
            ErrorKind.TOO_LARGE,
            f"the request has, without its tensors' data, more than {cap} values: "
            f"{VALUES_PER_TENSOR} for each tensor that it may have (limits.max_tensors)",
        )
