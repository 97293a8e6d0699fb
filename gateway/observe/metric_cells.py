"""The numbers of one series: a counter, or a histogram, in words that processes share.

Each word is a float of 64 bits at an aligned address. It is read and written as a whole. The one
process that writes a series knows its numbers, so that it never has to read a word.
"""

from __future__ import annotations

import math
from bisect import bisect_left
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


PRECISION = 0.02
"""How far the middle of a fine bucket is from each of its values, at most, as a share of them."""
_PARTS_OF_FIRST = 25
"""It begins at 0, where a share is nothing: its parts are of equal width."""


class FineBuckets:
    """Divides buckets into parts, so that percentiles are exact to ``PRECISION``.

    ``bounds`` are the upper bounds of the buckets. The first bucket has 25 equal parts. In others
    each part is by the same factor larger than the one before. Values above all bounds are one
    part.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        found: list[float] = []
        self._ends: Final[list[int]] = [0]
        """How many parts there are up to the end of each bucket."""
        for low, high in pairwise((0.0, *bounds)):
            found.extend(_inner_bounds(low, high))
            found.append(high)
            self._ends.append(len(found))
        self._ends.append(len(found))
        self.bounds: Final = tuple(found)
        """The upper bounds of all parts."""

    def find(self, bucket: int, value: float) -> int:
        """Return the part of a value, whose bucket is the ``bucket`` of Histogram."""
        return 1 + bisect_left(self.bounds, value, self._ends[bucket - 1], self._ends[bucket])


def _inner_bounds(low: float, high: float) -> list[float]:
    """Return the bounds between the parts of a bucket."""
    if not low:
        return [high * part / _PARTS_OF_FIRST for part in range(1, _PARTS_OF_FIRST)]
    parts = math.ceil(math.log(high / low) / math.log(1 + 2 * PRECISION))
    return [low * (high / low) ** (part / parts) for part in range(1, parts)]
