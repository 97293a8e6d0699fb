"""The text of short strings → BYTES elements, without a Python object for each."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from gateway.codec.elements.base64_text import Codes, Lengths, decode_texts, pad_texts
from gateway.codec.elements.fast_decode import PARSE_ERRORS, parsed
from gateway.codec.json.structure_scan import mask_strings

_LENGTH = struct.Struct("<I")
_WIDTH = _LENGTH.size
"""Bytes of the length before each element."""

_SHORT = 16
"""Bytes of text for each string up to which this takes less time than Python's own objects."""

_MANY = 256
"""Strings, and arrays, from which on it does."""

_BETWEEN = b'[], \t\n\r"'
_OTHERS = bytes(code not in _BETWEEN for code in range(256))
_NO_ELEMENTS = bytes(code not in _BETWEEN + b"{:}" for code in range(256))
_MARKS = bytes(code in b"[,]" for code in range(256))


@dataclass(frozen=True, slots=True)
class DecodedElements:
    """Elements of BYTES in binary form, and the brackets and commas around them."""

    count: int
    data: bytes
    marks: bytes
    has_base64: bool


def plain_strings(text: bytes) -> tuple[int, bytes] | None:
    """Convert a JSON array of strings, nested or flat; give how many there are, and their bytes.

    Gives None where that takes a closer look: at escapes, and what is no such array. Where there
    are few strings, or long ones, others take less time.
    """
    if not _are_many_and_short(text):
        return None
    codes, inside = mask_strings(text)
    if (np.frombuffer(text.translate(_OTHERS), np.uint8) > inside).any():
        return None
    is_quote = codes == ord('"')
    quotes = np.flatnonzero(is_quote)
    lengths = quotes[1::2] - quotes[::2] - 1
    return lengths.size, pack_texts(lengths, np.compress(inside > is_quote, codes))


def plain_elements(text: bytes) -> DecodedElements | None:
    """Convert a JSON array of strings and of V1's base64 objects, as ``plain_strings`` does.

    Takes objects without spaces in them alone.
    """
    if not _are_many_and_short(text):
        return None
    codes, inside = mask_strings(text)
    if (np.frombuffer(text.translate(_NO_ELEMENTS), np.uint8) > inside).any():
        return None
    is_quote = codes == ord('"')
    quotes = np.flatnonzero(is_quote)
    begins, ends = quotes[::2], quotes[1::2]
    keys = _base64_keys(codes, inside, begins, ends)
    if keys is None:
        return None
    is_text = inside > is_quote
    for place in range(1, 4):
        is_text[begins[keys] + place] = False
    # The value of each key is the string behind it.
    is_base64 = np.zeros(begins.size, np.bool_)
    is_base64[keys + 1] = True
    lengths, is_base64 = np.delete(ends - begins - 1, keys), np.delete(is_base64, keys)
    texts = np.compress(is_text, codes)
    if keys.size:
        decoded = _with_decoded(lengths, texts, is_base64)
        if decoded is None:
            return None
        lengths, texts = decoded
    marks = np.compress(np.frombuffer(text.translate(_MARKS), np.uint8) > inside, codes).tobytes()
    data = pack_texts(lengths, texts)
    return DecodedElements(lengths.size, data, marks, has_base64=keys.size > 0)


def _are_many_and_short(text: bytes) -> bool:
    """Tell whether a text is JSON of many short strings without escapes, or of many arrays."""
    count = text.count(b'"') // 2 + text.count(b"[")
    if count < _MANY or len(text) > count * _SHORT or b"\\" in text:
        return False
    try:
        parsed(text)  # so it is JSON, and strings are UTF-8
    except PARSE_ERRORS:
        return False
    return True


def _base64_keys(codes: Codes, inside: Codes, begins: Lengths, ends: Lengths) -> Lengths | None:
    """Give which strings are keys; None where an object is not one of base64."""
    marks = codes * (inside ^ 1)
    colons = np.flatnonzero(marks == ord(":"))
    if np.count_nonzero(marks == ord("{")) != colons.size:
        return None
    keys = np.searchsorted(ends, colons - 1)
    if keys.size and keys[-1] + 1 >= ends.size:
        return None  # behind the last colon there is no string
    starts = begins[keys]
    is_base64 = (ends[keys] == colons - 1) & (starts == colons - 5)
    is_base64 &= begins[keys + 1] == colons + 1
    for place, code in enumerate(b"b64", 1):
        is_base64 &= codes[starts + place] == code
    return keys if is_base64.all() else None


