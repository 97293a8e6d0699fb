from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from gateway.errors import ServerName
from gateway.upstream.address import parse_server_url
from gateway.upstream.http.connection import ServerConnection
from gateway.upstream.http.connections import HttpConnections
from gateway.upstream.http.endpoint import HttpEndpoint, HttpExchange
from tests.http1.fake_transport import FakeTransport
from tests.support.doubles.clock import Clock
from tests.support.gateway import until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection, ScriptedServer
from tests.upstream.calls import ask, make_request

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
    endpoint = HttpEndpoint(parse_server_url("http://server:8000"), 5)
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


async def test_connection_is_dropped_after_its_idle_timeout(
    idle: HttpConnections, clock: Clock
) -> None:
    first, second = [await _used() for _ in range(2)]
    idle.release(first)
    clock.advance(1)
    idle.release(second)
    clock.advance(KEEP_ALIVE - 1.25)
    assert not _is_dropped(first)
    clock.advance(0.25)
    assert _is_dropped(first)
    assert not _is_dropped(second)
    clock.advance(0.75)
    assert not _is_dropped(second)
    clock.advance(0.25)
    assert _is_dropped(second)
    assert idle.take() is None
    assert clock.pending == []


async def test_connection_is_usable_until_its_idle_timeout(
    idle: HttpConnections, clock: Clock
) -> None:
    connection = await _used()
    idle.release(connection)
    clock.advance(KEEP_ALIVE - 0.25)
    assert idle.take() is connection
    idle.release(connection)
    clock.advance(KEEP_ALIVE - 0.25)
    assert not _is_dropped(connection)
    clock.now += 0.25  # the timer is late
    assert idle.take() is None
    assert _is_dropped(connection)


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        ("timeout=3", 2),
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
    assert idle.take() is connection
    idle.release(connection)
    clock.advance(seconds)
    assert _is_dropped(connection)
    assert idle.take() is None


async def test_connection_is_not_kept_if_the_server_closes_it_at_once(
    idle: HttpConnections,
) -> None:
    connection = await _used("timeout=0")
    idle.release(connection)
    assert idle.take() is None
    assert _is_dropped(connection)


async def test_time_of_a_connection_is_that_of_its_last_response(
    idle: HttpConnections, clock: Clock
) -> None:
    connection = await _used("timeout=2")
    _use(connection)
    idle.release(connection)
    clock.advance(KEEP_ALIVE - 0.01)
    assert idle.take() is connection


async def test_connection_of_a_shorter_time_is_not_taken_after_it(
    idle: HttpConnections, clock: Clock
) -> None:
    long, short = await _used(), await _used("timeout=2")
    idle.release(long)
    idle.release(short)
    clock.advance(1)
    assert idle.take() is long
    assert _is_dropped(short)


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


async def test_all_connections_share_one_timer(idle: HttpConnections, clock: Clock) -> None:
    for _ in range(5):
        idle.release(await _used())
        clock.advance(0.25)
        assert len(clock.pending) == 1
    taken = idle.take()
    clock.advance(KEEP_ALIVE)
    assert clock.pending == []
    assert taken is not None
    assert not _is_dropped(taken)


async def test_close_drops_all_connections(idle: HttpConnections, clock: Clock) -> None:
    connections = [await _used() for _ in range(3)]
    for connection in connections:
        idle.release(connection)
    await idle.close()
    assert all(map(_is_dropped, connections))
    assert clock.pending == []
    assert idle.take() is None


async def test_connection_put_after_close_is_dropped(idle: HttpConnections, clock: Clock) -> None:
    await idle.close()
    connection = await _used()
    idle.release(connection)
    assert _is_dropped(connection)
    assert clock.pending == []


# ---------------------------------------------------------------------- over TCP


async def test_endpoint_closes_its_connection_after_the_idle_timeout() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(b""))
        await connection.wait_for_close()

    async with ScriptedServer(script) as server:
        endpoint = HttpEndpoint(parse_server_url(server.url), connect_timeout=5, idle_timeout=0.01)
        for number in range(2):
            assert await ask(endpoint) == b""
            async with asyncio.timeout(5):
                await (await server.connection(number)).left.wait()
        assert len(server.connections) == 2
        await endpoint.close()


async def test_call_that_ends_after_close_drops_its_connection() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(b"asked"))
        await connection.wait_for_close()

    async with ScriptedServer(script) as server:
        endpoint = HttpEndpoint(parse_server_url(server.url), connect_timeout=5)
        response = await endpoint.send(make_request())
        assert [await response.read(), await response.read()] == [b"asked", b""]
        await endpoint.close()
        response.close()
        try:
            await until((await server.connection()).left.is_set)
        finally:
            await endpoint.close()
