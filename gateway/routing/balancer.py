"""Load balancing: chooses the endpoint of a call, and by weight its upstream."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Generic, TypeVar

_T = TypeVar("_T")

_BITS = 53
"""A float tells all integers of so many bits apart."""


@dataclass(frozen=True, slots=True)
class LoadBalancingPolicy:
    """How an endpoint is chosen; by default the one with the fewest calls in flight."""

    round_robin: bool = False
    """In turn, whatever their load."""
    hash_header: str | None = None
    """Requests with the same value of this header go to the same endpoint."""


LEAST_REQUEST = LoadBalancingPolicy()


def choose_endpoint(
    policy: LoadBalancingPolicy,
    names: Sequence[str],
    outstanding: Sequence[int],
    counter: int,
    hash_key: str | None,
) -> int:
    """Return the index of the endpoint that a policy chooses.

    ``outstanding`` are the calls in flight at each endpoint. ``counter`` grows with every call;
    ``hash_key`` is the value of the hash header.
    """
    if hash_key is not None and policy.hash_header is not None:
        return choose_by_hash(names, hash_key)
    if policy.round_robin:
        return counter % len(names)
    return choose_least_request(outstanding, counter)


def choose_least_request(outstanding: Sequence[int], counter: int) -> int:
    """Return the index of the endpoint with the fewest calls in flight.

    ``counter`` grows with every call, so that equally busy endpoints take turns.
    """
    count = len(outstanding)
    rotation = (i % count for i in range(counter, counter + count))
    return min(rotation, key=outstanding.__getitem__)


def choose_by_hash(names: Sequence[str], key: str) -> int:
    """Return the index of the endpoint to which a key belongs (rendezvous hashing).

    A key stays with its endpoint while that is among the names. If one leaves, only its own keys
    move, evenly to the others. A new one takes its share from all. Every process chooses the same.
    """
    return max(range(len(names)), key=lambda i: _weight(names[i], key))


def _weight(name: str, key: str) -> bytes:
    # Neither of the two can hold the NUL between them.
    return blake2b(f"{name}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()


def choose_by_weight(ends: Sequence[int], fraction: float) -> int:
    """Return the index of the choice in whose range a fraction of [0, 1) lies.

    ``ends`` are the running sums of the weights: each choice owns the range up to its sum.
    """
    return bisect_right(ends, fraction * ends[-1])


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

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for all requests."""
        return self._draw is None

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
        ends = self._ends = tuple(accumulate(weights))
        self._sticky_header = sticky_header
        self._fixed = [WeightedChoice(None, target) for target in targets]
        if len(targets) == 1:
            self._weighted = self._fixed[0]
        else:

            def draw() -> _T:
                return targets[choose_by_weight(ends, random())]

            self._weighted = WeightedChoice(draw, draw())

    def choice(self, headers: Mapping[str, str]) -> WeightedChoice[_T]:
        """Return the choice for requests with these headers."""
        value = None if self._sticky_header is None else headers.get(self._sticky_header)
        if value is None:
            return self._weighted
        return self._fixed[choose_by_weight(self._ends, hash_to_fraction(value))]
