"""Requests wait for a connection: an idle one, one that is released, or a new one."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Any
from unittest import mock

import pytest

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.upstream.address import parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.connection import ServerConnection
from gateway.upstream.http.endpoint import HttpConnections, HttpEndpoint, HttpExchange
from gateway.upstream.transport import RequestTemplate, ReservedConnection
from tests.http1.fake_transport import FakeTransport
from tests.support.addresses import HOST
from tests.support.doubles.clock import Clock
from tests.support.gateway import until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)
from tests.upstream.endpoints import EndpointAt, RecordingReceiver, make_request, send_reserved

KEEP_ALIVE = 4.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def _connect() -> ServerConnection:
    raise AssertionError("nobody waits")


@pytest.fixture
def idle(clock: Clock) -> HttpConnections:
    with mock.patch("asyncio.get_running_loop", return_value=clock):
        return HttpConnections(_connect, KEEP_ALIVE)


def _use(connection: ServerConnection, headers: dict[str, str] | None = None) -> None:
    """Let a connection carry a complete call."""
    endpoint = HttpEndpoint(parse_server_url("http://server:8000"), EndpointOptions(5))
    connection.begin_request("POST", HttpExchange(endpoint, connection))
    connection.data_received(http_response(b"", headers))


async def _used(keep_alive: str = "") -> ServerConnection:
    """Make a connection that has carried a complete call, whose response had this Keep-Alive."""
    connection = ServerConnection(ServerName("http://server:8000", "upstream 'servers'"))
    connection.connection_made(FakeTransport())
    _use(connection, {"Keep-Alive": keep_alive} if keep_alive else None)
    assert connection.reusable
    return connection


def _calls(connection: ServerConnection) -> list[str]:
    transport: Any = connection.transport
    assert isinstance(transport, FakeTransport)
    return transport.calls


def _is_dropped(connection: ServerConnection) -> bool:
    return "abort" in _calls(connection)


# ---------------------------------------------------------------------- with a manual clock


async def test_last_used_connection_is_taken_first(idle: HttpConnections) -> None:
    first, second, third = [await _used() for _ in range(3)]
    for connection in (first, second, third):
        idle.release(connection)
    assert idle.take() is third
    assert idle.take() is second
    idle.release(third)
    assert [idle.take(), idle.take(), idle.take()] == [third, first, None]
    assert _calls(third) == []


async def test_connection_is_usable_until_its_idle_timeout_and_dropped_then(
    idle: HttpConnections, clock: Clock
) -> None:
    first, second, third, late = [await _used() for _ in range(4)]
    idle.release(first)
    clock.advance(1)
    idle.release(second)
    idle.release(third)
    for seconds, dropped in ((KEEP_ALIVE - 1.25, []), (0.25, [first]), (0.75, [first])):
        clock.advance(seconds)
        assert [each for each in (first, second, third) if _is_dropped(each)] == dropped
    assert idle.take() is third
    idle.release(third)  # its time begins anew
    clock.advance(0.25)
    assert _is_dropped(second)
    clock.advance(KEEP_ALIVE - 0.5)
    assert not _is_dropped(third)
    clock.advance(0.25)
    assert _is_dropped(third)
    assert clock.pending == []
    idle.release(late)  # after there was none
    clock.now += KEEP_ALIVE  # the timer is late
    assert idle.take() is None
    assert _is_dropped(late)


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        ('max=5; Timeout = "3"', 2),
        ("timeout=1", 0.5),
        ("timeout=5", KEEP_ALIVE),
        ("timeout=65", KEEP_ALIVE),
        ("timeout=", KEEP_ALIVE),
        ("xtimeout=3", KEEP_ALIVE),
    ],
)
async def test_connection_is_dropped_before_the_server_closes_it(
    idle: HttpConnections, clock: Clock, keep_alive: str, seconds: float
) -> None:
    connection = await _used(keep_alive)
    idle.release(connection)
    clock.advance(seconds - 0.01)
    assert not _is_dropped(connection)
    clock.advance(0.01)
    assert _is_dropped(connection)


@pytest.mark.parametrize(
    "happens",
    [
        lambda connection: connection.connection_lost(None),
        lambda connection: connection.eof_received(),
        lambda connection: connection.data_received(http_response(b"unasked")),
    ],
    ids=["closed", "closing", "unexpected bytes"],
)
async def test_connection_that_is_not_idle_any_more_is_not_taken(
    idle: HttpConnections, happens: Callable[[ServerConnection], object]
) -> None:
    other, connection = [await _used() for _ in range(2)]
    idle.release(other)
    idle.release(connection)
    happens(connection)
    assert idle.take() is other
    assert idle.take() is None
    assert _is_dropped(connection)
    assert not _is_dropped(other)


async def test_close_drops_all_connections(idle: HttpConnections, clock: Clock) -> None:
    connections = [await _used() for _ in range(3)]
    for connection in connections:
        idle.release(connection)
    await idle.close()
    assert all(map(_is_dropped, connections))
    assert clock.pending == []
    assert idle.take() is None


# ---------------------------------------------------------------------- over TCP


async def test_call_that_ends_after_close_drops_its_connection() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(b"asked"))
        await connection.wait_for_close()

    async with ScriptedServer(script) as server:
        endpoint = HttpEndpoint(parse_server_url(server.url), EndpointOptions(5, 60))
        response = await endpoint.send(make_request())
        assert [await response.read(), await response.read()] == [b"asked", b""]
        await endpoint.close()
        response.close()
        try:
            await until((await server.connection()).left.is_set)
        finally:
            await endpoint.close()


YES = always_respond(http_response(b"yes"))


def _send(
    endpoint: HttpEndpoint, receiver: RecordingReceiver, target: str = "/x"
) -> ReservedConnection:
    template = RequestTemplate("POST", target, ())
    return send_reserved(endpoint, receiver, template, b"body", (("Content-Length", "4"),))


async def _busy(endpoint: HttpEndpoint) -> ReservedConnection:
    """Send a request, whose connection is free once this is closed."""
    receiver = RecordingReceiver()
    sent = _send(endpoint, receiver, "/first")
    await receiver.wait()
    return sent


async def _settle() -> None:
    """Let tasks start that were created just now."""
    for _ in range(3):
        await asyncio.sleep(0)


class _FullServer:
    """A server that accepts no connection: its accept queue is full."""

    def __init__(self) -> None:
        self._socket = socket.create_server((HOST, 0), backlog=0)
        address = self._socket.getsockname()
        self.url = f"http://{HOST}:{address[1]}"
        self._fillers = [socket.socket() for _ in range(4)]
        for each in self._fillers:
            each.setblocking(False)
            each.connect_ex(address)

    def close(self) -> None:
        for each in (self._socket, *self._fillers):
            each.close()


@pytest.mark.parametrize("connects", [False, True])
async def test_request_takes_a_connection_that_becomes_idle(
    endpoint_at: EndpointAt, connects: bool
) -> None:
    """That which it has begun to connect serves a later request."""
    async with ScriptedServer(YES) as server:
        endpoint, receiver = endpoint_at(server.url), RecordingReceiver()
        sent = await _busy(endpoint)
        waiting = _send(endpoint, receiver, "/second")
        if connects:
            await _settle()
        sent.close()  # else before the task of the second one connects
        await receiver.wait()
        assert [each.head.target for each in server.requests] == ["/first", "/second"]
        await until(lambda: not endpoint.connections.connecting)
        assert not endpoint.connections.waiting
        if connects:
            later = _send(endpoint, receiver)
            await receiver.wait()
            assert len(server.connections[1].requests) == 1
            later.close()
        assert len(server.connections) == 1 + connects
        waiting.close()


async def test_failed_connect_is_told_to_one_request_only(endpoint_at: EndpointAt) -> None:
    """The others still have a connect of their own."""
    async with ScriptedServer(YES) as server:
        endpoint = endpoint_at(server.url)
        receivers = [RecordingReceiver() for _ in range(3)]
        connect, errors = endpoint.connect, [GatewayError(ErrorKind.UNREACHABLE, "refused")]

        async def refused_once() -> ServerConnection:
            if errors:
                raise errors.pop()
            return await connect()

        endpoint.connections._connect = refused_once
        waiting = [_send(endpoint, each) for each in receivers]
        for each in receivers:
            await each.wait()
        assert [len(each.errors) for each in receivers] == [1, 0, 0]
        assert [each.body for each in receivers[1:]] == [b"yes", b"yes"]
        for sent in waiting:
            sent.close()


async def test_connects_are_no_more_than_waiting_requests(endpoint_at: EndpointAt) -> None:
    """A server whose accept queue is full still serves the connections that it has."""
    with closing(_FullServer()) as full:
        async with ScriptedServer(YES) as server:
            endpoint, receiver = endpoint_at(server.url), RecordingReceiver()
            sent = _send(endpoint, receiver)
            await receiver.wait()
            endpoint._address = parse_server_url(full.url)
            for _ in range(20):
                waiting = _send(endpoint, receiver)
                await _settle()  # its task connects
                sent.close()
                await receiver.wait()
                sent = waiting
            assert len(endpoint.connections.connecting) == 1
            sent.close()
            async with asyncio.timeout(1):  # the connect would take longer
                await endpoint.close()


async def test_request_over_a_connection_that_is_lost_fails_once(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer(YES) as server:
        endpoint, receiver = endpoint_at(server.url), RecordingReceiver()
        connect = endpoint.connect

        async def lost() -> ServerConnection:
            connection = await connect()
            connection.transport.abort()
            await until(lambda: connection.closed)
            return connection

        endpoint.connections._connect = lost
        sent = _send(endpoint, receiver)
        await receiver.wait()
        await _settle()
        (error,) = receiver.errors
        assert str(error) == f"{server.url} closed the connection before it responded"
        sent.close()


async def test_cancelled_request_stops_its_connect(endpoint_at: EndpointAt) -> None:
    with closing(_FullServer()) as server:
        endpoint, receiver = endpoint_at(server.url), RecordingReceiver()
        sent = _send(endpoint, receiver)
        await _settle()
        assert len(endpoint.connections.connecting) == 1
        sent.close()
        await until(lambda: not endpoint.connections.connecting)
        assert not endpoint.connections.waiting
        assert not receiver.errors
        gone = weakref.ref(receiver)
        del sent, receiver
        gc.collect()
        assert gone() is None


class _Waiting:
    """A request that waits, and what it got."""

    def __init__(self) -> None:
        self.got: list[object] = []

    def send_over(self, connection: ServerConnection) -> None:
        self.got.append(connection)

    def on_error(self, error: Exception) -> None:
        self.got.append(error)


async def test_connect_that_began_before_a_request_does_not_fail_it() -> None:
    """It was for another request, which got a connection that became idle."""
    connects: list[asyncio.Future[ServerConnection]] = []

    async def connect() -> ServerConnection:
        connects.append(asyncio.get_running_loop().create_future())
        return await connects[-1]

    queue = HttpConnections(connect, 60)
    first, late = _Waiting(), _Waiting()
    released = ServerConnection(ServerName("http://h:1", "upstream 'u'"))
    async with ScriptedServer(never_respond) as server:
        await parse_server_url(server.url).connect(released, 5)
        queue.wait(first)
        await _settle()
        queue.release(released)
        assert first.got == [released]
        queue.wait(late)
        old, new = TimeoutError("old"), TimeoutError("new")
        connects[0].set_exception(old)
        await _settle()
        assert (late.got, len(connects)) == ([], 2)
        connects[1].set_exception(new)
        await _settle()
        assert (late.got, queue.waiting, queue.connecting) == ([new], {}, {})
        await queue.close()
        released.drop()
