"""The requests of an endpoint that wait for a connection, and the connects on their way."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from gateway.errors import GatewayError, copy_error

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class WaitingRequest(Protocol[C_contra]):
    """A request that waits for a connection; it gets one of these calls."""

    def send_over(self, connection: C_contra) -> None:
        """Send the request."""

    def on_error(self, error: Exception) -> None:
        """Handle that no connection could be made."""


class ConnectionQueue(ABC, Generic[C]):
    """Gives waiting requests, in their order, what becomes free, and connects for them.

    ``connect`` makes a connection. Its error goes to as many requests as the connection would have
    served, but only to those that came before it began, and that have no other connection on the
    way: for later ones, another connect begins.
    """

    def __init__(self, connect: Callable[[], Awaitable[C]]) -> None:
        self._connect = connect
        self.waiting: dict[WaitingRequest[C], float] = {}
        """The requests that wait, each with its time."""
        self.connecting: dict[asyncio.Task[None], None] = {}
        """The connects on their way, in their order."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams = 1
        """Requests that one connection is expected to carry at a time."""

    def wait(self, request: WaitingRequest[C]) -> None:
        """Give a request what becomes free first; connect if that is needed."""
        self.waiting[request] = time.monotonic()
        self._grow()

    def stop_waiting(self, request: WaitingRequest[C]) -> None:
        """Forget a request that is cancelled."""
        self.waiting.pop(request, None)

    async def close(self) -> None:
        """Stop the connects that no request waits for, and wait for the others."""
        self._cancel_spare()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @abstractmethod
    def _add(self, connection: C) -> None:
        """Use a new connection; raises the error of those that wait for it if it is useless."""

    def _max_connects(self) -> int:
        """Return how many connections may be on the way."""
        return len(self.waiting)

    def _has_other(self) -> bool:
        """Tell whether requests can wait for what becomes free, although a connect has failed."""
        return False

    @property
    def _wanted(self) -> int:
        """The connections that should be on the way."""
        return min(-(-len(self.waiting) // self._streams), self._max_connects())

    def _take_next(self) -> WaitingRequest[C] | None:
        for request in self.waiting:
            del self.waiting[request]
            return request
        return None

    def _grow(self) -> None:
        while len(self.connecting) < self._wanted:
            task = asyncio.create_task(self._connect_for_waiting())
            self.connecting[task] = None
            self._tasks.add(task)
            task.add_done_callback(self._end_connect)

    def _cancel_spare(self) -> None:
        while len(self.connecting) > self._wanted:
            newest, _ = self.connecting.popitem()
            newest.cancel()

    def _end_connect(self, task: asyncio.Task[None]) -> None:
        """Fail the requests that wait for a connect which has failed unexpectedly."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail_waiting(error, time.monotonic())

    async def _connect_for_waiting(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        began = time.monotonic()
        try:
            if len(self.connecting) > self._wanted:
                return  # something became free first
            connection = await self._connect()
            self.connecting.pop(task, None)
            self._add(connection)
        except Exception as error:
            self.connecting.pop(task, None)
            self._fail_waiting(error, began)
        finally:
            self.connecting.pop(task, None)

    def _fail_waiting(self, error: Exception, began: float) -> None:
        if self._has_other() or len(self.connecting) >= self._wanted:
            return
        for request, since in tuple(self.waiting.items())[: self._streams]:
            if since <= began:
                del self.waiting[request]
                request.on_error(copy_error(error) if isinstance(error, GatewayError) else error)
        self._grow()
