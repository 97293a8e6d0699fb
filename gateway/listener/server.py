"""Accepts HTTP/1.1 connections from clients, and drains; see exchanges.py for what comes there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection

from gateway.listener.connection import ClientConnection
from gateway.listener.connection_host import IdleTimeouts
from gateway.listener.dispatcher import RequestDispatcher, RequestHandler
from gateway.listener.tls import ReloadingTlsContext
from gateway.listener.tls_transport import TlsTransport
from gateway.observe.access_log import AccessLog
from gateway.proxy.fast_path.planner import FastPath
from gateway.proxy.filters.forwarded_headers import NO_FORWARDED_HEADERS, ForwardedPolicy
from gateway.system.accept_queue import (
    HANDSHAKE_POLL_INTERVAL,
    HANDSHAKE_TIMEOUT,
    drain_accept_queue,
    drop_new_connections,
    has_pending_handshakes,
)
from gateway.system.buffers import BufferAccount

_BACKLOG = 1024
_SWEEP = 5.0
"""Seconds between two looks for connections on which nothing happens, at most."""
_LAST_MOMENT = 0.05
"""Seconds for what was cancelled to end."""
_LOOK = 0.01
"""Seconds between two looks at what is left while draining."""


class HttpListener(RequestDispatcher):
    """Accepts connections and makes an exchange of each request.

    ``straight`` makes those of requests at hand that need no task, if it is given; ``access_log``
    may be None. ``on_closed`` is called for each connection that is over. ``tls`` is spoken on all
    but Unix sockets, if it is given. ``patience`` is what connections without a request meet with,
    ``forwarding`` says what servers are told of clients; ``buffers`` counts what connections
    buffer.
    """

    def __init__(
        self,
        exchange: RequestHandler,
        access_log: AccessLog | None,
        on_closed: Callable[[], None] | None = None,
        straight: FastPath | None = None,
        tls: ReloadingTlsContext | None = None,
        patience: IdleTimeouts | None = None,
        forwarding: ForwardedPolicy = NO_FORWARDED_HEADERS,
        buffers: BufferAccount | None = None,
    ) -> None:
        super().__init__(
            exchange,
            straight,
            access_log,
            patience or IdleTimeouts(),
            forwarding,
            buffers or BufferAccount(),
        )
        self._on_closed = on_closed
        self._tls = tls
        self._shaking: set[TlsTransport] = set()
        self._adoptions: set[asyncio.Task[None]] = set()
        self._listening: list[tuple[socket.socket, asyncio.Server]] = []
        self._connections: set[ClientConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Give how many connections there are."""
        return len(self._connections)

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on a bound socket; this owns it from now on."""
        is_unix = sock.family == socket.AF_UNIX
        create = self._loop.create_unix_server if is_unix else self._loop.create_server
        server = await create(
            lambda: self._accepted(is_unix, self._tls), sock=sock, backlog=_BACKLOG
        )
        self._listening.append((sock, server))

    @property
    def _pause(self) -> float:
        """Give the seconds between two looks for connections on which nothing happens."""
        patience = self.patience
        shortest = min(patience.request_header_timeout, patience.keep_alive, patience.idle_timeout)
        return min(_SWEEP, shortest / 2)

    async def stop_listening(
        self, sockets: Collection[socket.socket], patience: float = HANDSHAKE_TIMEOUT
    ) -> None:
        """Accept nothing more on sockets, and close them; whoever has connected is served.

        Who has begun to is given ``patience`` seconds, at most.
        """
        until = self._loop.time() + min(HANDSHAKE_TIMEOUT, patience)
        for sock in sockets:
            drop_new_connections(sock)
        while sockets and self._loop.time() < until:
            await asyncio.sleep(HANDSHAKE_POLL_INTERVAL)
            if not any(map(has_pending_handshakes, sockets)):
                break
        for sock in sockets:
            for connection in drain_accept_queue(sock):
                self.take(connection)
        self.close_sockets(sockets)

    def close_sockets(self, sockets: Collection[socket.socket]) -> None:
        """Close listening sockets at once; who waits there is left to duplicates, if any."""
        for each, server in tuple(self._listening):
            if each in sockets:
                self._listening.remove((each, server))
                server.close()

    def use(
        self,
        straight: FastPath,
        access_log: AccessLog | None,
        tls: ReloadingTlsContext | None,
        patience: IdleTimeouts,
        forwarding: ForwardedPolicy,
    ) -> None:
        """Make the exchanges and the connections that begin from now on with others than before."""
        self._straight = straight
        self.clear_plan_cache()
        self._access_log = access_log
        self._tls = tls
        self.patience = patience
        self.forwarding = forwarding

    def _accepted(
        self, is_unix: bool, tls: ReloadingTlsContext | None
    ) -> ClientConnection | TlsTransport:
        if tls is None or is_unix:
            return ClientConnection(self, is_unix)
        connection = ClientConnection(self, is_tls=True)
        return TlsTransport(tls.context, connection, self._shaking, self._on_closed)

    def take(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns its socket from now on."""
        adoption = self._loop.create_task(self._adopt(sock, self._tls))
        self._adoptions.add(adoption)
        adoption.add_done_callback(self._adoptions.discard)

    async def _adopt(self, sock: socket.socket, tls: ReloadingTlsContext | None) -> None:
        is_unix = sock.family == socket.AF_UNIX
        try:
            await self._loop.connect_accepted_socket(lambda: self._accepted(is_unix, tls), sock)
        except OSError:  # the client is gone
            sock.close()
            if self._on_closed is not None:
                self._on_closed()

    async def drain(self, patience: float, grace: float = 0.0) -> int:
        """Stop accepting, let clients finish, drop what takes too long.

        Where no exchange is under way, a client may be about to send a request. It can for
        ``grace``, and the answer tells it that the connection ends. ``patience`` bounds it all;
        both are in seconds. Gives the number of exchanges dropped.
        """
        self.draining = True
        until = self._loop.time() + patience
        if self._sweep is not None:
            self._sweep.cancel()
        await self._stop_accepting(patience)
        await self._see_out(min(grace, patience), until)
        late = tuple(self._active_calls.values())
        for connection in late:
            connection.reset()
        until = self._loop.time() + _LAST_MOMENT
        while self._active_calls and self._loop.time() < until:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_LOOK)
        for connection in tuple(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # in which the transports close
        self.hangups.close()
        return len(late)

    async def _stop_accepting(self, patience: float) -> None:
        """Close the listening sockets; whoever has connected by then is served."""
        await self.stop_listening([sock for sock, _ in self._listening], patience)
        await asyncio.sleep(0)  # in which the connections are made that the loop has accepted
        if self._adoptions:
            await asyncio.wait(self._adoptions)

    async def _see_out(self, grace: float, until: float) -> None:
        """Wait until no connection is left; those on which nothing happens stay for the grace."""
        end_of_grace = self._loop.time() + grace
        while self._connections or self._shaking:
            now = self._loop.time()
            if now >= until:
                return
            if now >= end_of_grace:
                for shaking in tuple(self._shaking):
                    shaking.abort()
                for connection in tuple(self._connections):
                    connection.close_for_drain(grace)
            await asyncio.sleep(_LOOK)

    def opened(self, connection: ClientConnection) -> None:
        """Note a connection."""
        self._connections.add(connection)
        if self._sweep is None and not self.draining:
            self._sweep = self._loop.call_later(self._pause, self._close_quiet)

    def lost(self, connection: ClientConnection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        if self._on_closed is not None:
            self._on_closed()

    def _close_quiet(self) -> None:
        for connection in tuple(self._connections):
            connection.close_if_idle()
        self._sweep = self._loop.call_later(self._pause, self._close_quiet)
