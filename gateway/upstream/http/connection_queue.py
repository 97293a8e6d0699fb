"""Hands out the connections of an endpoint: idle ones, released ones, and new ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.upstream.http.connection import ServerConnection
from gateway.upstream.http.idle_connections import IdleConnections


class WaitingRequest(Protocol):
    """A request that waits for a connection; it gets one of these calls."""

    def send_over(self, connection: ServerConnection) -> None:
        """Send the request."""

    def on_error(self, error: Exception) -> None:
        """Handle that no connection could be made."""


class ConnectionQueue:
    """Gives each waiting request the first connection that is there, in the order of requests.

    ``connect`` makes a connection; it runs at most once for each request that waits at a time. Its
    error goes to a request only if no other connection is on the way for that request, and if the
    request came before the connect began: else another connect begins.
    """

    def __init__(
        self, idle: IdleConnections, connect: Callable[[], Awaitable[ServerConnection]]
    ) -> None:
        self._idle = idle
        self._connect = connect
        self._waiting: dict[WaitingRequest, float] = {}
        """The requests, each with its time."""
        self._connecting: dict[asyncio.Task[None], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait."""
        return len(self._waiting)

    @property
    def connecting(self) -> int:
        """Return the number of connections on the way; there may be more than requests."""
        return len(self._connecting)

    def wait(self, request: WaitingRequest) -> None:
        """Give a request the first connection that is there; connect unless one is spare."""
        self._waiting[request] = time.monotonic()
        if self.connecting < self.waiting:
            self._start_connect()

    def stop_waiting(self, request: WaitingRequest) -> None:
        """Forget a request that is cancelled, and stop a connect that is needless now."""
        if request in self._waiting:
            del self._waiting[request]
            self._cancel_spare()

    def release(self, connection: ServerConnection) -> None:
        """Give a reusable connection to the next request, or keep it idle."""
        if not self._waiting:
            self._idle.put(connection)
        elif connection.is_stale():
            connection.drop()  # each request that waits has a connection on the way
        elif (request := self._take_next()) is not None:
            request.send_over(connection)

    async def close(self) -> None:
        """Stop the connects that no request waits for, and wait for the others."""
        while self.connecting > self.waiting:
            self._cancel_spare()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take_next(self) -> WaitingRequest | None:
        for request in self._waiting:
            del self._waiting[request]
            return request
        return None

    def _start_connect(self) -> None:
        task = asyncio.create_task(self._connect_for_next())
        self._connecting[task] = None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel_spare(self) -> None:
        if self.connecting > self.waiting:
            newest, _ = self._connecting.popitem()
            newest.cancel()

    def _fail_next(self, error: Exception, began: float) -> None:
        """Give the error of a connect to the first request, unless that came after it began."""
        first = next(iter(self._waiting))
        if self._waiting[first] > began:
            self._start_connect()
        else:
            del self._waiting[first]
            first.on_error(error)

    async def _connect_for_next(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        began = time.monotonic()
        try:
            if self.connecting > self.waiting:
                return  # a released connection came first
            connection = await self._connect()
        except Exception as error:
            self._connecting.pop(task, None)
            if self.connecting < self.waiting:
                self._fail_next(error, began)
            return
        finally:
            self._connecting.pop(task, None)
        if (request := self._take_next()) is None:
            connection.set_unused()
            self._idle.put(connection)
        else:
            request.send_over(connection)
