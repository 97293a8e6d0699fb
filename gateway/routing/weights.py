"""Which of several upstreams a request goes to, by their weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Self

_BITS = 53
"""As many as a float has: all numbers of so many bits are told apart."""


@dataclass(frozen=True, slots=True)
class CumulativeWeights:
    """The line from 0 to the sum of the weights, cut where one share ends and the next begins."""

    ends: tuple[int, ...]

    @classmethod
    def of(cls, weights: Iterable[int]) -> Self:
        """Take whole numbers, none below 0 and at least one above it."""
        return cls(tuple(accumulate(weights)))

    def at(self, number: float) -> int:
        """Give the index of the share in which a number of [0, 1) lies."""
        return bisect_right(self.ends, number * self.ends[-1])


def hash_to_fraction(text: str) -> float:
    """Give a number in [0, 1) that is the same for the same text, in every process."""
    # A hash with surrogates in its text would fail; what HTTP allows is hashed as it is.
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> (64 - _BITS)) / (1 << _BITS)
