"""Serves the admin address: it takes connections, bounds them, and drains."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import Self, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from gateway.listener.accept import AcceptingSockets
from gateway.listener.client_shares import ClientShares, client_of

MAX_CONNECTIONS = 1000
"""Connections at a time; each further one takes the place of another: see ClientShares."""
IDLE_TIMEOUT = 75.0
"""Seconds for a client's next request."""
SEND_TIMEOUT = 60.0
"""Seconds for a client to read a response, other than an event stream."""
_MAX_UNREAD = 64 * 2**20
"""Bytes of the responses that clients are still reading; for one more, others are cut off."""
LINGERING_TIME = 1.0
"""Seconds for the rest of a request's body, which is not read, behind its response."""
SHUTDOWN_TIMEOUT = 0.5
"""Seconds for requests in progress at the end."""

_http_log = logging.getLogger("tensorgate.admin.http")


class AdminServer:
    """Serves an application of aiohttp on connections, while its context is open."""

    def __init__(self, application: web.Application) -> None:
        self.sockets = AcceptingSockets(self.adopt)
        """Where it listens."""
        application.middlewares.insert(0, self._bound_sending)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=IDLE_TIMEOUT,
            shutdown_timeout=SHUTDOWN_TIMEOUT,
            lingering_time=LINGERING_TIME,
            # A request whose client is gone counts no more, so it must not wait for its turn.
            handler_cancellation=True,
        )
        self._adoptions: set[asyncio.Task[None]] = set()
        self._connections = ClientShares[_Connection](MAX_CONNECTIONS)
        """Those with a request in progress are in use."""
        self._unread = ClientShares[_Connection](_MAX_UNREAD)
        """The connections whose clients are reading a response, with its bytes."""

    async def __aenter__(self) -> Self:
        """Start to serve."""
        await self._runner.setup()
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self.drain(0.0)

    def adopt(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere, and own its socket from now on."""
        server = self._runner.server
        try:
            client = client_of(sock.getpeername())
        except OSError:  # it is gone
            server = None
        if server is None:
            sock.close()
            return
        connection = _Connection(server(), client, self._connections)
        _abort(self._connections.add(connection, client))
        adoption = self._loop.create_task(self._adopt(sock, connection))
        self._adoptions.add(adoption)
        adoption.add_done_callback(self._adoptions.discard)

    async def drain(self, grace: float) -> None:
        """Stop accepting, go on for ``grace`` seconds, and close all connections.

        Clients with open connections may be sending a request. Requests in progress have half a
        second to finish.
        """
        await self.sockets.stop_all(grace)
        if self._adoptions:
            await asyncio.wait(self._adoptions)
        await asyncio.sleep(grace)
        await self._runner.cleanup()

    async def _adopt(self, sock: socket.socket, connection: _Connection) -> None:
        try:
            if self._runner.server is None:  # it has drained
                sock.close()
                return
            await self._loop.connect_accepted_socket(lambda: connection, sock)
        except OSError:  # the client is gone
            sock.close()
            self._connections.discard(connection)

    @web.middleware
    async def _bound_sending(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Send a response, and cut off a client that does not read it."""
        if request.transport is None:
            raise ConnectionResetError
        connection = cast("_Connection", request.transport.get_protocol())
        self._connections.set_in_use(connection, True)
        try:
            response = await handler(request)
            if isinstance(response, web.Response):
                await self._send(response, request, connection)
            return response
        finally:
            self._connections.set_in_use(connection, False)

    async def _send(
        self, response: web.Response, request: web.Request, connection: _Connection
    ) -> None:
        size = int(response.content_length or 0)
        _abort(self._unread.add(connection, connection.client, size))
        try:
            async with asyncio.timeout(SEND_TIMEOUT):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            connection.abort()
        finally:
            self._unread.discard(connection)
            response.body = None  # a connection holds its last response until the next request


class _Connection(asyncio.Protocol):
    """Passes what happens to a connection on to its handler, and counts it until it is closed.

    aiohttp forgets the transport of a connection that it closes, which stays open until the client
    has read all: perhaps for ever.
    """

    def __init__(
        self, handler: web.RequestHandler, client: str, connections: ClientShares[_Connection]
    ) -> None:
        self.client = client
        self._handler = handler
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._is_aborted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve it, unless another connection has taken its place."""
        self._transport = cast("asyncio.Transport", transport)
        self._handler.connection_made(transport)
        if self._is_aborted:
            # Event loops do not expect it before they have started to read.
            asyncio.get_running_loop().call_soon(self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        self._connections.discard(self)
        self._transport = None
        self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        self._handler.data_received(data)

    def eof_received(self) -> None:
        """Let the transport close itself."""

    def pause_writing(self) -> None:
        """Have the handler wait for its client."""
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """Have the handler go on."""
        self._handler.resume_writing()

    def abort(self) -> None:
        """Close it at once, whatever it still has to send."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()


def _abort(connections: Iterable[_Connection]) -> None:
    for each in connections:
        each.abort()


def _is_own_error(record: logging.LogRecord) -> bool:
    """Tell whether a log record is about more than what a client has sent, or that it left."""
    error = record.exc_info[1] if record.exc_info else None
    client_errors = (ConnectionError, HttpProcessingError, web.RequestPayloadError)
    return not isinstance(error, client_errors)


_http_log.addFilter(_is_own_error)
