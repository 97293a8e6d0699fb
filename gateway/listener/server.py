"""The listener: accepts connections of clients, closes idle ones, and drains."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gateway.listener.accept import AcceptingSockets
from gateway.listener.client_call import RequestDispatcher, RequestHandler
from gateway.listener.client_shares import ClientShares, client_of
from gateway.listener.connection import ClientConnection
from gateway.listener.connection_host import IdleTimeouts
from gateway.listener.tls import ReloadingTlsContext
from gateway.listener.tls_transport import ClientTlsTransport, max_handshakes
from gateway.observe.call_record import CallObserver
from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.system.buffers import BufferAccount

_CANCEL_TIMEOUT: Final = 0.05
"""Seconds for cancelled calls to end."""
_CLOSE_TIMEOUT: Final = 1.0
"""Seconds for HTTP/2 clients to read how their calls ended, and to close."""
_DRAIN_TIMEOUT: Final = "the gateway stopped before the call ended (limits.drain_timeout)"
_DRAIN_POLL_INTERVAL: Final = 0.01
"""Seconds between two checks while draining."""

_log = logging.getLogger("tensorgate.listener")


class HttpListener(RequestDispatcher):
    """Accepts connections of clients and dispatches their requests.

    ``handler`` handles the requests that the fast path does not. ``on_closed`` is called for each
    closed connection. ``buffers`` counts what connections buffer. All else is as ``reconfigure``
    has it: before that there is no fast path, and no TLS.
    """

    def __init__(
        self,
        handler: RequestHandler,
        observers: tuple[CallObserver, ...] = (),
        on_closed: Callable[[], None] = lambda: None,
        buffers: BufferAccount | None = None,
    ) -> None:
        super().__init__(handler, observers, buffers or BufferAccount(), on_closed)
        self.tls: ReloadingTlsContext | None = None
        """That of all sockets but Unix sockets."""
        self._handshaking = ClientShares[ClientTlsTransport](max_handshakes())
        self._adoptions: set[asyncio.Task[None]] = set()
        self.sockets = AcceptingSockets(self.adopt, self.make_room)
        """Where it listens."""

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    @property
    def tls_handshakes(self) -> int:
        """The number of TLS handshakes in progress, whose connections do not count as open yet."""
        return len(self._handshaking)

    def reconfigure(
        self,
        planner: Planner | None,
        observers: tuple[CallObserver, ...],
        tls: ReloadingTlsContext | None,
        idle_timeouts: IdleTimeouts,
        forwarding: ForwardedPolicy,
        trace_sampler: TraceSampler | None = None,
    ) -> None:
        """Use these for new calls and connections from now on.

        ``forwarding`` says which headers servers get about clients, and ``trace_sampler`` which
        calls are traced.
        """
        self.set_planner(planner)
        self.observers = observers
        self.tls = tls
        self.idle_timeouts = idle_timeouts
        self.forwarding = forwarding
        self.trace_sampler = trace_sampler

    def _make_protocol(
        self, is_unix: bool, tls: ReloadingTlsContext | None
    ) -> ClientConnection | ClientTlsTransport:
        if tls is None or is_unix:
            return ClientConnection(self, is_unix)
        connection = ClientConnection(self, is_tls=True)
        max_seconds = self.idle_timeouts.request_header_timeout
        return ClientTlsTransport(
            tls.context, connection, self._handshaking, max_seconds, self._on_closed
        )

    def adopt(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere, and own its socket from now on.

        It is closed at once if its client has taken the room of others: see OpenConnections.
        """
        peer: object = None
        with suppress(OSError):  # it is gone already
            peer = sock.getpeername()
        if not self._connections.admit(sock.fileno(), client_of(peer)):
            sock.close()
            self._on_closed()
            return
        adoption = self._loop.create_task(self._adopt(sock, self.tls))
        self._adoptions.add(adoption)
        adoption.add_done_callback(self._adoptions.discard)

    async def _adopt(self, sock: socket.socket, tls: ReloadingTlsContext | None) -> None:
        descriptor, is_unix = sock.fileno(), sock.family == socket.AF_UNIX
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(is_unix, tls), sock
            )
        except BaseException as error:
            sock.close()
            self._on_closed()
            if not isinstance(error, OSError):  # else the client is gone
                raise
        finally:
            self._connections.forget(descriptor)

    def make_room(self) -> bool:
        """Close connections, as descriptors have run out; return whether there were any to close.

        See OpenConnections.
        """
        return self._connections.make_room()

    async def drain(self, max_seconds: float, grace: float = 0.0) -> int:
        """Stop accepting, let calls finish, and drop those that take too long.

        An idle connection stays open for ``grace`` seconds, because its client may be sending a
        request. The response to it says that the connection closes. Everything ends after
        ``max_seconds``. Returns the number of dropped calls.
        """
        self.draining = True
        until = self._loop.time() + max_seconds
        if self._idle_check is not None:
            self._idle_check.cancel()
        self._for_each_connection(lambda connection: connection.announce_drain())
        await self.sockets.stop_all(max_seconds)
        await asyncio.sleep(0)  # lets the loop read what has come, such as the end of a handshake
        if self._adoptions:
            await asyncio.wait(self._adoptions)
        await self._drain_connections(min(grace, max_seconds), until)
        late = tuple(self._active_calls)
        for call in late:
            call.record.error = _DRAIN_TIMEOUT
            try:
                call.drop_call()
            except Exception:  # its connection is aborted below
                _log.exception("a call could not be dropped")
        await self._wait_while(lambda: bool(self._active_calls), _CANCEL_TIMEOUT)
        if late:
            self._for_each_connection(lambda each: each.close_for_drain(_CLOSE_TIMEOUT))
            await self._wait_while(lambda: len(self._connections) > 0, _CLOSE_TIMEOUT)
        open_connections = [connection.transport for connection in self._connections]
        for transport in (*self._handshaking, *open_connections):
            transport.abort()
        await asyncio.sleep(0)  # lets the transports close
        self.hangups.close()
        self.deferrals.close()
        return len(late)

    async def _wait_while(self, condition: Callable[[], bool], max_seconds: float) -> None:
        """Wait as long as a condition holds."""
        until = self._loop.time() + max_seconds
        while condition() and self._loop.time() < until:  # noqa: ASYNC110  # no event
            await asyncio.sleep(_DRAIN_POLL_INTERVAL)

    async def _drain_connections(self, grace: float, until: float) -> None:
        """Wait until all connections are closed; idle ones stay open for the grace period."""
        end_of_grace = self._loop.time() + grace
        while len(self._connections) or len(self._handshaking):
            now = self._loop.time()
            if now >= until:
                return
            if now >= end_of_grace:
                for transport in tuple(self._handshaking):
                    transport.abort()
                self._for_each_connection(lambda each: each.close_for_drain(grace))
            await asyncio.sleep(_DRAIN_POLL_INTERVAL)
