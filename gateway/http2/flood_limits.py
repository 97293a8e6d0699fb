"""Limits for what costs a peer little and the gateway much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_RESETS: Final = 1000
"""Streams that may be reset at once. A reset request costs the gateway a call that has begun."""
MAX_RESETS_PER_SECOND: Final = 100

MAX_CONTROL_FRAMES: Final = 10_000
"""Frames that may come at once without opening a stream or carrying data."""
MAX_CONTROL_FRAMES_PER_SECOND: Final = 1000
CONTROL_FRAMES_PER_MESSAGE: Final = 4
"""Further ones for each DATA frame that was sent, and for each stream: acknowledgements of them."""

MAX_TINY_FRAMES: Final = 1000
"""DATA frames that may be cut small because the peer opens its windows by too little; one more for
each TINY_FRAME bytes of data that it lets through."""
MAX_TINY_FRAMES_PER_SECOND: Final = 100
TINY_FRAME: Final = 256
"""Bytes of data: so many or more are worth a frame."""


class RateLimit:
    """Counts events; ``most`` may come at once, and ``per_second`` in the long run.

    After a quiet time, twice ``most`` may come at once: the clock is read rarely.
    """

    def __init__(self, most: int, per_second: int, clock: Callable[[], float]) -> None:
        self._most: Final = float(most)
        self._per_second: Final = float(per_second)
        self._clock: Final = clock
        self._left = float(most)
        self._since = clock()

    def spend(self) -> bool:
        """Count an event; return whether it is within the limit."""
        self._left -= 1.0
        if self._left < 0.0:
            now = self._clock()
            self._left = min(self._most - 1.0, self._left + (now - self._since) * self._per_second)
            self._since = now
        return self._left >= 0.0

    def earn(self, count: float) -> None:
        """Allow more events."""
        self._left = min(self._most, self._left + count)
