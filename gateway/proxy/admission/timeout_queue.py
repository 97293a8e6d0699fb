"""Ends exchanges of the straight way that take too long."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Timed(Protocol):
    """What is to be over in time."""

    def late(self) -> None:
        """End, as the time is over."""


class TimeoutQueue:
    """Gives each of many the same time, in seconds, by one timer for all.

    What began first is late first, so that the timer is that of the first: an exchange costs no
    timer of its own.
    """

    def __init__(self, time: float) -> None:
        self._time = time
        self._loop = asyncio.get_running_loop()
        self._due: dict[Timed, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def watched(self) -> int:
        """Give how many there are."""
        return len(self._due)

    def add(self, watched: Timed) -> None:
        """Begin to count its time."""
        due = self._due[watched] = self._loop.time() + self._time
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._look)

    def remove(self, watched: Timed) -> float:
        """Watch it no more; give the seconds that it has taken."""
        due = self._due.pop(watched, None)
        return 0.0 if due is None else self._loop.time() - (due - self._time)

    def close(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._due.clear()

    def _look(self) -> None:
        now = self._loop.time()
        while self._due:
            watched, due = next(iter(self._due.items()))
            if due > now:
                self._timer = self._loop.call_at(due, self._look)
                return
            del self._due[watched]
            watched.late()
        self._timer = None
