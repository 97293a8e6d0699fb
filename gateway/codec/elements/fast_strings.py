"""Decodes JSON strings into BYTES elements, without a Python object for each.

The C module ``_native`` decodes all of them in one pass. Where it is not compiled, numpy decodes
many short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gateway.codec import native
from gateway.codec.elements.base64_elements import decode_texts, pad_texts
from gateway.codec.elements.bytes_elements import Codes, Lengths, pack_texts, place_bytes
from gateway.codec.elements.fast_decode import PARSE_ERRORS, simd_parse
from gateway.codec.json.array_scanner import ElementRun
from gateway.codec.json.structure_scan import mask_strings

_SHORT = 16
"""Up to this average length of text, numpy is faster than Python's own objects."""

_MANY = 256
"""From this number of strings and arrays on, likewise."""

_BETWEEN_STRINGS = b'[], \t\n\r"'
_IS_OTHER = bytes(code not in _BETWEEN_STRINGS for code in range(256))
_IS_OTHER_ELEMENT = bytes(code not in _BETWEEN_STRINGS + b"{:}" for code in range(256))
_IS_MARK = bytes(code in b"[,]" for code in range(256))


@dataclass(frozen=True, slots=True)
class DecodedElements:
    """BYTES elements in binary form, with the brackets and commas around them."""

    count: int
    data: bytes
    marks: bytes
    has_base64: bool


def fast_decode_strings(run: ElementRun) -> tuple[int, bytes] | None:
    """Decode a run of strings; return their number and their bytes.

    Returns None if the slow path is needed: if anything else is in the run, or, where the C module
    is not compiled, escapes, or only few or long strings.
    """
    if native.decode_strings is not None:
        return native.decode_strings(run.view, run.depth_before, run.depth_after)
    text = run.balanced()
    if not _are_many_and_short(text):
        return None
    codes, inside = mask_strings(text)
    if (np.frombuffer(text.translate(_IS_OTHER), np.uint8) > inside).any():
        return None
    is_quote = codes == ord('"')
    quotes = np.flatnonzero(is_quote)
    lengths = quotes[1::2] - quotes[::2] - 1
    return lengths.size, pack_texts(lengths, np.compress(inside > is_quote, codes))


def fast_decode_elements(text: bytes) -> DecodedElements | None:
    """Decode what stands between the brackets of an array: strings, and V1's base64 objects.

    Returns None if the slow path is needed, as ``fast_decode_strings`` does. Where the C module is
    not compiled, it is needed for objects with spaces in them too.
    """
    if native.decode_elements is not None:
        decoded_here = native.decode_elements(text, 1, 1)
        return None if decoded_here is None else DecodedElements(*decoded_here)
    text = b"[%b]" % text
    if not _are_many_and_short(text):
        return None
    codes, inside = mask_strings(text)
    if (np.frombuffer(text.translate(_IS_OTHER_ELEMENT), np.uint8) > inside).any():
        return None
    is_quote = codes == ord('"')
    quotes = np.flatnonzero(is_quote)
    starts, ends = quotes[::2], quotes[1::2]
    keys = _find_base64_keys(codes, inside, starts, ends)
    if keys is None:
        return None
    is_text = inside > is_quote
    for byte in range(1, 4):
        is_text[starts[keys] + byte] = False
    # The value of each key is the string behind it.
    is_base64 = np.zeros(starts.size, np.bool_)
    is_base64[keys + 1] = True
    lengths, is_base64 = np.delete(ends - starts - 1, keys), np.delete(is_base64, keys)
    texts = np.compress(is_text, codes)
    if keys.size:
        decoded = _decode_selected(lengths, texts, is_base64)
        if decoded is None:
            return None
        lengths, texts = decoded
    marks = np.compress(np.frombuffer(text.translate(_IS_MARK), np.uint8) > inside, codes).tobytes()
    data = pack_texts(lengths, texts)
    return DecodedElements(lengths.size, data, marks[1:-1], has_base64=keys.size > 0)


def _are_many_and_short(text: bytes) -> bool:
    """Tell whether a text is JSON with many short strings, or many arrays, and no escapes."""
    count = text.count(b'"') // 2 + text.count(b"[")
    if count < _MANY or len(text) > count * _SHORT or b"\\" in text:
        return False
    try:
        simd_parse(text)  # so it is JSON, and its strings are UTF-8
    except PARSE_ERRORS:
        return False
    return True


def _find_base64_keys(
    codes: Codes, inside: Codes, starts: Lengths, ends: Lengths
) -> Lengths | None:
    """Return which strings are keys; None if any object is not a base64 object."""
    marks = codes * (inside ^ 1)
    colons = np.flatnonzero(marks == ord(":"))
    if np.count_nonzero(marks == ord("{")) != colons.size:
        return None
    keys = np.searchsorted(ends, colons - 1)
    if keys.size and keys[-1] + 1 >= ends.size:
        return None  # no string follows the last colon
    key_starts = starts[keys]
    is_base64 = (ends[keys] == colons - 1) & (key_starts == colons - 5)
    is_base64 &= starts[keys + 1] == colons + 1
    for byte, code in enumerate(b"b64", 1):
        is_base64 &= codes[key_starts + byte] == code
    return keys if is_base64.all() else None


def _decode_selected(
    lengths: Lengths, texts: Codes, is_base64: npt.NDArray[np.bool_]
) -> tuple[Lengths, Codes] | None:
    """Decode the selected texts from base64; return None if one is invalid."""
    is_part = np.repeat(is_base64, lengths)
    padded = pad_texts(lengths[is_base64], np.compress(is_part, texts))
    decoded = None if padded is None else decode_texts(*padded, canonical=False)
    if decoded is None:
        return None
    all_lengths = lengths.copy()
    all_lengths[is_base64] = decoded[0]
    is_decoded = np.repeat(is_base64, all_lengths)
    all_texts = np.empty(is_decoded.size, np.uint8)
    place_bytes(all_texts, is_decoded, decoded[1])
    place_bytes(all_texts, ~is_decoded, np.compress(~is_part, texts))
    return all_lengths, all_texts
