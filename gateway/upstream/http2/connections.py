"""The connections of an endpoint: spreads requests over them, and opens more if they are full.

It also reads calls that nobody waits for to their end, so that their server sees no cancellation:
a Triton before 2.59 dies at times when a call is cancelled while it responds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from gateway.http2.hpack import HeaderList
from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.exchange import ConnectionQueue
from gateway.upstream.http2.connection import MAX_STREAMS, Http2ServerConnection, ServerStream
from gateway.upstream.transport import CallCounter

MAX_CONNECTIONS: Final = 32
"""Connections to one endpoint. Only servers that allow few streams need many; over HTTP/1.1 there
would be one for each call."""


class ServerConnections(ConnectionQueue[Http2ServerConnection]):
    """Gives each request the connection with the fewest open streams; see ConnectionQueue.

    If all are full, it opens another one; at ``max_connections`` requests wait, in their order. A
    connection without streams is closed after ``idle_timeout`` seconds.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Http2ServerConnection]],
        idle_timeout: float,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        super().__init__(connect)
        self._max_connections = max_connections
        self.sessions: dict[Http2ServerConnection, None] = {}
        """The connections that take requests."""
        self._idle = TimeoutQueue(idle_timeout)
        self._streams = MAX_STREAMS
        self._closed = False

    def take(self) -> Http2ServerConnection | None:
        """Return a connection for a request that is sent at once, None if it must wait."""
        return None if self.waiting else self._choose()

    def on_capacity(self) -> None:
        """Let waiting requests have the free streams; see SessionOwner."""
        while self.waiting and (session := self._choose()) is not None:
            request = self._take_next()
            assert request is not None
            request.send_over(session)
        self._grow()

    def on_idle(self, session: Http2ServerConnection) -> None:
        """Close a connection after a while, unless it is used again; see SessionOwner."""
        if self._closed:
            session.shut_down()
        elif session in self.sessions:
            self._idle.add(session)

    def on_leaving(self, session: Http2ServerConnection) -> None:
        """Use a connection no more; see SessionOwner."""
        was_used = session in self.sessions
        self.sessions.pop(session, None)
        self._idle.remove(session)
        if was_used:
            self._grow()

    def after_timeout(self) -> None:
        """Send new calls elsewhere than over the connection on which a call has timed out."""
        for session in tuple(self.sessions):
            session.run_guarded(session.after_timeout)

    async def close(self) -> None:
        """Close the idle connections, and each other one as soon as it is idle."""
        self._closed = True
        for session in tuple(self.sessions):
            if not session.handlers:
                session.shut_down()
        self._idle.close()
        await super().close()

    def _choose(self) -> Http2ServerConnection | None:
        """Return the connection with the fewest open streams, None if all are full."""
        chosen: Http2ServerConnection | None = None
        for session in self.sessions:
            if session.has_capacity and (
                chosen is None or len(session.http2.streams) < len(chosen.http2.streams)
            ):
                chosen = session
        if chosen is not None and not chosen.http2.streams:
            self._idle.remove(chosen)
        return chosen

    def _max_connects(self) -> int:
        return self._max_connections - len(self.sessions)

    def _has_other(self) -> bool:
        return bool(self.sessions)

    def _add(self, session: Http2ServerConnection) -> None:
        if (refusal := session.refusal) is not None:
            # Else a server that sends GOAWAY at once would be connected to without end.
            raise refusal
        try:
            self._streams = max(1, session.max_streams)
            self.sessions[session] = None
            self.on_capacity()
            if not session.handlers:
                self.on_idle(session)
        except Exception:
            session.drop()
            self.sessions.pop(session, None)
            raise


MAX_DRAINED: Final = MAX_CONNECTIONS * MAX_STREAMS // 2
"""Streams of an endpoint that are drained at a time: half of all, the others are for clients. It is
less if the server allows fewer streams of a connection."""
MAX_DRAIN_SECONDS: Final = 60.0
MAX_DRAIN_BYTES: Final = 64 * 1024 * 1024
"""Bytes of one response that are read to be dropped."""


class DrainedStreams:
    """The streams of an endpoint whose clients are gone, while its server still works on them.

    Each ends its request and drops what the server sends. It counts as a call in the ``counters``
    until the server has ended its response. Beyond ``max_streams``, and after ``max_seconds`` or
    ``max_bytes`` of a stream, the server is told after all. ``drains`` tells whether streams are
    drained now.
    """

    def __init__(
        self,
        drains: Callable[[], bool],
        max_streams: int = MAX_DRAINED,
        max_seconds: float = MAX_DRAIN_SECONDS,
        max_bytes: int = MAX_DRAIN_BYTES,
    ) -> None:
        self.counters: Final[list[CallCounter]] = []
        self._drains = drains
        self._closed = False
        self.streams: dict[_DrainedStream, None] = {}
        self._timeouts = TimeoutQueue(max_seconds)
        self._max_streams = max_streams
        self._max_bytes = max_bytes

    def take_over(self, stream: ServerStream, max_streams: int) -> bool:
        """Read a stream to its end and release it; see StreamDrain."""
        allowed = min(self._max_streams, MAX_CONNECTIONS * max_streams // 2)
        if self._closed or len(self.streams) >= allowed or not self._drains():
            return False
        if stream.received_end:
            stream.end_request()  # that completes it
            return False
        drained = _DrainedStream(stream, self, self._max_bytes)
        self._add(drained)
        try:
            stream.receiver = drained
            stream.discard()
            stream.end_request()
        except Exception:
            self.remove(drained)
            raise
        return True

    def _add(self, drained: _DrainedStream) -> None:
        self.streams[drained] = None
        self._timeouts.add(drained)
        for counter in self.counters:
            counter.count_call()

    def remove(self, drained: _DrainedStream) -> None:
        """Count a stream no more, which has ended."""
        if drained in self.streams:
            del self.streams[drained]
            self._timeouts.remove(drained)
            for counter in self.counters:
                counter.uncount_call()

    def close(self) -> None:
        """Cancel the calls of all streams, and drain no more."""
        self._closed = True
        for drained in tuple(self.streams):
            drained.end()
        self._timeouts.close()


class _DrainedStream:
    """The StreamReceiver of a stream that is drained."""

    def __init__(self, stream: ServerStream, owner: DrainedStreams, max_bytes: int) -> None:
        self._stream = stream
        self._owner = owner
        self._bytes_left = max_bytes

    def on_headers(self, headers: HeaderList) -> None:
        """Drop the headers; see StreamReceiver."""

    def on_data(self, size: int) -> None:
        """Count a part of the body; see StreamReceiver."""
        self._bytes_left -= size
        if self._bytes_left < 0:
            self.end()

    def on_end(self) -> None:
        """Release the stream; see StreamReceiver."""
        self.end()

    def on_error(self, error: Exception) -> None:
        """Release the stream; see StreamReceiver."""
        self.end()

    def on_timeout(self) -> None:
        """Give up waiting for the server; see TimeoutListener."""
        self.end()

    def end(self) -> None:
        """Release the stream; if it is not complete, its call is cancelled."""
        self._owner.remove(self)
        self._stream.release()
