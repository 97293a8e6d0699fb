"""Limits how long connections wait for the rest of a body before its message is handed over."""

from __future__ import annotations

import time
from typing import Final

from gateway.system.timeout_queue import TimeoutListener, TimeoutQueue

DEFER_TIMEOUT: Final = 0.1
"""Seconds to wait for the rest of a small body, which many peers send after its head."""
LARGE_DEFER_TIMEOUT: Final = 0.002
"""The same for a large body: over a slow network it is better passed on as it arrives. Over HTTP/2,
the wait begins anew while some of it comes, for ``DEFER_TIMEOUT`` in all."""

_MAX_SMALL: Final = 128 * 1024
"""Bytes of the largest small body of known length."""


class Arrivals:
    """Tells whether a body whose rest is waited for since ``began`` keeps coming.

    Over HTTP/2, other streams have their share of the connection, and other connections theirs of
    the core.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._before = (0, 0)
        """The bytes that had come at the ends of the last two waits."""

    def renew(self, received: int) -> bool:
        """Return whether to wait once more: some came in the last two waits."""
        before, last = self._before
        self._before = last, received
        return received > before and time.perf_counter() - self._began < DEFER_TIMEOUT


class BodyDeferrals:
    """The connections that wait for the rest of a body; each is told when its time is over."""

    def __init__(self) -> None:
        self._small = TimeoutQueue(DEFER_TIMEOUT)
        self._large = TimeoutQueue(LARGE_DEFER_TIMEOUT)

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return self._small.size + self._large.size

    def add(self, entry: TimeoutListener, length: int | None) -> None:
        """Start the time of an entry; ``length`` is that of its whole body, None if unknown."""
        is_small = length is None or length <= _MAX_SMALL
        (self._small if is_small else self._large).add(entry)

    def shorten(self, entry: TimeoutListener, length: int) -> None:
        """Let an entry wait no longer than for a body of this length, which is known only now."""
        if length > _MAX_SMALL:
            self.remove(entry)
            self._large.add(entry)

    def remove(self, entry: TimeoutListener) -> None:
        """Stop the time of an entry."""
        self._small.remove(entry)
        self._large.remove(entry)

    def close(self) -> None:
        """Drop all entries and the timers."""
        self._small.close()
        self._large.close()
