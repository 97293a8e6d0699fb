"""What connections buffer of bodies in transit, and how much each of them may."""

from __future__ import annotations

MAX_WINDOW = 512 * 1024
"""Bytes of a body that wait for their reader before the sender is held back."""
MIN_WINDOW = 16 * 1024
"""The same, where very many bodies are in transit; a read brings no more then, either."""

MIN_STREAM_BYTES = 4 * MIN_WINDOW
"""Bytes that each body in transit may take in any case: a window, a read beyond it, and as much on
the connection that it leaves by."""

_PARTS = 8
"""Parts of the memory, of which each stream's window is at most one: all windows together take an
eighth, reads beyond them and what waits to be sent take more, and the rest is for whole bodies."""

_UNBOUNDED = 2**62


class BufferAccount:
    """Counts the bytes that a process buffers; ``limit`` is for all of them.

    Streams are the bodies of which more is to come. What one of them may buffer before its sender
    is held back, its window, shrinks as their number grows: down to one small read each.
    """

    def __init__(self, limit: int = _UNBOUNDED) -> None:
        self.reserved = 0
        """Bytes that calls hold of whole bodies."""
        self.buffered = 0
        """Bytes that connections have read ahead, or could not send yet."""
        self.streams = 0
        self.window = MAX_WINDOW
        """Bytes that a stream may buffer."""
        self._limit = limit

    @property
    def limit(self) -> int:
        """Give the bytes that there may be."""
        return self._limit

    @property
    def total(self) -> int:
        """Give the bytes that are held and buffered."""
        return self.reserved + self.buffered

    @property
    def free(self) -> int:
        """Give the bytes that are left, once each stream has had its least; below 0 if none are."""
        return self._limit - self.reserved - max(self.buffered, self.streams * MIN_STREAM_BYTES)

    @property
    def read_size(self) -> int:
        """Give the bytes that a read may bring."""
        return self.window if self.free > 0 else MIN_WINDOW

    def set_limit(self, limit: int) -> None:
        """Have another limit from now on."""
        self._limit = limit
        self._share()

    def open_stream(self) -> None:
        """Count a body of which more is to come."""
        self.streams += 1
        self._share()

    def close_stream(self) -> None:
        """Count one fewer."""
        self.streams -= 1
        self._share()

    def change(self, size: int) -> None:
        """Count so many buffered bytes more, or fewer."""
        self.buffered += size

    def _share(self) -> None:
        share = self._limit // (_PARTS * max(1, self.streams))
        self.window = max(MIN_WINDOW, min(MAX_WINDOW, share))
