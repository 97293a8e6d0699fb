"""Load balancing: chooses the endpoint of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


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
