"""The connections of an endpoint: idle ones, released ones, and new ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from gateway.upstream.connection_queue import ConnectionQueue, WaitingRequest
from gateway.upstream.http.connection import ServerConnection


class HttpConnections(ConnectionQueue[ServerConnection]):
    """Gives each request the first connection that is there; see ConnectionQueue.

    Connections are kept for their next request, each for ``idle_timeout`` seconds. One whose server
    says that it closes earlier is kept for less.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[ServerConnection]], idle_timeout: float
    ) -> None:
        super().__init__(connect)
        self._idle_timeout = idle_timeout
        self._loop = asyncio.get_running_loop()
        self.idle: deque[tuple[float, ServerConnection]] = deque()
        """The idle connections, each with the time at which it is closed."""
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> ServerConnection | None:
        """Return the connection that was used last; None if none is usable.

        Its server may have closed it: see ``take_open``.
        """
        while self.idle:
            expires, connection = self.idle.pop()
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

    def stop_waiting(self, request: WaitingRequest[ServerConnection]) -> None:
        """Forget a request that is cancelled, and stop a connect that is needless now."""
        super().stop_waiting(request)
        self._cancel_spare()

    def release(self, connection: ServerConnection) -> None:
        """Give a reusable connection to the next request, or keep it idle."""
        if not self.waiting:
            self._put(connection)
        elif connection.is_stale():
            connection.drop()  # each request that waits has a connection on the way
        elif (request := self._take_next()) is not None:
            request.send_over(connection)

    async def close(self) -> None:
        """Close idle connections, and those that become so; stop connects that nobody waits for."""
        self._closed = True
        for _, connection in self.idle:
            connection.drop()
        self.idle.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await super().close()

    def _add(self, connection: ServerConnection) -> None:
        if (request := self._take_next()) is None:
            connection.set_unused()
            self._put(connection)
        else:
            request.send_over(connection)

    def _put(self, connection: ServerConnection) -> None:
        if self._closed:
            connection.drop()
            return
        lifetime = self._idle_timeout
        if connection.max_idle is not None:
            lifetime = min(lifetime, connection.max_idle)
        expires = self._loop.time() + lifetime
        self.idle.append((expires, connection))
        if self._timer is None:
            self._timer = self._loop.call_at(expires, self._drop_expired)

    def _drop_expired(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self.idle and self.idle[0][0] <= now:
            self.idle.popleft()[1].drop()
        if self.idle:
            self._timer = self._loop.call_at(self.idle[0][0], self._drop_expired)
