"""Hands out the connections of an endpoint: idle ones, released ones, and new ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.upstream.connection_queue import ConnectionQueue, WaitingRequest
from gateway.upstream.http.connection import ServerConnection
from gateway.upstream.http.idle_connections import IdleConnections


class HttpConnectionQueue(ConnectionQueue[ServerConnection]):
    """Gives each waiting request the first connection that is there; see ConnectionQueue."""

    def __init__(
        self, idle: IdleConnections, connect: Callable[[], Awaitable[ServerConnection]]
    ) -> None:
        super().__init__(connect)
        self._idle = idle

    def stop_waiting(self, request: WaitingRequest[ServerConnection]) -> None:
        """Forget a request that is cancelled, and stop a connect that is needless now."""
        super().stop_waiting(request)
        self._cancel_spare()

    def release(self, connection: ServerConnection) -> None:
        """Give a reusable connection to the next request, or keep it idle."""
        if not self._waiting:
            self._idle.put(connection)
        elif connection.is_stale():
            connection.drop()  # each request that waits has a connection on the way
        elif (request := self._take_next()) is not None:
            request.send_over(connection)

    def _add(self, connection: ServerConnection) -> None:
        if (request := self._take_next()) is None:
            connection.set_unused()
            self._idle.put(connection)
        else:
            request.send_over(connection)
