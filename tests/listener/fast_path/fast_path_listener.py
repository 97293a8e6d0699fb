"""A listener with a fast path before a server, and what its calls hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.listener.connection import ClientConnection
from gateway.listener.server import HttpListener
from gateway.listener.sockets import open_tcp_sockets
from gateway.observe.call_record import CallObserver
from gateway.proxy.calls.buffered import BufferedCall
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.calls.planner import Planner
from gateway.proxy.destination import Destination, Limits
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.upstream.address import parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.endpoint import HttpEndpoint
from tests.support.doubles.streaming import LIMITS, make_destination
from tests.support.gateway import http1_connections, no_leaks, until
from tests.support.http_messages import http_response
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer


class FastPathListener:
    """A listener at work before a server."""

    def __init__(
        self, server: ScriptedServer, listener: HttpListener, destination: Destination, url: str
    ) -> None:
        self.server = server
        self.listener = listener
        self.destination = destination
        self.url = url

    @property
    def outstanding(self) -> int:
        return sum(self.destination.upstream.pool.outstanding)

    @property
    def connection(self) -> ClientConnection:
        """The one connection of a client."""
        (connection,) = http1_connections(self.listener)
        return connection

    @property
    def fast_path_calls(self) -> list[BufferedCall]:
        calls = [each._call for each in self.listener._active_calls]
        return [each for each in calls if isinstance(each, BufferedCall)]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RawClient]:
        """Connect a client, when the listener has a connection to the server."""
        async with connect(self.url) as client:
            assert (await client.call("GET", "/v2/warm")).status == 200
            yield client

    async def until_on_fast_path(self, count: int = 1) -> None:
        """Wait until so many calls are in progress, all of them on the fast path."""
        await until(lambda: len(self.fast_path_calls) == count == len(self.listener._active_calls))

    async def until_asked(self, count: int) -> None:
        """Wait until the server has been asked, and has answered, so many times."""
        await until(lambda: len(self.server.requests) == count and not self.outstanding)

    async def until_idle(self) -> None:
        await until(lambda: not self.outstanding and not self.listener._active_calls)


@asynccontextmanager
async def listening(
    server: ScriptedServer,
    observers: tuple[CallObserver, ...] = (),
    limits: Limits = LIMITS,
    codings: tuple[str, ...] = (),
    trace_sampler: TraceSampler | None = None,
) -> AsyncIterator[FastPathListener]:
    """Run a listener before a server."""
    async with no_leaks():
        destination = make_destination(
            HttpEndpoint(parse_server_url(server.url), EndpointOptions(5)), limits=limits
        )
        router = Router([Route(Match(), (destination,), codings=codings)])

        async def on_request(client: ClientRequest, http_response: ClientResponse) -> None:
            await handle_request(client, http_response, planner)

        listener = HttpListener(on_request, observers)
        planner = Planner(router)
        listener.set_planner(planner)
        listener.trace_sampler = trace_sampler
        (sock,) = open_tcp_sockets("127.0.0.1", 0)
        here = FastPathListener(
            server, listener, destination, "http://{}:{}".format(*sock.getsockname())
        )
        listener.sockets.listen(sock)
        try:
            yield here
        finally:
            await listener.drain(0.05, 0.05)
            planner.close()
            await destination.upstream.metadata.close()
            await destination.upstream.pool.close()
        assert here.outstanding == 0
        assert not listener._active_calls


@asynccontextmanager
async def serving(
    *scripts: Script, **options: Any
) -> AsyncIterator[tuple[FastPathListener, RawClient]]:
    """Run a server of these scripts, a listener before it, and a client; see ``listening``."""
    async with (
        ScriptedServer(*scripts) as server,
        listening(server, **options) as here,
        here.client() as client,
    ):
        yield here, client


async def echo_target(connection: Connection) -> None:
    """Answer with the target and the body of each request."""
    while True:
        received = await connection.request()
        await connection.send(http_response(received.head.target.encode() + b" " + received.body))
