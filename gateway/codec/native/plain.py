"""What the C module does, in Python, for a gateway that is not compiled.

It scans text, and base64. All else is left to the callers, which then parse with orjson.
"""

from __future__ import annotations

import re
from binascii import Error, a2b_base64, b2a_base64
from functools import partial
from typing import Any

import numpy as np
import orjson

from gateway.codec.structure_scan import (
    ARRAY_STEPS,
    count_objects_and_members,
    mask_strings,
    nesting_steps,
    outside_strings,
)

DATATYPES: tuple[str, ...] = ()
ThreadPool = None


def leave(*_arguments: object) -> None:
    """Convert nothing."""


decode_numbers = encode_numbers = decode_strings = decode_text = leave
decode_base64_elements = encode_strings = encode_text = leave

encode_base64 = partial(b2a_base64, newline=False)
"""Encode bytes as base64 with padding: RFC 4648, section 4."""


def decode_base64(text: bytes, canonical: bool) -> bytes | None:
    """Decode base64 with its padding; None if it is invalid.

    Canonical text has no unused bits that are set.
    """
    try:
        data = a2b_base64(text, strict_mode=True)
    except Error:
        return None
    return None if canonical and encode_base64(data) != text else data


def decode_elements(
    text: bytes, open_before: int = 0, open_after: int = 0
) -> tuple[int, bytes, bytes, bool] | None:
    """Decode an array, nested or flat, of strings and V1's base64 objects; None if invalid.

    Returns how many they are, their binary form, the brackets and commas of the text, and whether
    any is base64.
    """
    elements: list[bytes] = []
    objects, members = count_objects_and_members(text)
    try:
        if objects != members:  # an object is not base64, or has a duplicate key
            return None
        _collect(orjson.loads(b"".join((b"[" * open_before, text, b"]" * open_after))), elements)
    except (ValueError, KeyError, AttributeError):
        return None
    packed = b"".join([len(each).to_bytes(4, "little") + each for each in elements])
    return len(elements), packed, collect_marks(text), objects > 0


def _collect(value: Any, elements: list[bytes]) -> None:
    """Append the elements of a value; raises an error for anything else in it."""
    if isinstance(value, list):
        for each in value:
            _collect(each, elements)
        return
    if isinstance(value, dict):
        text = value["b64"].encode()
        padding = b"" if text.endswith(b"=") else b"=" * (-len(text) % 4)
        data = decode_base64(text + padding, False)
        if data is None:
            raise ValueError("invalid base64")
    else:
        data = value.encode()
    elements.append(data)


def scan_numbers(
    buffer: bytes | memoryview, start: int, end: int
) -> tuple[int, int, int, int, int, int, int]:
    """Scan the text of a buffer from start to end, which begins among the numbers of an array.

    Returns, counted from start: where it stops being numbers and brackets for certain, or its size;
    the end of the last closing bracket before that, 0 without one, and how many brackets are opened
    and closed up to there; the last comma before that, -1 without one, and the same.
    """
    text = bytes(buffer[start:end])
    stop = len(text)
    for mark in (b'"', b"{", b"}"):  # what numbers do not contain
        at = text.find(mark, 0, stop)
        stop = stop if at < 0 else at
    close = text.rfind(b"]", 0, stop) + 1
    cut = text.rfind(b",", 0, stop)
    return (
        stop,
        close,
        text.count(b"[", 0, close),
        text.count(b"]", 0, close),
        cut,
        text.count(b"[", 0, max(cut, 0)),
        text.count(b"]", 0, max(cut, 0)),
    )


_MOST_ARRAYS = 256
_DATA_ARRAY = re.compile(rb'"data"[ \t\r\n]*+:[ \t\r\n]*+\[')
_STRINGS = re.compile(rb'[\[ \t\r\n]++"')
"""How an array of strings begins."""
_ID = re.compile(rb'"id"[ \t\r\n]*+:[ \t\r\n]*+"([ !#-\[\]-~]*)"')
"""An id of ASCII characters without escapes."""
_ID_KEY = re.compile(rb'"id"[ \t\r\n]*+:')


def split_document(
    text: bytes, most: int
) -> tuple[bytes, str | None, int, list[tuple[bytes, bool]]] | None:
    """Return a JSON text with placeholders for its arrays of data and an empty id, and the rest.

    The rest is the id, None if it stays in the text, and its place; each array, and whether it is
    nested. None if more than ``most`` bytes would be left, or any escape; if there are too many
    arrays, or if it is not clear where one ends.
    """
    around: list[bytes] = []
    arrays: list[tuple[bytes, bool]] = []
    position = 0
    while (key := _DATA_ARRAY.search(text, position)) is not None:
        start = key.end() - 1
        end, is_nested = _find_end(text, start)
        if not end or len(arrays) == _MOST_ARRAYS:
            return None
        around += text[position : key.start()], b'"data":[%d]' % len(arrays)
        arrays.append((text[start:end], is_nested))
        position = end
    common = b"".join((*around, text[position:]))
    if len(common) > most or b"\\" in common:
        return None
    key = _ID_KEY.search(common)
    found = None if key is None else _ID.match(common, key.start())
    # Another key may be that of the request.
    if found is None or _ID_KEY.search(common, found.end(1)) is not None:
        return common, None, 0, arrays
    return (
        common[: found.start(1)] + common[found.end(1) :],
        found[1].decode(),
        found.start(1),
        arrays,
    )


