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

TIME_SLICE_WORK: Final = 400
"""Work of a connection in one time slice of the event loop: about 1 ms, and less if compiled.
The unit is what a small frame costs."""
MESSAGE_WORK: Final = 8
"""Work of a head or of trailers beside their block. A time slice begins some 40 calls. Fewer would
share fewer writes to their server: 90 calls took 15 % more CPU each in time slices of 15."""
BLOCK_BYTES_PER_WORK: Final = 10
"""Bytes of a header block. Each can be a field: ``MAX_FIELDS`` take a whole time slice."""
SETTINGS_PER_WORK: Final = 16
STREAMS_PER_WORK: Final = 16
"""Streams whose windows change by one frame, or whose senders are woken by it."""

MAX_TINY_DATA: Final = 10_000
"""Pieces of less than TINY_FRAME bytes of data that may come at once. Later ones have to wait, and
nothing is closed: streams of tokens have such frames, and a proxy sends those of many clients."""
MAX_TINY_DATA_PER_SECOND: Final = 200_000
"""More messages than one core relays: all streams to a server share a connection. Reading them
takes a quarter of a core."""


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
        return not self.excess()

    def excess(self) -> float:
        """Return in how many seconds the limit is kept again; 0 if it is."""
        if self._left < 0.0:
            now = self._clock()
            self._left = min(self._most - 1.0, self._left + (now - self._since) * self._per_second)
            self._since = now
        return max(0.0, -self._left / self._per_second)

    def earn(self, count: float) -> None:
        """Allow more events."""
        self._left = min(self._most, self._left + count)
