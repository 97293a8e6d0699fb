"""The idle connections of an endpoint, between two requests."""

from __future__ import annotations

import asyncio
from collections import deque

from gateway.upstream.http.connection import ServerConnection


class IdleConnections:
    """Keeps connections for their next request, each for ``idle_timeout`` seconds.

    One whose server says that it closes earlier is kept for less.
    """

    def __init__(self, idle_timeout: float) -> None:
        self._idle_timeout = idle_timeout
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, ServerConnection]] = deque()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> ServerConnection | None:
        """Return the connection that was used last; None if none is usable.

        Its server may have closed it: see ``take_open``.
        """
        while self._waiting:
            expires, connection = self._waiting.pop()
            if expires > self._loop.time() and connection.reusable:
                return connection
            connection.drop()
        return None

    def take_open(self, taken: ServerConnection | None = None) -> ServerConnection | None:
        """Return a connection that the server has not closed: the one taken before, or another.

        To be called right before a request is written.
        """
        connection = self.take() if taken is None else taken
        while connection is not None and connection.is_stale():
            connection.drop()
            connection = self.take()
        return connection

    def put(self, connection: ServerConnection) -> None:
        """Keep a connection for the next request."""
        if self._closed:
            connection.drop()
            return
        lifetime = self._idle_timeout
        if connection.max_idle is not None:
            lifetime = min(lifetime, connection.max_idle)
        expires = self._loop.time() + lifetime
        self._waiting.append((expires, connection))
        if self._timer is None:
            self._timer = self._loop.call_at(expires, self._drop_expired)

    def close(self) -> None:
        """Close all connections, and those that are put later."""
        self._closed = True
        for _, connection in self._waiting:
            connection.drop()
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop_expired(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._waiting.popleft()[1].drop()
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][0], self._drop_expired)