_PREDICTION = re.compile(
    rb'[ \t\r\n]*+\{[ \t\r\n]*+"(instances|inputs)"[ \t\r\n]*+:[ \t\r\n]*+(\[.*\])'
    rb"[ \t\r\n]*+\}[ \t\r\n]*+",
    re.DOTALL,
)


def split_prediction(text: bytes) -> tuple[bool, bytes, bool] | None:
    """Return whether the only key of a V1 request is instances, its array, and if that is nested.

    Else the key is inputs. None for any other text. What is within the array is not checked.
    """
    if (found := _PREDICTION.fullmatch(text)) is None:
        return None
    return found[1] == b"instances", found[2], found[2].find(b"[", 1) >= 0


def _find_end(text: bytes, start: int) -> tuple[int, bool]:
    """Return where an array of numbers or strings ends, 0 if that is not clear; if it is nested."""
    if _STRINGS.match(text, start):
        end, _, _, depth, _, has_ended = scan_strings(memoryview(text)[start:], 0)
        return (start + end if has_ended else 0), depth > 1
    _, end, opened, *_ = scan_numbers(text, start, len(text))
    return (start + end if end else 0), opened > 1


_OTHERS = bytes(code not in b' \t\n\r"[],' for code in range(256))
"""1 for bytes that do not stand outside of strings in an array of strings."""

_FIRST_WINDOW = 2 * 1024
"""Bytes of strings that are scanned first: most arrays are short."""


def scan_strings(
    text: bytes | memoryview, depth: int
) -> tuple[int, int, int, int, int | None, bool]:
    """Scan text of strings, brackets and commas that begins outside of any string.

    ``depth`` counts the brackets open before it. Returns where the array ends, an incomplete string
    begins, or something other than a string stands; the end of the last comma before that, 0
    without one, and the depth there; the greatest depth; the start of the last string before that,
    None without one; whether the array ends.
    """
    start = _scan_strings(bytes(text[:_FIRST_WINDOW]), depth)
    return start if start[-1] or len(text) <= _FIRST_WINDOW else _scan_strings(bytes(text), depth)


def _scan_strings(text: bytes, depth: int) -> tuple[int, int, int, int, int | None, bool]:
    codes, inside = mask_strings(text)
    depths = depth + np.cumsum(nesting_steps(text, inside, ARRAY_STEPS), dtype=np.int32)
    is_other = np.frombuffer(text.translate(_OTHERS), np.bool_)
    ends = np.flatnonzero((is_other | ((codes == ord("]")) & (depths == 0))) & (inside == 0))
    end = int(ends[0]) if ends.size else len(text)
    ended = text[end : end + 1] == b"]"
    commas = np.flatnonzero((codes[:end] == ord(",")) & (inside[:end] == 0))
    comma = int(commas[-1]) if commas.size else None
    quotes = np.flatnonzero(codes[:end] == ord('"'))
    is_open = len(quotes) % 2 == 1
    last_string = int(quotes[-1 if is_open else -2]) if quotes.size else None
    return (
        last_string if is_open and last_string is not None else end + ended,
        0 if comma is None else comma + 1,
        depth if comma is None else int(depths[comma]),
        int(depths[:end].max(initial=depth)),
        last_string,
        ended,
    )


_WHOLE_CHARACTERS = re.compile(
    rb'(?:[^"\\]++|\\[^u]|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....)*+', re.DOTALL
)


def find_string_end(text: bytes) -> int:
    """Return the offset of the quote that ends the string within which the text begins.

    That of an incomplete escape or half of a pair of surrogates, or of the end, if it comes first.
    """
    match = _WHOLE_CHARACTERS.match(text)
    return match.end() if match else 0


def scan_array_values(text: bytes) -> tuple[int, bool, int]:
    """Return the offset of the last comma between values of an array, or of the array's end.

    Also returns whether the array ends there, and how deep the arrays before nest. The text begins
    within the array, before a value. The offset is 0 if there is no such comma. The grammar is not
    checked.
    """
    codes, inside = mask_strings(text)
    depths = np.cumsum(nesting_steps(text, inside), dtype=np.int32)
    unopened = int((depths < 0).argmax()) if depths.size else 0
    ends = bool(depths.size) and bool(depths[unopened] < 0)
    if ends:
        end = unopened
    else:
        commas = np.flatnonzero((codes == ord(",")) & (depths == 0) & (inside == 0))
        end = int(commas[-1]) if commas.size else 0
    arrays = nesting_steps(text, inside, ARRAY_STEPS)[:end]
    return end, ends, int(np.cumsum(arrays, dtype=np.int32).max(initial=0))


_NON_MARKS = bytes(set(range(256)) - set(b"[],"))


def collect_marks(text: bytes) -> bytes:
    """Return the brackets and commas of a text outside of its strings, which are complete."""
    return outside_strings(text).translate(None, _NON_MARKS)
