"""The numbers of one series: a counter, or a histogram, in words that processes share.

Each word is a float of 64 bits at an aligned address. It is read and written as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final


class Counter:
    """Counts up one word of shared memory, which only this process writes."""

    def __init__(self, words: memoryview[float], at: int) -> None:
        # A view of one word: compiled, index 0 takes 25 ns less than one that varies.
        self._word: Final = words[at : at + 1]

    def add(self, amount: float) -> None:
        """Add an amount, which must not be negative."""
        self._word[0] += amount


class Histogram:
    """Counts values by size, and sums them up, in words that only this process writes.

    The first word is the sum. Then one word for each bucket counts the values up to its bound that
    are above the bound before; the last word counts those above all bounds.
    """

    def __init__(self, words: memoryview[float], at: int, bounds: tuple[float, ...]) -> None:
        self._words: Final = words[at : at + len(bounds) + 2]
        self._bounds: Final = bounds

    def observe(self, value: float) -> None:
        """Count a value, which must not be negative."""
        words = self._words
        words[bisect_left(self._bounds, value) + 1] += 1.0
        words[0] += value
