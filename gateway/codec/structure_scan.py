"""Finds the brackets, commas and ends of values in JSON text, outside of its strings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]
Steps = npt.NDArray[np.int8]

# Tables for bytes.translate, which takes a fifth of the time of numpy's indexing.
ARRAY_STEPS = bytes({ord("["): 1, ord("]"): 0xFF}.get(code, 0) for code in range(256))
"""What each byte adds to the depth of arrays, as an int8."""
_NESTING_STEP_OF = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", 0xFF)}
_NESTING_STEPS = bytes(_NESTING_STEP_OF.get(code, 0) for code in range(256))


def hide_escapes(text: bytes) -> bytes:
    """Replace escapes by as many other bytes, so that each quote begins or ends a string."""
    if b"\\" not in text:
        return text
    # Pairs of backslashes go first, from the left: the rest are backslashes before quotes.
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def mask_strings(text: bytes) -> tuple[Codes, Codes]:
    """Return the bytes of a text without escapes, and a mask with 1 for each byte within a string.

    The text begins outside of any string. An opening quote is within its string, the closing one is
    not.
    """
    codes = np.frombuffer(hide_escapes(text), np.uint8)
    quotes = (codes == ord('"')).view(np.uint8)
    return codes, np.bitwise_and(np.cumsum(quotes, dtype=np.uint8), 1)


def nesting_steps(
    text: bytes, inside: Codes, steps: bytes = _NESTING_STEPS
) -> npt.NDArray[np.int8]:
    """Return what each byte of a text adds to the depth of arrays and objects; 0 within strings.

    ``inside`` masks its strings. With ``ARRAY_STEPS``, objects do not count.
    """
    # The original text will do: escapes stand within strings, which are masked.
    return np.frombuffer(text.translate(steps), np.int8) * (inside ^ 1).view(np.int8)


def scan_values(text: bytes) -> tuple[npt.NDArray[np.intp], int]:
    """Return the offsets behind each top-level array and object, and the deepest nesting.

    The text begins outside of any string. Brackets in strings do not count, nor anything behind a
    bracket that closes more than was opened. The grammar is not checked.
    """
    _, inside = mask_strings(text)
    steps = nesting_steps(text, inside)
    offsets = np.flatnonzero(steps != 0)
    depths = np.cumsum(steps[offsets], dtype=np.int32)
    unopened = np.flatnonzero(depths < 0)
    if unopened.size:
        offsets, depths = offsets[: unopened[0]], depths[: unopened[0]]
    return offsets[depths == 0] + 1, int(depths.max(initial=0))


def outside_strings(text: bytes) -> bytes:
    """Return a text without its strings, which are complete: of short ones, sooner than a mask."""
    return b"".join(hide_escapes(text).split(b'"')[::2])


def count_objects_and_members(text: bytes) -> tuple[int, int]:
    """Count the objects in JSON values, and their members; duplicate keys count twice."""
    outside = outside_strings(text)
    return outside.count(b"{"), outside.count(b":")


def count_marks(text: bytes, marks: bytes) -> list[int]:
    """Count each of some bytes in a text, outside of its strings."""
    codes, inside = mask_strings(text)
    outside = codes * (inside ^ 1)
    return [int(np.count_nonzero(outside == mark)) for mark in marks]
