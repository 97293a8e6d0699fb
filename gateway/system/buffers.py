"""Accounts for buffered bytes, and sizes the read window of each stream."""

from __future__ import annotations

from collections.abc import Callable

MAX_WINDOW = 640 * 1024
"""Bytes of a body that are buffered before reading is paused: the tensors of an image."""
MIN_WINDOW = 16 * 1024
"""The same with very many streams; then it is also the size of a read."""

MIN_STREAM_BYTES = 4 * MIN_WINDOW
"""Bytes that each stream may always take: a window, a read beyond it, and as much on the connection
that sends it."""

_WINDOW_SHARE = 8
"""All windows together take an eighth of the limit. Reads beyond them and unsent bytes take more;
the rest is for buffered bodies."""

_UNBOUNDED = 2**62


def _ignore() -> None:
    """Ignore a refusal."""


class BufferAccount:
    """Counts the bytes that a process buffers; ``limit`` is for all of them.

    A stream is a body that is still arriving. Its window is what it may buffer before reading is
    paused. Windows shrink as the number of streams grows, down to one small read each.
    """

    def __init__(self, limit: int = _UNBOUNDED) -> None:
        self.reserved = 0
        """Bytes of buffered bodies, as calls have reserved them."""
        self.buffered = 0
        """Bytes that connections have read ahead, or could not send yet."""
        self.streams = 0
        self.window = MAX_WINDOW
        """Bytes that a stream may buffer."""
        self._limit = limit
        self.on_refusal: Callable[[], None] = _ignore
        """Called for each request that is refused because too much is buffered."""

    @property
    def limit(self) -> int:
        """Return the limit of all bytes."""
        return self._limit

    @property
    def total(self) -> int:
        """Return the reserved and buffered bytes."""
        return self.reserved + self.buffered

    @property
    def free(self) -> int:
        """Return the bytes left after each stream's minimum; negative if overcommitted."""
        return self._limit - self.reserved - max(self.buffered, self.streams * MIN_STREAM_BYTES)

    @property
    def read_size(self) -> int:
        """Return the size of the next read."""
        return self.window if self.free > 0 else MIN_WINDOW

    def set_limit(self, limit: int) -> None:
        """Change the limit."""
        self._limit = limit
        self._resize_windows()

    def open_stream(self) -> None:
        """Count a body that is still arriving."""
        self.streams += 1
        self._resize_windows()

    def close_stream(self) -> None:
        """Stop counting such a body."""
        self.streams -= 1
        self._resize_windows()

    def change(self, size: int) -> None:
        """Add ``size`` to the buffered bytes; it may be negative."""
        self.buffered += size

    def _resize_windows(self) -> None:
        share = self._limit // (_WINDOW_SHARE * max(1, self.streams))
        self.window = max(MIN_WINDOW, min(MAX_WINDOW, share))
