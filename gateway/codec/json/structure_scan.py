"""Where brackets and commas stand outside the strings of an array's text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SPACE, _OTHER, _OPENING, _CLOSING, _COMMA = range(5)

_KIND_OF = {
    **dict.fromkeys(b' \t\n\r"', _SPACE),  # a quote here closes a string
    ord("["): _OPENING,
    ord("]"): _CLOSING,
    ord(","): _COMMA,
}
_KINDS = bytes(_KIND_OF.get(code, _OTHER) for code in range(256))
"""A table for bytes.translate, which takes a fifth of the time of numpy's indexing."""

_STEPS = np.zeros(5, np.int8)
_STEPS[_OPENING], _STEPS[_CLOSING] = 1, -1

_ARRAY_STEPS = bytes({ord("["): 1, ord("]"): 0xFF}.get(code, 0) for code in range(256))
# For bytes.translate, which takes a fifth of the time of numpy's indexing.
_NESTING_STEP_OF = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", 0xFF)}  # -1, as an int8
_NESTING_STEPS = bytes(_NESTING_STEP_OF.get(code, 0) for code in range(256))


@dataclass(frozen=True, slots=True)
class StringScan:
    """How far the text of an array of strings holds whole elements.

    ``position``: where the array ends (then ``ended``), or a string begins that is not whole, or
    something stands that is no string. ``cut``: where the last comma ends, 0 if there is none,
    and ``depth_at_cut``. ``last_string``: where the last string begins, None if there is none.
    """

    position: int
    cut: int
    depth_at_cut: int
    max_depth: int
    last_string: int | None
    ended: bool


def _without_escapes(text: bytes) -> bytes:
    """Give a text of the same length in which each quote begins or ends a string."""
    if b"\\" not in text:
        return text
    # What is escaped is neither a quote nor a backslash. Pairs go first, from the left.
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def mask_strings(text: bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Give the bytes of a text that starts outside of any string, and 1 for each within one.

    The quote that begins a string is within it, the one that ends it is not. What is escaped is
    replaced.
    """
    codes = np.frombuffer(_without_escapes(text), np.uint8)
    return codes, _inside(codes == ord('"'))


def _inside(quotes: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    return np.bitwise_and(np.cumsum(quotes.view(np.uint8), dtype=np.uint8), 1)


def scan_strings(text: bytes, depth: int) -> StringScan:
    """Walk through text of strings, brackets and commas that starts outside of any string.

    ``depth`` counts the brackets open before it.
    """
    text = _without_escapes(text)
    is_quote = np.frombuffer(text, np.uint8) == ord('"')
    kinds = np.frombuffer(text.translate(_KINDS), np.uint8) * (_inside(is_quote) ^ 1)
    marks = np.flatnonzero(kinds != _SPACE)
    kinds = kinds[marks]
    depths = depth + np.cumsum(_STEPS[kinds], dtype=np.int32)

    ends = (kinds == _OTHER) | ((kinds == _CLOSING) & (depths == 0))
    stop = int(ends.argmax()) if ends.any() else len(marks)
    commas = np.flatnonzero(kinds[:stop] == _COMMA)
    last_comma = int(commas[-1]) if commas.size else None
    quotes = np.flatnonzero(is_quote)
    is_open = len(quotes) % 2 == 1
    last_string = int(quotes[-1 if is_open else -2]) if quotes.size else None
    ended = stop < len(marks) and int(kinds[stop]) == _CLOSING
    if stop < len(marks):
        position = int(marks[stop]) + ended
    else:
        position = last_string if is_open and last_string is not None else len(text)
    return StringScan(
        position,
        0 if last_comma is None else int(marks[last_comma]) + 1,
        depth if last_comma is None else int(depths[last_comma]),
        int(depths[:stop].max(initial=depth)),
        last_string,
        ended,
    )


def scan_values(text: bytes) -> tuple[npt.NDArray[np.intp], int]:
    """Give the places right behind each array and object that closes, and how deep they nest.

    The text starts outside of any string; what stands within others does not count, nor what
    comes behind a bracket that nothing here has opened. The grammar is not checked.
    """
    _, inside = mask_strings(text)
    # What is escaped stands within strings, and so does not count.
    steps = np.frombuffer(text.translate(_NESTING_STEPS), np.int8) * (inside ^ 1).view(np.int8)
    places = np.flatnonzero(steps != 0)
    depths = np.cumsum(steps[places], dtype=np.int32)
    beyond = np.flatnonzero(depths < 0)
    if beyond.size:
        places, depths = places[: beyond[0]], depths[: beyond[0]]
    return places[depths == 0] + 1, int(depths.max(initial=0))


def count_objects_and_members(text: bytes) -> tuple[int, int]:
    """Count the objects of JSON values, and their members: a key that comes twice is two."""
    codes, inside = mask_strings(text)
    marks = codes * (inside ^ 1)
    return int(np.count_nonzero(marks == ord("{"))), int(np.count_nonzero(marks == ord(":")))


def scan_array_values(text: bytes) -> tuple[int, bool, int]:
    """Give where the last comma stands between values of an array, or where that ends.

    Tells too whether it ends, and how deep arrays nest up to there. The text starts within the
    array, before a value; it is 0 where there is no such place. The grammar is not checked.
    """
    codes, inside = mask_strings(text)
    outside = (inside ^ 1).view(np.int8)
    depths = np.cumsum(
        np.frombuffer(text.translate(_NESTING_STEPS), np.int8) * outside, dtype=np.int32
    )
    beyond = int((depths < 0).argmax()) if depths.size else 0
    ends = bool(depths.size) and bool(depths[beyond] < 0)
    if ends:
        end = beyond
    else:
        commas = np.flatnonzero((codes == ord(",")) & (depths == 0) & outside.view(np.bool_))
        end = int(commas[-1]) if commas.size else 0
    arrays = np.frombuffer(text.translate(_ARRAY_STEPS), np.int8)[:end] * outside[:end]
    return end, ends, int(np.cumsum(arrays, dtype=np.int32).max(initial=0))
