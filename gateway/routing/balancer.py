"""Which endpoint of an upstream takes the next exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class LoadBalancingPolicy:
    """By what an endpoint is chosen: the fewest exchanges under way, if nothing else is said."""

    in_turn: bool = False
    """One after the other, however busy they are."""
    header: str | None = None
    """The header of which every value stays with one endpoint; without it, nothing is said."""


LEAST_REQUEST = LoadBalancingPolicy()


def chosen(
    policy: LoadBalancingPolicy,
    names: Sequence[str],
    outstanding: Sequence[int],
    turn: int,
    key: str | None,
) -> int:
    """Give the index of the endpoint that a policy chooses.

    ``turn`` counts up with every call; ``key`` is the header's value.
    """
    if key is not None and policy.header is not None:
        return choose_by_hash(names, key)
    if policy.in_turn:
        return choose_round_robin(len(names), turn)
    return choose_least_request(outstanding, turn)


def choose_least_request(outstanding: Sequence[int], turn: int) -> int:
    """Give the index of the endpoint with the fewest exchanges under way.

    ``turn`` counts up with every call: endpoints that are equally busy take turns.
    """
    count = len(outstanding)
    in_turn = (i % count for i in range(turn, turn + count))
    return min(in_turn, key=outstanding.__getitem__)


def choose_round_robin(count: int, turn: int) -> int:
    """Give the index of the endpoint whose turn it is, of so many; ``turn`` counts up."""
    return turn % count


def choose_by_hash(names: Sequence[str], key: str) -> int:
    """Give the index of the endpoint to which a key belongs, by the endpoints' names.

    A key stays with its endpoint for as long as that is among them. Where one leaves, only its own
    keys move, evenly to the others; where one comes, it takes its share from all (rendezvous
    hashing). The same in every process.
    """
    return max(range(len(names)), key=lambda i: _weight(names[i], key))


def _weight(name: str, key: str) -> bytes:
    # Neither of the two can hold the NUL between them.
    return blake2b(f"{name}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()
