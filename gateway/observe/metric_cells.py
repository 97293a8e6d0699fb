"""The numbers of one series: a counter, or a histogram, in words that processes share.

Each word is a float of 64 bits at an aligned address. It is read and written as a whole. The one
process that writes a series knows its numbers, so that it never has to read a word.
"""

from __future__ import annotations

from typing import Final


class Counter:
    """Counts up one word of shared memory, which only this object writes."""

    def __init__(self, words: memoryview[float], at: int) -> None:
        # A view of one word: compiled, index 0 takes 25 ns less than one that varies.
        self._word: Final = words[at : at + 1]
        self._value: float = self._word[0]

    def add(self, amount: float) -> None:
        """Add an amount, which must not be negative."""
        value = self._value + amount
        self._value = value
        self._word[0] = value


class Histogram:
    """Counts values by size, and sums them up, in words that only this object writes.

    The first word is the sum. Then one word for each bucket counts the values up to its bound that
    are above the bound before; the last word counts those above all bounds.
    """

    def __init__(self, words: memoryview[float], at: int, bounds: tuple[float, ...]) -> None:
        self._words: Final = words[at : at + len(bounds) + 2]
        self._bounds: Final = bounds
        self._counts: Final[list[float]] = list(self._words)
        self._sum: float = self._words[0]

    def observe(self, value: float) -> None:
        """Count a value, which must not be negative."""
        self.add(self.bucket(value), value)

    def bucket(self, value: float) -> int:
        """Return the bucket of a value, which may be that of other histograms of the family."""
        number = 1
        for bound in self._bounds:  # most values are in the first few
            if value <= bound:
                return number
            number += 1
        return number

    def add(self, bucket: int, value: float) -> None:
        """Count a value in its bucket."""
        counts = self._counts
        count = counts[bucket] + 1.0
        counts[bucket] = count
        self._words[bucket] = count
        total = self._sum + value
        self._sum = total
        self._words[0] = total
