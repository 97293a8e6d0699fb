"""Finds where the text of an array of numbers stops, and where it can be cut."""

from __future__ import annotations

import numpy as np

from gateway.codec import native
from gateway.codec.json.text_search import end_of_numbers

NumberScan = tuple[int, int, int, int, int, int, int]
"""What was found in a text of numbers; all offsets count from its start.

Where the text stops being numbers and brackets for certain, or its size. The end of the last
closing bracket before that, 0 without one, and how many brackets are opened and closed up to there.
The last comma before that, -1 without one, and how many brackets are opened and closed up to there.
"""

_MAX_SINGLE_FINDS = 6
"""Up to this count, ``find`` is faster than numpy: brackets at both ends of an array, for example.
"""


def scan_numbers(buffer: bytes, start: int, end: int) -> NumberScan:
    """Scan the text of a buffer from start to end, which begins among the numbers of an array."""
    if native.scan_numbers is not None:
        return native.scan_numbers(buffer, start, end)
    stop = end_of_numbers(buffer, start, end)
    close = buffer.rfind(b"]", start, stop) + 1 or start
    cut = buffer.rfind(b",", start, stop)
    before_cut = max(cut, start)
    return (
        stop - start,
        close - start,
        _count(b"[", buffer, start, close),
        _count(b"]", buffer, start, close),
        cut - start if cut >= 0 else -1,
        _count(b"[", buffer, start, before_cut),
        _count(b"]", buffer, start, before_cut) if close > start else 0,
    )


def _count(mark: bytes, buffer: bytes, start: int, end: int) -> int:
    """Count a mark; a few are found faster by ``find`` than by numpy."""
    at = start - 1
    for count in range(_MAX_SINGLE_FINDS):
        at = buffer.find(mark, at + 1, end)
        if at < 0:
            return count
    return int(np.count_nonzero(np.frombuffer(buffer, np.uint8, end - start, start) == ord(mark)))
