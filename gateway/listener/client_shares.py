"""Bounds what clients hold together, and chooses who gives way to a newcomer.

Refusing the newcomer would let one client that holds everything lock out all others.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_IPV6_CLIENT = 64
"""Bits of an IPv6 address that tell clients apart: a host may use any address of its network."""


class ClientShares(Generic[T]):
    """Holds items of clients, whose sizes are at most ``limit`` together.

    Above it, the client that holds most loses its items, the oldest first. Those in use go only
    behind all others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._shares: dict[str, _Share[T]] = {}
        self._clients: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[T]:
        return iter(self._clients)

    def add(self, item: T, client: str, size: int = 1) -> list[T]:
        """Count an item; return those that have to go for it, which do not count any more."""
        gone = []
        while self._clients and self._total + size > self._limit:
            largest = max(self._shares.values(), key=lambda share: share.size)
            gone.append(next(iter(largest.idle or largest.in_use)))
            self.discard(gone[-1])
        share = self._shares.setdefault(client, _Share())
        share.idle[item] = size
        share.size += size
        self._total += size
        self._clients[item] = client
        return gone

    def discard(self, item: T) -> None:
        """Stop counting an item, if it counts."""
        client = self._clients.pop(item, None)
        if client is None:
            return
        share = self._shares[client]
        items = share.idle if item in share.idle else share.in_use
        size = items.pop(item)
        share.size -= size
        self._total -= size
        if not (share.idle or share.in_use):
            del self._shares[client]

    def set_in_use(self, item: T, in_use: bool) -> None:
        """Note that an item is used from now on, or idle again; it is its client's youngest."""
        client = self._clients.get(item)
        if client is not None:
            share = self._shares[client]
            size = (share.idle if item in share.idle else share.in_use).pop(item)
            (share.in_use if in_use else share.idle)[item] = size


class _Share(Generic[T]):
    """The items of one client, the oldest first, with their sizes."""

    def __init__(self) -> None:
        self.size = 0
        self.idle: dict[T, int] = {}
        self.in_use: dict[T, int] = {}


def client_of(peername: object) -> str:
    """Return whose a connection is, by what ``getpeername`` returns: an address, or a network.

    All clients of a Unix socket are one, as are those that are gone already.
    """
    if not isinstance(peername, tuple):
        return ""
    address = str(peername[0]).partition("%")[0]
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, _IPV6_CLIENT), strict=False))
