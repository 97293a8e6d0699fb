"""Behavior that TCP, TLS and Unix sockets share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.system.buffers import MAX_WINDOW
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.transport import Body, UpstreamRequest
from tests.support.http_messages import chunk, http_response, message
from tests.support.servers.scripted_server import Connection, never_respond, respond_in_turn
from tests.upstream.calls import ask, make_request, read_whole
from tests.upstream.endpoints import EndpointAt, Serve

MIB = 1024 * 1024
PIECE = bytes(range(256)) * 1024
ON_THE_WAY = 48 * MIB
"""More than the kernel buffers between two processes: tcp(7), tcp_rmem and tcp_wmem."""
UNTIL_CLOSE = message("HTTP/1.1 200 OK", {"Content-Type": "text/plain"})


async def _error(endpoint: HttpEndpoint, request: UpstreamRequest | None = None) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await ask(endpoint, request)
    return caught.value


async def _pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield PIECE


async def test_host_header_is_that_of_the_address(serve: Serve, endpoint_at: EndpointAt) -> None:
    async with serve() as server:
        endpoint = endpoint_at(server.url)
        await ask(endpoint)
        await ask(endpoint, make_request(headers={"Host": "the client's"}))
        hosts = [received.head.get("Host") for received in server.requests]
        _, tcp, authority = server.url.partition("://")
        assert hosts == [authority if tcp else "localhost", "the client's"]
        assert len(server.connections) == 1


@pytest.mark.parametrize("form", ["in parts", "chunked"])
async def test_large_bodies_pass_both_ways(
    serve: Serve, endpoint_at: EndpointAt, form: str
) -> None:
    count = 8 * MIB // len(PIECE)
    seen: list[str] = []

    async def script(connection: Connection) -> None:
        received = await connection.request()
        seen.append(sha256(received.body).hexdigest())
        await connection.send(http_response(received.body))

    body: Body = _pieces(count) if form == "chunked" else [PIECE, b""] * count
    async with serve(script) as server:
        got = await ask(endpoint_at(server.url), make_request(body))
    whole = sha256(PIECE * count).hexdigest()
    assert (seen, sha256(got).hexdigest()) == ([whole], whole)


async def test_slow_reader_slows_the_server_down(serve: Serve, endpoint_at: EndpointAt) -> None:
    size = 64 * MIB
    written = 0

    async def script(connection: Connection) -> None:
        nonlocal written
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", {"Content-Length": str(size)}))
        while written < size:
            await connection.send(PIECE)
            written += len(PIECE)
        await never_respond(connection)

    async with serve(script) as server:
        response = await endpoint_at(server.url).send(make_request())
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert written < ON_THE_WAY
        assert len(await read_whole(response)) == size


async def test_slow_server_slows_the_sender_down(serve: Serve, endpoint_at: EndpointAt) -> None:
    count = 64 * MIB // len(PIECE)
    given = 0
    go_on = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(count):
            given += 1
            yield PIECE

    async def script(connection: Connection) -> None:
        await connection.head()
        await go_on.wait()
        await connection.reader.readexactly(count * len(PIECE))
        await connection.send(http_response(b"all of it"))

    async with serve(script) as server:
        headers = {"Content-Length": str(count * len(PIECE))}
        sending = asyncio.create_task(ask(endpoint_at(server.url), make_request(body(), headers)))
        before = -1
        while not given or before != given:
            before = given
            await asyncio.sleep(0.1)
        assert 0 < given * len(PIECE) < ON_THE_WAY
        go_on.set()
        assert await sending == b"all of it"


@pytest.mark.parametrize("head", [http_response(PIECE * 16)[: -16 * len(PIECE)], UNTIL_CLOSE])
async def test_slow_reader_gets_the_body_after_the_server_closed(
    serve: Serve, endpoint_at: EndpointAt, head: bytes
) -> None:
    """Bytes that were sent before the close arrive, wherever they are buffered."""
    async with serve(respond_in_turn(head + PIECE * 16)) as server:
        response = await endpoint_at(server.url).send(make_request())
        body = bytearray()
        while piece := await response.read():
            body += piece
            await asyncio.sleep(0.02)
        response.close()
        assert bytes(body) == PIECE * 16
        assert len(body) > 4 * MAX_WINDOW


@pytest.mark.parametrize(
    ("data", "end", "begun"),
    [
        (b"", "cut", False),
        (b"HTTP/1.1 200 OK\r\n", "close", False),
        (http_response(b"whole")[:-1], "cut", True),
        (http_response(b"whole")[:-1], "reset", True),
        (message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}, chunk(b"a")), "close", True),
    ],
)
async def test_response_that_is_cut_short_is_an_error(
    serve: Serve, endpoint_at: EndpointAt, data: bytes, end: str, begun: bool
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(data)
        if end == "cut":
            connection.shutdown_write_below_tls()
            await never_respond(connection)
        elif end == "reset":
            await asyncio.sleep(0.05)
            connection.reset()

    async with serve(script) as server:
        error = await _error(endpoint_at(server.url))
        when = "before the end of its response" if begun else "before it responded"
        assert error.kind is (ErrorKind.BAD_RESPONSE if data else ErrorKind.NO_RESPONSE)
        assert error.message == f"{server.url} closed the connection {when}"


@pytest.mark.parametrize("data", [b"", PIECE[:60_000]])
async def test_body_until_close_over_tls_needs_close_notify(
    serve: Serve, endpoint_at: EndpointAt, data: bytes
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(UNTIL_CLOSE + data)
        connection.shutdown_write_below_tls()
        await never_respond(connection)

    async with serve(script) as server:
        endpoint = endpoint_at(server.url)
        if server.url.startswith("https:"):
            error = await _error(endpoint)
            assert error.kind is ErrorKind.BAD_RESPONSE
            assert error.message.endswith("closed the connection before the end of its response")
        else:
            assert await ask(endpoint) == data
