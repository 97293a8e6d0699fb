"""The numbers of one series: a counter, or a histogram, in words that processes share.

Each word is a float of 64 bits at an aligned address. It is read and written as a whole. The one
process that writes a series knows its numbers, so that it never has to read a word.
"""

from __future__ import annotations

import math
from itertools import pairwise
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

    def count(self, bucket: int) -> None:
        """Count a value in its bucket, and leave the sum as it is."""
        counts = self._counts
        count = counts[bucket] + 1.0
        counts[bucket] = count
        self._words[bucket] = count

    def add(self, bucket: int, value: float) -> None:
        """Count a value in its bucket."""
        counts = self._counts
        count = counts[bucket] + 1.0
        counts[bucket] = count
        self._words[bucket] = count
        total = self._sum + value
        self._sum = total
        self._words[0] = total


_PARTS_OF_FIRST = 10
_MOST_WIDTH = 0.1
"""Of a part, as a share of its bucket's lower bound: its middle is within 5 % of each value."""


class FineBuckets:
    """Divides buckets into parts of equal width, so that percentiles are exact to 5 %.

    A value whose bucket is known is found in its part by one multiplication. ``bounds`` are the
    upper bounds of the buckets. Values above all of them are one part.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._lows: Final[list[float]] = [0.0]
        self._scales: Final[list[float]] = [0.0]
        self._firsts: Final[list[int]] = [0]
        self._lasts: Final[list[int]] = [0]
        found: list[float] = []
        for low, high in pairwise((0.0, *bounds)):
            parts = _PARTS_OF_FIRST
            if low:
                parts = math.ceil(round((high - low) / (low * _MOST_WIDTH), 6))
            self._lows.append(low)
            self._scales.append(parts / (high - low))
            self._firsts.append(len(found) + 1)
            found += [low + (high - low) * part / parts for part in range(1, parts)]
            found.append(high)
            self._lasts.append(len(found))
        self._lows.append(bounds[-1])
        self._scales.append(0.0)
        self._firsts.append(len(found) + 1)
        self._lasts.append(len(found) + 1)
        self.bounds: Final = tuple(found)
        """The upper bounds of all parts."""

    def find(self, bucket: int, value: float) -> int:
        """Return the part of a value, whose bucket is the ``bucket`` of Histogram."""
        part = self._firsts[bucket] + int((value - self._lows[bucket]) * self._scales[bucket])
        return min(part, self._lasts[bucket])
