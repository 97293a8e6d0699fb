"""The connections of an endpoint: spreads requests over them, and opens more if they are full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Protocol

from gateway.errors import GatewayError
from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.http2.connection import MAX_STREAMS, Http2ServerConnection

MAX_CONNECTIONS: Final = 32
"""Connections to one endpoint. Only servers that allow few streams need many; over HTTP/1.1 there
would be one for each call."""


class WaitingRequest(Protocol):
    """A request that waits for a stream; it gets one of these calls."""

    def send_over(self, session: Http2ServerConnection) -> None:
        """Send the request over a connection that has capacity."""

    def on_error(self, error: Exception) -> None:
        """Handle that no connection could be made."""


class ServerConnections:
    """Gives each request the connection with the fewest open streams.

    If all are full, it opens another one; at ``max_connections`` requests wait, in their order.
    ``connect`` makes a connection. Its error goes to the requests that came before it began, unless
    there are other connections. A connection without streams is closed after ``idle_timeout``
    seconds.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Http2ServerConnection]],
        idle_timeout: float,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._connect = connect
        self._max_connections = max_connections
        self._sessions: dict[Http2ServerConnection, None] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: dict[WaitingRequest, float] = {}
        self._idle = TimeoutQueue(idle_timeout)
        self._expected_streams = MAX_STREAMS
        self._closed = False

    @property
    def open_count(self) -> int:
        """The number of connections that take requests."""
        return len(self._sessions)

    @property
    def sessions(self) -> Collection[Http2ServerConnection]:
        """The connections that take requests."""
        return self._sessions.keys()

    @property
    def waiting_count(self) -> int:
        """The number of requests that wait for a stream."""
        return len(self._waiting)

    def take(self) -> Http2ServerConnection | None:
        """Return a connection for a request that is sent at once, None if it must wait."""
        return None if self._waiting else self._choose()

    def wait(self, request: WaitingRequest) -> None:
        """Give a request the first stream that is free; connect if that is needed."""
        self._waiting[request] = time.monotonic()
        self._grow()

    def stop_waiting(self, request: WaitingRequest) -> None:
        """Forget a request that is cancelled."""
        self._waiting.pop(request, None)

    def on_capacity(self) -> None:
        """Let waiting requests have the free streams; see SessionOwner."""
        while self._waiting and (session := self._choose()) is not None:
            request = next(iter(self._waiting))
            del self._waiting[request]
            request.send_over(session)
        if self._waiting:
            self._grow()

    def on_idle(self, session: Http2ServerConnection) -> None:
        """Close a connection after a while, unless it is used again; see SessionOwner."""
        if self._closed:
            session.shut_down()
        elif session in self._sessions:
            self._idle.add(session)

    def on_leaving(self, session: Http2ServerConnection) -> None:
        """Use a connection no more; see SessionOwner."""
        was_used = session in self._sessions
        self._sessions.pop(session, None)
        self._idle.remove(session)
        if was_used and self._waiting:
            self._grow()

    def after_timeout(self) -> None:
        """Send new calls elsewhere than over the connection on which a call has timed out."""
        for session in tuple(self._sessions):
            session.run_guarded(session.after_timeout)

    async def close(self) -> None:
        """Close the idle connections, and each other one as soon as it is idle."""
        self._closed = True
        for session in tuple(self._sessions):
            if not session.handlers:
                session.shut_down()
        self._idle.close()
        if not self._waiting:
            for task in self._connecting:
                task.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _choose(self) -> Http2ServerConnection | None:
        """Return the connection with the fewest open streams, None if all are full."""
        chosen: Http2ServerConnection | None = None
        for session in self._sessions:
            if session.has_capacity and (
                chosen is None or session.stream_count < chosen.stream_count
            ):
                chosen = session
        if chosen is not None and not chosen.stream_count:
            self._idle.remove(chosen)
        return chosen

    def _grow(self) -> None:
        """Begin as many connects as the waiting requests need."""
        wanted = -(-len(self._waiting) // self._expected_streams)
        allowed = self._max_connections - len(self._sessions)
        while len(self._connecting) < min(wanted, allowed):
            task = asyncio.create_task(self._add_connection())
            self._connecting.add(task)
            task.add_done_callback(self._end_connect)

    def _end_connect(self, task: asyncio.Task[None]) -> None:
        """Fail the requests that wait for a connect which has failed unexpectedly."""
        self._connecting.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail_waiting(error, time.monotonic())

    async def _add_connection(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        began = time.monotonic()
        session: Http2ServerConnection | None = None
        try:
            session = await self._connect()
            self._connecting.discard(task)
            if (refusal := session.refusal) is not None:
                # Else a server that sends GOAWAY at once would be connected to without end.
                self._fail_waiting(refusal, began)
                return
            self._add(session)
        except Exception as error:
            self._connecting.discard(task)
            if session is not None:
                session.drop()
                self._sessions.pop(session, None)
            self._fail_waiting(error, began)

    def _add(self, session: Http2ServerConnection) -> None:
        """Use a new connection."""
        self._expected_streams = max(1, session.max_streams)
        self._sessions[session] = None
        self.on_capacity()
        if not session.handlers:
            self.on_idle(session)

    def _fail_waiting(self, error: Exception, began: float) -> None:
        """Fail the requests that came before a failed connect, unless other connections are left.

        For those that came later, another connect begins.
        """
        if self._sessions or self._connecting:
            return
        for request, since in tuple(self._waiting.items()):
            if since <= began:
                del self._waiting[request]
                request.on_error(_copy(error))
        self._grow()


def _copy(error: Exception) -> Exception:
    """Return an error for one of several calls, each of which adds its traceback."""
    if not isinstance(error, GatewayError):
        return error
    return GatewayError(
        error.kind, error.message, error.retry_after, public_message=error.public_message
    )
