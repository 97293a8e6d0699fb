"""The connections of an endpoint: spreads requests over them, and opens more if they are full."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.connection_queue import ConnectionQueue
from gateway.upstream.http2.connection import MAX_STREAMS, Http2ServerConnection

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
