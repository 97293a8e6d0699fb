"""Bodies that are unread, malformed, or in tiny pieces."""

import asyncio

import pytest

from gateway.errors import bad_request
from gateway.http1.connection import Http1Body
from gateway.listener import client_call
from gateway.observe.failure_log import LimitedLog
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.system.buffers import BufferShare
from gateway.system.sockets.connection import ReadFlow
from tests.http1.fake_transport import FakeTransport
from tests.listener.running_listener import echo, read_body, respond, running_listener
from tests.listener.running_listener import scheme as scheme
from tests.support.doubles.iterations import iterations
from tests.support.gateway import http1_connections, until
from tests.support.http_messages import message, request
from tests.support.raw_client import connect


async def test_unread_body_does_not_close_the_connection() -> None:
    async def handle(_: ClientRequest, __: ClientResponse) -> None:
        raise bad_request("not looked at")

    async with running_listener(handle) as running, connect(running.url) as client:
        for _ in range(3):
            data = request("POST", "/", bytes(100_000))
            await client.send(data[:1000])
            assert (await client.read_response()).status == 400
            await client.send(data[1000:])


async def test_large_unread_body_does_not_block_the_connection() -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        (connection,) = http1_connections(running.listener)
        body = connection.body
        assert body is not None
        # It has read as much as it may.
        await until(lambda: connection.read_flow.paused or body.ended)
        await respond(response, b"not looked at")

    async with running_listener(handle) as running, connect(running.url) as client:
        for size in range(500_000, 800_000, 60_000):
            client.send_nowait(request("POST", "/", bytes(size)))
            assert (await client.read_response()).status == 200


async def test_malformed_unread_body_closes_after_the_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        await broken.wait()
        await respond(response, b"done")

    broken = asyncio.Event()
    head = message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    async with running_listener(handle) as running, connect(running.url) as client:
        await client.send(head + b"2\r\nab\r\n")
        await until(lambda: running.listener.requests)
        await client.send(b"what?\r\n")
        (connection,) = http1_connections(running.listener)
        await until(lambda: connection._framing_lost)
        broken.set()
        assert (await client.read_response()).body == b"done"
        assert await client.rest() == b""
    assert not caplog.records


async def test_read_ahead_of_pipelined_requests_is_limited() -> None:
    count, most = 1000, 64 * 1024 + 1000 * 1024
    ahead: list[int] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if len(ahead) < 30:
            await iterations(5)  # more could arrive
        (connection,) = http1_connections(running.listener)
        ahead.append(len(connection._read_ahead))
        await echo(client, response)

    async with running_listener(handle) as running, connect(running.url) as client:
        client.send_nowait(request("POST", "/", bytes(8000)) * count)
        for _ in range(count):
            assert len((await client.read_response()).body) > 8000
        assert (await client.call("GET", "/last")).status == 200
    assert max(ahead) <= most


TINY = b"1\r\nx\r\n"
CHUNKS = 100_000
CHUNKED_HEAD = message("POST / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})


async def test_tiny_chunks_do_not_starve_others() -> None:
    pieces: list[int] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        while piece := await client.read():
            pieces.append(len(piece))
        await respond(response, b"")

    async with running_listener(handle) as running, connect(running.url) as client:
        await client.send(CHUNKED_HEAD)
        await until(lambda: running.listener._active_calls)
        (connection,) = http1_connections(running.listener)
        # The largest possible read.
        connection.data_received(memoryview(TINY * CHUNKS))
        assert not connection.transport.is_reading()
        # A read that was in progress.
        connection.data_received(TINY + b"0\r\n\r\n" + request("GET", "/next"))
        for _ in range(2):
            assert (await client.read_response()).status == 200
        assert (await client.call("GET", "/last")).status == 200
    assert sum(pieces) == CHUNKS + 1
    # Each is from an iteration of its own.
    assert max(pieces) < 5000


async def test_tiny_chunks_of_a_client_that_leaves_are_dropped() -> None:
    async def handle(client: ClientRequest, _: ClientResponse) -> None:
        await read_body(client)

    async with running_listener(handle) as running, connect(running.url) as client:
        await client.send(CHUNKED_HEAD)
        await until(lambda: running.listener._active_calls)
        (connection,) = http1_connections(running.listener)
        connection.data_received(memoryview(TINY * CHUNKS))
        client.reset()
        connection.transport.abort()
        await until(lambda: not running.listener._active_calls)
        assert not connection._read_ahead


async def test_empty_line_is_no_head_that_could_be_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_listener(echo) as running, connect(running.url) as client:
        running.listener.buffers.set_limit(1)
        other = BufferShare(running.listener.buffers)
        body = Http1Body(ReadFlow(FakeTransport()), other)  # so that too much is buffered
        await client.send(b"\r\n")
        await until(lambda: running.listener.connections)
        await iterations(10)
        await client.send(b"\r\n")
        assert (await client.call("GET", "/")).status == 200
        body.discard()
    assert caplog.messages == []


async def test_refused_request_is_logged_at_a_limited_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_call, "REFUSAL_LOG", LimitedLog("were refused"))
    async with running_listener(echo) as running:
        for _ in range(3):
            async with connect(running.url) as client:
                assert (await client.ask(b"GET / HTTP/1.1\r\nHost: a b\x01\r\n\r\n")).status == 400
    (line,) = caplog.messages
    assert line.startswith("request of 127.0.0.1 refused: malformed HTTP request: ")
