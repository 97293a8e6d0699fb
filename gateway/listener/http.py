"""Accepts HTTP/1.1 connections from clients, makes exchanges of what comes, and drains."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache

from gateway.accept_queue import (
    HANDSHAKES,
    LOOK,
    handshakes_under_way,
    last_connections,
    shut_out,
)
from gateway.errors import GatewayError
from gateway.exchange.base import ClientAnswer, ClientRequest
from gateway.exchange.dispatch import FAULT, answer_error
from gateway.exchange.forwarding import SILENT, Forwarding
from gateway.exchange.straight import Straight
from gateway.exchange.straight_exchange import Plan, StraightExchange
from gateway.http1.head import RequestHead
from gateway.listener.connection import ClientConnection, Owner, Patience, Rest
from gateway.listener.messages import HttpAnswer, HttpRequest, origin_form
from gateway.listener.tls import ServerTls
from gateway.listener.tls_transport import TlsTransport
from gateway.observe.access_log import AccessLog

_BACKLOG = 1024
_SWEEP = 5.0
"""Seconds between two looks for connections on which nothing happens, at most."""
_LAST_MOMENT = 0.05
"""Seconds for what was cancelled to end."""
_LOOK = 0.01
"""Seconds between two looks at what is left while draining."""

_REMEMBERED = 512
"""Heads of requests, and what becomes of them."""

_log = logging.getLogger("tensorgate.listener")

Exchange = Callable[[ClientRequest, ClientAnswer], Awaitable[None]]


class HttpListener(Owner):
    """Accepts connections and makes an exchange of each request.

    ``straight`` makes those of requests at hand that need no task, if it is given; ``access_log``
    may be None. ``on_closed`` is called for each connection that is over. ``tls`` is spoken on all
    but Unix sockets, if it is given. ``patience`` is what connections without a request meet with,
    ``forwarding`` says what servers are told of clients.
    """

    def __init__(
        self,
        exchange: Exchange,
        access_log: AccessLog | None,
        on_closed: Callable[[], None] | None = None,
        straight: Straight | None = None,
        tls: ServerTls | None = None,
        patience: Patience | None = None,
        forwarding: Forwarding = SILENT,
    ) -> None:
        self.patience = patience or Patience()
        self._exchange = exchange
        self._straight = straight
        self._plan = lru_cache(maxsize=_REMEMBERED)(self._make_plan)
        self._access_log = access_log
        self._on_closed = on_closed
        self._tls = tls
        self._shaking: set[TlsTransport] = set()
        self._loop = asyncio.get_running_loop()
        self._adoptions: set[asyncio.Task[None]] = set()
        self._listening: list[tuple[socket.socket, asyncio.Server]] = []
        self._connections: set[ClientConnection] = set()
        self._busy: dict[asyncio.Task[None] | StraightExchange, ClientConnection] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self.draining = False
        self.forwarding = forwarding

    @property
    def connections(self) -> int:
        """Give how many connections there are."""
        return len(self._connections)

    @property
    def requests(self) -> int:
        """Give how many requests are under way."""
        return len(self._busy)

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
        return min(_SWEEP, self.patience.head_time / 2, self.patience.keep_alive / 2)

    async def stop_listening(
        self, sockets: Collection[socket.socket], patience: float = HANDSHAKES
    ) -> None:
        """Accept nothing more on sockets, and close them; whoever has connected is served.

        Who has begun to is given ``patience`` seconds, at most.
        """
        until = self._loop.time() + min(HANDSHAKES, patience)
        for sock in sockets:
            shut_out(sock)
        while sockets and self._loop.time() < until:
            await asyncio.sleep(LOOK)
            if not any(map(handshakes_under_way, sockets)):
                break
        for sock in sockets:
            for connection in last_connections(sock):
                self.take(connection)
        self.let_go(sockets)

    def let_go(self, sockets: Collection[socket.socket]) -> None:
        """Close listening sockets at once; who waits there is left to duplicates, if any."""
        for each, server in tuple(self._listening):
            if each in sockets:
                self._listening.remove((each, server))
                server.close()

    def use(
        self,
        straight: Straight,
        access_log: AccessLog | None,
        tls: ServerTls | None,
        patience: Patience,
        forwarding: Forwarding,
    ) -> None:
        """Make the exchanges and the connections that begin from now on with others than before."""
        self._straight = straight
        self.forget_plans()
        self._access_log = access_log
        self._tls = tls
        self.patience = patience
        self.forwarding = forwarding

    def _accepted(self, is_unix: bool, tls: ServerTls | None) -> ClientConnection | TlsTransport:
        if tls is None or is_unix:
            return ClientConnection(self, is_unix)
        connection = ClientConnection(self, is_tls=True)
        return TlsTransport(tls.context, connection, self._shaking, self._on_closed)

    def take(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns its socket from now on."""
        adoption = self._loop.create_task(self._adopt(sock, self._tls))
        self._adoptions.add(adoption)
        adoption.add_done_callback(self._adoptions.discard)

    async def _adopt(self, sock: socket.socket, tls: ServerTls | None) -> None:
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
        late = tuple(self._busy.values())
        for connection in late:
            connection.reset()
        until = self._loop.time() + _LAST_MOMENT
        while self._busy and self._loop.time() < until:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_LOOK)
        for connection in tuple(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # in which the transports close
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
                    connection.see_out(grace)
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

    def begin_straight(
        self, connection: ClientConnection, head: RequestHead, body: bytes | memoryview
    ) -> StraightExchange | None:
        """Make an exchange of a request at hand; None if it goes the ordinary way."""
        if self._straight is None:
            return None
        try:
            plan = self._plan(head)
            if plan is None:
                return None
            exchange = self._straight.begin(plan, bytes(body), connection)
        except Exception:
            where = (connection.request_id or "-", head.method, head.target)
            _log.exception("request %s: %s %s failed on the straight way", *where)
            return None  # the ordinary way answers, with that fault or without
        if exchange is not None:
            self._busy[exchange] = connection
        return exchange

    def forget_plans(self) -> None:
        """Look anew at what becomes of requests, as that has changed."""
        self._plan.cache_clear()

    def _make_plan(self, head: RequestHead) -> Plan | None:
        if self._straight is None or head.length is None:
            return None
        try:
            target = origin_form(head.target)
        except GatewayError:
            return None  # the ordinary way says what is wrong with it
        return self._straight.plan(head.method, target, head.headers, head.length)

    def begin(
        self,
        connection: ClientConnection,
        request: HttpRequest,
        answer: HttpAnswer,
        rest: Rest | None = None,
    ) -> asyncio.Task[None]:
        """Have a task make an exchange of a request, or the rest of one."""
        task = self._loop.create_task(self._serve(connection, request, answer, rest))
        self._busy[task] = connection
        task.add_done_callback(self.over)
        return task

    def over(self, exchange: asyncio.Task[None] | StraightExchange) -> None:
        """Note that an exchange has ended."""
        del self._busy[exchange]

    def log(
        self, head: RequestHead, status: int, size: int, seconds: float, request_id: str
    ) -> None:
        """Write a line of the access log."""
        if self._access_log is not None:
            self._access_log.write(head.method, head.target, status, size, seconds, request_id)

    async def _serve(
        self,
        connection: ClientConnection,
        request: HttpRequest,
        answer: HttpAnswer,
        rest: Rest | None,
    ) -> None:
        try:
            await self._run(request, answer, rest)
        finally:
            connection.answered(answer)

    async def _run(self, request: HttpRequest, answer: HttpAnswer, rest: Rest | None) -> None:
        try:
            if rest is None:
                request.target = origin_form(request.target)
                await self._exchange(request, answer)
            else:
                await rest(answer)
        except GatewayError as error:
            await answer_error(answer, error)
        except ConnectionError:
            pass  # the client is gone
        except Exception:
            # A fault of our own: never a silent one, and never one that takes the process along.
            where = (answer.request_id or "-", request.method, request.target)
            _log.exception("request %s: %s %s failed", *where)
            if answer.started:
                answer.abort()
            else:
                answer.last = True
                await answer_error(answer, FAULT)

    def _close_quiet(self) -> None:
        for connection in tuple(self._connections):
            connection.close_quiet()
        self._sweep = self._loop.call_later(self._pause, self._close_quiet)
