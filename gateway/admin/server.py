"""Serves the admin address: it takes connections, bounds them, and drains."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.listener.accept import AcceptingSockets

MAX_CONNECTIONS = 1000
"""Connections at a time; further ones are closed at once."""
_IDLE_TIMEOUT = 75.0
"""Seconds for a client's next request."""
_SEND_TIMEOUT = 60.0
"""Seconds for a client to read a response, other than an event stream."""

_SHUTDOWN_TIMEOUT = 0.5
"""Seconds for requests in progress at the end."""


class AdminServer:
    """Serves an application of aiohttp on connections, while its context is open."""

    def __init__(self, application: web.Application) -> None:
        self.sockets = AcceptingSockets(self.adopt)
        """Where it listens."""
        application.middlewares.insert(0, _bound_send_time)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            keepalive_timeout=_IDLE_TIMEOUT,
            shutdown_timeout=_SHUTDOWN_TIMEOUT,
        )
        self._adoptions: set[asyncio.Task[None]] = set()

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
        assert self._runner.server is not None
        if len(self._runner.server.connections) + len(self._adoptions) >= MAX_CONNECTIONS:
            sock.close()
            return
        adoption = self._loop.create_task(self._adopt(sock))
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

    async def _adopt(self, sock: socket.socket) -> None:
        server = self._runner.server
        if server is None:  # it is closed
            sock.close()
            return
        try:
            await self._loop.connect_accepted_socket(server, sock)
        except OSError:  # the client is gone
            sock.close()


@web.middleware
async def _bound_send_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send a response, and cut off a client that does not read it."""
    response = await handler(request)
    if isinstance(response, web.Response):
        try:
            async with asyncio.timeout(_SEND_TIMEOUT):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
    return response
