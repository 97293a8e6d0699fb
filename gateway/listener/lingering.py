"""Streams whose response is complete while the client still sends their request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode
from gateway.http2.stream import Stream
from gateway.system.buffers import MAX_WINDOW
from gateway.system.timeout_queue import TimeoutQueue

MAX_LINGER_BYTES: Final = 64 * 1024 * 1024
"""Bytes that are dropped of all requests that linger on a connection: as many as the largest body
has by default."""


def _ignore() -> None:
    """Ignore the end of a stream."""


class LingeringStreams:
    """Drops what a client sends after complete responses, and resets streams that do not end.

    RFC 9113, section 8.1, allows a reset right after the response, but clients then lose it: curl
    7.88 reports a framing error. So a stream lingers for ``timeout`` seconds at most, and all of a
    connection for ``MAX_LINGER_BYTES``. It counts in MAX_CONCURRENT_STREAMS, and holds nothing
    else. ``on_end`` is called when one has ended, and may have output to flush.
    """

    def __init__(self, http2: Http2Connection, timeout: float, on_end: Callable[[], None]) -> None:
        self._http2: Final = http2
        self._timeouts: Final = TimeoutQueue(timeout)
        self._on_end = on_end
        self._streams: Final[dict[_LingeringStream, None]] = {}
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream) -> None:
        """Let the client end the request of a stream."""
        lingering = _LingeringStream(self, stream)
        stream.handler = lingering
        self._streams[lingering] = None
        self._timeouts.add(lingering)
        # Dropped data take no memory, so the client need not wait for a small window.
        self._http2.set_stream_window(stream, MAX_WINDOW)

    def receive(self, stream: Stream, size: int) -> None:
        """Count ``size`` bytes that were dropped of a stream, which may have ended with them."""
        lingering = stream.handler
        if isinstance(lingering, _LingeringStream):
            lingering.dropped += size
            self._dropped += size
            if stream.closed or self._dropped > MAX_LINGER_BYTES:
                self.end(lingering)

    def end(self, lingering: _LingeringStream) -> None:
        """Forget a stream; reset it if its request is not complete."""
        if lingering not in self._streams:
            return
        del self._streams[lingering]
        self._timeouts.remove(lingering)
        self._dropped -= lingering.dropped
        lingering.stream.handler = None
        self._http2.reset(lingering.stream, ErrorCode.NO_ERROR)
        self._on_end()

    def end_all(self) -> None:
        """Reset all streams."""
        for lingering in tuple(self._streams):
            self.end(lingering)

    def close(self) -> None:
        """Forget all streams, as their connection is closed."""
        for lingering in self._streams:
            lingering.stream.handler = None
        self._streams.clear()
        self._timeouts.close()
        self._on_end = _ignore


class _LingeringStream:
    """A stream that lingers, and how many bytes were dropped of it."""

    def __init__(self, owner: LingeringStreams, stream: Stream) -> None:
        self._owner: Final = owner
        self.stream: Final = stream
        self.dropped = 0

    def on_timeout(self) -> None:
        """End the stream."""
        self._owner.end(self)
