"""A queue in which clients take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Holds what waits, in order for each client; each one gets a turn, however much it has."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        """The client whose turn it is comes first."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._waiting.values())

    def append(self, item: T, client: str) -> None:
        """Add what waits for a client."""
        self._waiting.setdefault(client, deque()).append(item)

    def popleft(self) -> T:
        """Remove and return what has waited longest of the next client; there must be some."""
        client = next(iter(self._waiting))
        items = self._waiting.pop(client)
        item = items.popleft()
        if items:
            self._waiting[client] = items  # behind the other clients
        return item
