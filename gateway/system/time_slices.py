"""Splits what takes long into time slices, and gives them to connections by turns of clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


def split(data: bytes | memoryview, size: int) -> Iterator[bytes | memoryview]:
    """Yield data in slices of at most ``size`` bytes, for a time slice each."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


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


class TimeSliceQueue:
    """Runs one time slice in each iteration of the event loop.

    However many wait here, all others wait for one of their time slices only. Clients take turns.
    """

    def __init__(self) -> None:
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()

    def add(self, time_slice: Callable[[], None], client: str = "") -> None:
        """Call ``time_slice`` once, in a later iteration of the event loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(time_slice, client)

    async def next_slice(self) -> None:
        """Yield to other calls, and wait for a time slice."""
        granted = asyncio.get_running_loop().create_future()
        self.add(lambda: None if granted.done() else granted.set_result(None))
        await granted

    def _run(self) -> None:
        time_slice = self._waiting.popleft()
        if self._waiting:  # also if this one raises
            asyncio.get_running_loop().call_soon(self._run)
        time_slice()


class PerLoop(Generic[T]):
    """Has one object for each event loop, made when it is first asked for.

    None may refer to its loop, which would be kept for ever.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._all: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def get(self) -> T:
        """Return that of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._all.get(loop)
        if found is None:
            found = self._all[loop] = self._make()
        return found


_queues = PerLoop(TimeSliceQueue)


def time_slice_queue() -> TimeSliceQueue:
    """Return the queue of the running event loop: one for all of its connections."""
    return _queues.get()
