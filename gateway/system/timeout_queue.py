"""Times out many entries of the same timeout with a single timer."""

from __future__ import annotations

import asyncio
from typing import Protocol


class TimeoutListener(Protocol):
    """What a TimeoutQueue times out."""

    def on_timeout(self) -> None:
        """End, as the time is over."""


class TimeoutQueue:
    """Gives every entry the same timeout, in seconds.

    The entry that was added first is due first. So one timer, for the first entry, is enough.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._due: dict[TimeoutListener, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return len(self._due)

    def add(self, entry: TimeoutListener) -> None:
        """Start the time of an entry."""
        due = self._due[entry] = self._loop.time() + self._timeout
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._check)

    def remove(self, entry: TimeoutListener) -> float:
        """Stop the time of an entry; return the seconds that it has taken."""
        due = self._due.pop(entry, None)
        return 0.0 if due is None else self._loop.time() - (due - self._timeout)

    def close(self) -> None:
        """Drop all entries and the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.clear()

    def _check(self) -> None:
        now = self._loop.time()
        try:
            while self._due:
                entry, due = next(iter(self._due.items()))
                if due > now:
                    break
                del self._due[entry]
                entry.on_timeout()
        finally:
            # Also after an error: the other entries need their timer.
            first = next(iter(self._due.values()), None)
            self._timer = None if first is None else self._loop.call_at(first, self._check)
