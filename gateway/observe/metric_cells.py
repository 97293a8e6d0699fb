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


PRECISION: Final = 0.02
"""How far the middle of a fine bucket is from each of its values, at most, as a share of them."""
_PARTS_OF_FIRST: Final = 25
"""It begins at 0, where a share is nothing: its parts are of equal width."""
_CELLS_OF_PART: Final = 4
"""Of the narrowest part. With more, parts come nearer to the width that they may have."""


class FineBuckets:
    """Divides buckets into parts, so that percentiles are exact to ``PRECISION``.

    ``bounds`` are the upper bounds of the buckets. Each bucket is a row of cells of equal width, so
    that a value whose bucket is known is found by one multiplication. A part is as many cells as
    the precision allows: the higher it lies, the more. The first bucket has 25 equal parts. Values
    above all bounds are one part.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._lows: Final[list[float]] = [0.0]
        self._scales: Final[list[float]] = [0.0]
        self._firsts: Final[list[int]] = [0]
        self._lasts: Final[list[int]] = [0]
        self._parts: Final[list[int]] = [0]
        """The part of each cell."""
        found: list[float] = []
        for low, high in pairwise((0.0, *bounds)):
            cells, ends = _divide(low, high)
            self._lows.append(low)
            self._scales.append(cells / (high - low))
            self._firsts.append(len(self._parts))
            begin = 0
            for end in ends:
                found.append(low + (high - low) * end / cells if end < cells else high)
                self._parts.extend([len(found)] * (end - begin))
                begin = end
            self._lasts.append(len(self._parts) - 1)
        self._lows.append(bounds[-1])
        self._scales.append(0.0)
        self._firsts.append(len(self._parts))
        self._lasts.append(len(self._parts))
        self._parts.append(len(found) + 1)
        self.bounds: Final = tuple(found)
        """The upper bounds of all parts."""

    def find(self, bucket: int, value: float) -> int:
        """Return the part of a value, whose bucket is the ``bucket`` of Histogram."""
        cell = self._firsts[bucket] + int((value - self._lows[bucket]) * self._scales[bucket])
        return self._parts[min(cell, self._lasts[bucket])]


def _divide(low: float, high: float) -> tuple[int, list[int]]:
    """Return how many cells a bucket has, and behind which of them its parts end."""
    if not low:
        return _PARTS_OF_FIRST, list(range(1, _PARTS_OF_FIRST + 1))
    widest = 2 * PRECISION  # as a share of a part's lower bound
    cells = math.ceil(round((high - low) / (low * widest / _CELLS_OF_PART), 6))
    width, end, ends = (high - low) / cells, 0, []
    while end < cells:
        room = widest * (low + width * end) / width
        end = min(cells, end + max(1, math.floor(room + 1e-6)))
        ends.append(end)
    return cells, ends
