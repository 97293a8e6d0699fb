"""Accepts HTTP/1.1 connections from clients, makes exchanges of what comes, and drains."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from gateway.errors import ErrorKind, GatewayError
from gateway.exchange.base import ClientAnswer, ClientRequest
from gateway.exchange.dispatch import answer_error
from gateway.listener.connection import ClientConnection, Owner
from gateway.listener.messages import HttpAnswer, HttpRequest, origin_form
from gateway.observe.access_log import AccessLog

_BACKLOG = 1024
_SWEEP = 5.0
"""Seconds between two looks for connections on which nothing happens."""
_LAST_MOMENT = 0.05
"""Seconds for what was cancelled to end."""

_FAULT = GatewayError(ErrorKind.INTERNAL, "the gateway failed; its log says why")

_log = logging.getLogger("tensorgate.listener")

Exchange = Callable[[ClientRequest, ClientAnswer], Awaitable[None]]


class HttpListener(Owner):
    """Accepts connections and makes an exchange of each request.

    ``access_log`` may be None. ``on_closed`` is called for each connection that is over.
    """

    def __init__(
        self,
        exchange: Exchange,
        access_log: AccessLog | None,
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        self._exchange = exchange
        self._access_log = access_log
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._adoptions: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._connections: set[ClientConnection] = set()
        self._busy: dict[asyncio.Task[None], ClientConnection] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self.draining = False

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on a bound socket; this owns it from now on."""
        is_unix = sock.family == socket.AF_UNIX
        create = self._loop.create_unix_server if is_unix else self._loop.create_server
        server = await create(lambda: ClientConnection(self), sock=sock, backlog=_BACKLOG)
        self._servers.append(server)

    def take(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns its socket from now on."""
        adoption = self._loop.create_task(self._adopt(sock))
        self._adoptions.add(adoption)
        adoption.add_done_callback(self._adoptions.discard)

    async def _adopt(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: ClientConnection(self), sock)
        except OSError:  # the client is gone
            sock.close()
            if self._on_closed is not None:
                self._on_closed()

    async def drain(self, patience: float) -> int:
        """Stop accepting, let exchanges under way finish, drop those that take too long.

        ``patience`` is in seconds. Gives the number of exchanges dropped.
        """
        if self._adoptions:
            await asyncio.wait(self._adoptions)
        self.draining = True
        until = self._loop.time() + patience
        if self._sweep is not None:
            self._sweep.cancel()
        for server in self._servers:
            server.close()
        for connection in tuple(self._connections):
            connection.close_idle()
        late: set[asyncio.Task[None]] = set()
        if self._busy:
            _, late = await asyncio.wait(self._busy, timeout=patience)
        for connection in [self._busy[task] for task in late]:
            connection.reset()
        if late:
            await asyncio.wait(late, timeout=_LAST_MOMENT)
        while self._unsent() and self._loop.time() < until:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_LAST_MOMENT / 5)
        for connection in tuple(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # in which the transports close
        return len(late)

    def _unsent(self) -> int:
        return sum(connection.unsent for connection in self._connections)

    def opened(self, connection: ClientConnection) -> None:
        """Note a connection."""
        self._connections.add(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP, self._close_quiet)

    def lost(self, connection: ClientConnection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        if self._on_closed is not None:
            self._on_closed()

    def begin(
        self, connection: ClientConnection, request: HttpRequest, answer: HttpAnswer
    ) -> asyncio.Task[None]:
        """Make an exchange of a request."""
        task = self._loop.create_task(self._serve(connection, request, answer))
        self._busy[task] = connection
        task.add_done_callback(self._busy.pop)
        return task

    async def _serve(
        self, connection: ClientConnection, request: HttpRequest, answer: HttpAnswer
    ) -> None:
        began = time.perf_counter()  # the event loop's own clock counts whole milliseconds
        try:
            await self._run(request, answer)
        finally:
            connection.answered(answer)
            if self._access_log is not None:
                seconds = time.perf_counter() - began
                self._access_log.write(
                    request.method, request.target, answer.status, answer.size, seconds
                )

    async def _run(self, request: HttpRequest, answer: HttpAnswer) -> None:
        try:
            request.target = origin_form(request.target)
            await self._exchange(request, answer)
        except GatewayError as error:
            await answer_error(answer, error)
        except ConnectionError:
            pass  # the client is gone
        except Exception:
            # A fault of our own: never a silent one, and never one that takes the process along.
            _log.exception("%s %s failed", request.method, request.target)
            if answer.started:
                answer.abort()
            else:
                answer.last = True
                await answer_error(answer, _FAULT)

    def _close_quiet(self) -> None:
        for connection in tuple(self._connections):
            connection.close_quiet()
        self._sweep = self._loop.call_later(_SWEEP, self._close_quiet)