def _with_decoded(
    lengths: Lengths, texts: Codes, is_base64: npt.NDArray[np.bool_]
) -> tuple[Lengths, Codes] | None:
    """Decode those texts that are base64; None where one is not."""
    is_part = np.repeat(is_base64, lengths)
    padded = pad_texts(lengths[is_base64], np.compress(is_part, texts))
    decoded = None if padded is None else decode_texts(*padded, canonical=False)
    if decoded is None:
        return None
    all_lengths = lengths.copy()
    all_lengths[is_base64] = decoded[0]
    is_decoded = np.repeat(is_base64, all_lengths)
    all_texts = np.empty(is_decoded.size, np.uint8)
    _place(all_texts, is_decoded, decoded[1])
    _place(all_texts, ~is_decoded, np.compress(~is_part, texts))
    return all_lengths, all_texts


def pack_elements(elements: list[bytes]) -> bytes:
    """Give elements in binary form."""
    lengths = map(_LENGTH.pack, map(len, elements))
    return b"".join(chain.from_iterable(zip(lengths, elements, strict=True)))


def pack_strings(strings: list[str]) -> bytes:
    """Give strings in binary form."""
    if len(strings) < _MANY:
        return pack_elements(list(map(str.encode, strings)))
    whole = "".join(strings)
    texts = whole.encode()
    if len(texts) > len(strings) * _SHORT:
        return pack_elements(list(map(str.encode, strings)))
    each = strings if whole.isascii() else map(str.encode, strings)
    lengths = np.fromiter(map(len, each), np.intp, len(strings))
    return pack_texts(lengths, np.frombuffer(texts, np.uint8))


def find_short_lengths(data: bytes) -> tuple[Lengths, int] | None:
    """Give the lengths of the whole elements in binary form that data begin with, and their end.

    Gives None unless all are shorter than 256 bytes and without a NUL: then zeros stand nowhere
    but in lengths, four for an empty element, and three behind the first byte of others.
    """
    codes = np.frombuffer(data, np.uint8)
    edges = np.flatnonzero(np.diff(codes == 0, prepend=False, append=False))
    zeros, sizes = edges[::2], edges[1::2] - edges[::2]
    counts = np.where(sizes == _WIDTH - 1, 0, sizes // _WIDTH)
    empty = np.repeat(zeros - _WIDTH * (np.cumsum(counts) - counts), counts)
    empty += np.arange(0, _WIDTH * empty.size, _WIDTH)
    begins = np.sort(np.concatenate((zeros[sizes == _WIDTH - 1] - 1, empty)))
    lengths = codes[begins].astype(np.intp)
    ends = begins + _WIDTH + lengths
    if not begins.size or begins[0] or (begins[1:] != ends[:-1]).any():
        return None
    whole = int(np.searchsorted(ends, codes.size, side="right"))
    return (lengths[:whole], int(ends[whole - 1])) if whole else None


def mask_lengths(lengths: Lengths) -> npt.NDArray[np.bool_]:
    """Tell which bytes of elements in binary form are those of their lengths."""
    found = np.zeros(int(lengths.sum()) + _WIDTH * lengths.size, np.bool_)
    found[_begins(lengths)] = True
    found[1:] |= found[:-1].copy()
    found[2:] |= found[:-2].copy()
    return found


def pack_texts(lengths: Lengths, texts: Codes) -> bytes:
    """Give elements in binary form; ``texts`` are their bytes, one behind the other."""
    begins, has_length = _begins(lengths), mask_lengths(lengths)
    elements = np.zeros(has_length.size, np.uint8)
    elements[begins] = lengths
    for place in range(1, _WIDTH):
        lengths = lengths >> 8
        if not lengths.any():
            break
        elements[begins + place] = lengths
    _place(elements, ~has_length, texts)
    return elements.tobytes()


def _begins(lengths: Lengths) -> Lengths:
    # Each element begins behind those before it, and their lengths.
    begins: Lengths = np.cumsum(lengths) - lengths
    return begins + np.arange(0, _WIDTH * lengths.size, _WIDTH)


def _place(whole: Codes, mask: npt.NDArray[np.bool_], part: Codes) -> None:
    """Put bytes where the mask tells: numpy's own indexing takes twice the time."""
    if part.size:
        np.place(whole, mask, part)
