"""Serves the admin address: it takes connections, bounds them, and drains."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from gateway.admin.pages import error_response
from gateway.listener.accept import AcceptingSockets

MAX_CONNECTIONS = 1000
"""Connections at a time; further ones are closed at once."""
_IDLE_TIMEOUT = 75.0
"""Seconds for a client's next request."""
_SEND_TIMEOUT = 60.0
"""Seconds for a client to read a response, other than an event stream."""
_MAX_UNREAD = 64 * 2**20
"""Bytes of the responses that clients are still reading; one more is a 503."""
_LINGERING_TIME = 1.0
"""Seconds for the rest of a request's body, which is not read, behind its response."""
_SHUTDOWN_TIMEOUT = 0.5
"""Seconds for requests in progress at the end."""

_http_log = logging.getLogger("tensorgate.admin.http")


class AdminServer:
    """Serves an application of aiohttp on connections, while its context is open."""

    def __init__(self, application: web.Application) -> None:
        self.sockets = AcceptingSockets(self.adopt)
        """Where it listens."""
        application.middlewares.insert(0, _bound_sending())
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=_IDLE_TIMEOUT,
            shutdown_timeout=_SHUTDOWN_TIMEOUT,
            lingering_time=_LINGERING_TIME,
        )
        self._adoptions: set[asyncio.Task[None]] = set()
        self._adopted: set[web.RequestHandler] = set()
        """Connections that the runner may not know yet."""

    async def __aenter__(self) -> Self:
        """Start to serve."""
        await self._runner.setup()
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all connections."""
        await self.drain(0.0)

    def adopt(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere, and own its socket from now on."""
        server = self._runner.server
        if server is None or len({*server.connections, *self._adopted}) >= MAX_CONNECTIONS:
            sock.close()
            return
        protocol = server()
        self._adopted.add(protocol)
        adoption = self._loop.create_task(self._adopt(sock, protocol))
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

    async def _adopt(self, sock: socket.socket, protocol: web.RequestHandler) -> None:
        try:
            if self._runner.server is None:  # it has drained
                sock.close()
                return
            await self._loop.connect_accepted_socket(lambda: protocol, sock)
        except OSError:  # the client is gone
            sock.close()
        finally:
            self._adopted.discard(protocol)


def _bound_sending() -> Middleware:
    unread = 0

    @web.middleware
    async def bound_sending(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Send a response, and cut off a client that does not read it."""
        nonlocal unread
        response = await handler(request)
        if not isinstance(response, web.Response):
            return response
        size = int(response.content_length or 0)
        if unread and unread + size > _MAX_UNREAD:
            response = error_response(503, "too many clients read slowly")
            size = 0
        unread += size
        try:
            async with asyncio.timeout(_SEND_TIMEOUT):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            unread -= size
            response.body = None  # a connection holds its last response until the next request
        return response

    return bound_sending


def _is_own_error(record: logging.LogRecord) -> bool:
    """Tell whether a log record is about more than what a client has sent, or that it left."""
    error = record.exc_info[1] if record.exc_info else None
    client_errors = (ConnectionError, HttpProcessingError, web.RequestPayloadError)
    return not isinstance(error, client_errors)


_http_log.addFilter(_is_own_error)
