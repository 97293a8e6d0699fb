"""Weighted choice, for traffic that is split between upstreams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Generic, Self, TypeVar

_T = TypeVar("_T")

_BITS = 53
"""A float tells all integers of so many bits apart."""


@dataclass(frozen=True, slots=True)
class CumulativeWeights:
    """The running sums of weights: each choice owns the range up to its sum."""

    ends: tuple[int, ...]

    @classmethod
    def of(cls, weights: Iterable[int]) -> Self:
        """Sum up weights: integers of 0 or more, at least one of them above 0."""
        return cls(tuple(accumulate(weights)))

    def at(self, fraction: float) -> int:
        """Return the index of the choice in whose range a fraction of [0, 1) lies."""
        return bisect_right(self.ends, fraction * self.ends[-1])


def hash_to_fraction(text: str) -> float:
    """Map a text to a number in [0, 1), the same in every process."""
    # Header values may hold surrogates, which UTF-8 refuses.
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> (64 - _BITS)) / (1 << _BITS)


class WeightedChoice(Generic[_T]):
    """Chooses for successive requests by weight.

    ``next`` stays until it is taken. So a choice that the fast path leaves, as no connection is
    idle there, is not lost, and the shares are those of the weights.
    """

    __slots__ = ("_draw", "next")

    def __init__(self, draw: Callable[[], _T] | None, first: _T) -> None:
        self._draw = draw
        self.next = first

    def take(self) -> _T:
        """Return the choice for a request, and choose for the next one."""
        chosen = self.next
        if self._draw is not None:
            self.next = self._draw()
        return chosen


class TrafficSplit(Generic[_T]):
    """Splits requests among ``targets``, which have a weight each.

    Every value of ``sticky_header`` stays with one target. ``random`` returns numbers in [0, 1).
    """

    def __init__(
        self,
        targets: Sequence[_T],
        weights: Iterable[int],
        sticky_header: str | None,
        random: Callable[[], float],
    ) -> None:
        shares = self._shares = CumulativeWeights.of(weights)
        self._sticky_header = sticky_header
        self._fixed = [WeightedChoice(None, target) for target in targets]
        if len(targets) == 1:
            self._weighted = self._fixed[0]
        else:

            def draw() -> _T:
                return targets[shares.at(random())]

            self._weighted = WeightedChoice(draw, draw())

    def choice(self, headers: Mapping[str, str]) -> WeightedChoice[_T]:
        """Return the choice for requests with these headers."""
        value = None if self._sticky_header is None else headers.get(self._sticky_header)
        if value is None:
            return self._weighted
        return self._fixed[self._shares.at(hash_to_fraction(value))]
