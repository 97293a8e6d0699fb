"""HTTP/1.1 calls: what handlers get, how responses and errors reach the client, odd bodies."""

import asyncio

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, bad_request
from gateway.http1.connection import Http1Body
from gateway.listener import client_call
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import LimitedLog
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.system.buffers import BufferShare
from gateway.system.sockets.connection import ReadFlow
from tests.http1.fake_transport import FakeTransport
from tests.listener.running_listener import echo, read_body, respond, running_listener
from tests.listener.running_listener import scheme as scheme
from tests.support.doubles.iterations import iterations
from tests.support.gateway import http1_connections, until
from tests.support.http_messages import chunked, message, request
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


# ---------------------------------------------------------------------------------- handlers


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (request("GET", "/a?b"), b"GET /a?b 0 None "),
        (request("POST", "/a%2F", b""), b"POST /a%2F 0 None "),
        (request("POST", "/", b"body", {"X": "y"}), b"POST / 4 y body"),
        (request("PUT", "/", b"\x1f\x8b", {"Content-Encoding": "gzip"}), b"PUT / 2 None \x1f\x8b"),
        (
            message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
            + chunked(b"bo", b"dy"),
            b"PUT / None None body",
        ),
        (b"GET / HTTP/1.0\r\n\r\n", b"GET / 0 None "),
        (request("GET", "hTTps://x"), b"GET / 0 None "),
    ],
)
async def test_handler_gets_the_request(data: bytes, told: bytes) -> None:
    async with running_listener(echo) as running, connect(running.url) as client:
        for _ in range(1 if b"HTTP/1.0" in data else 3):
            reply = await client.ask(data)
            assert (reply.status, reply.body) == (200, told)


async def test_response_without_length_is_chunked() -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if status := int(client.target.removeprefix("/") or "0"):
            await response.start(status, "", CIMultiDict({"Content-Length": "0"}))
            await response.finish()
            return
        assert not response.started
        headers = CIMultiDict([("X", "1"), ("X", "2"), ("Server", "mine")])
        await response.start(299, "So So", headers)
        assert response.started
        await response.write(b"one")
        await response.write(b"")
        await response.write(b"two")
        await response.finish()

    async with running_listener(handle) as running, connect(running.url) as client:
        for _ in range(2):
            reply = await client.call("GET", "/")
            assert reply.head.first == "HTTP/1.1 299 So So"
            assert reply.head.all("X") == ["1", "2"]
            assert reply.head.get("Server") == "mine"
            assert reply.head.get("Transfer-Encoding") == "chunked"
            assert reply.body == b"onetwo"
        # An empty reason becomes the standard phrase.
        for status, line in ((404, "HTTP/1.1 404 Not Found"), (799, "HTTP/1.1 799")):
            reply = await client.call("GET", f"/{status}")
            assert reply.head.first.rstrip() == line
            assert reply.head.get("Server") == "tensorgate"


async def test_response_to_head_has_no_body() -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/chunked":
            await response.start(200, "", CIMultiDict())
            await response.write(b"body")
            await response.finish()
        elif client.target == "/error":
            raise bad_request("why")
        else:
            await respond(response, b"body")

    async with running_listener(handle) as running, connect(running.url) as client:
        for target in ("/sized", "/chunked", "/error") * 2:
            await client.send(request("HEAD", target))
            head = await client.head()
            assert head.status == (400 if target == "/error" else 200)
            assert head.get("Content-Length") == {"/sized": "4", "/error": "15"}.get(target)
        assert (await client.call("GET", "/sized")).body == b"body"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(
    "written",
    [b"", b"small pieces are sent with the next ones", b"begun" * 1000],
    ids=["nothing", "what waits", "a part"],
)
async def test_internal_error_is_logged_and_gets_500_unless_a_response_has_begun(
    version: str, written: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        if written:
            await response.start(200, "", CIMultiDict({"X-Of": "server"}))
            await response.write(written)
        raise ZeroDivisionError

    has_begun = len(written) > 1000
    records: list[CallRecord] = []
    async with running_listener(handle, records.append) as running, connect(running.url) as client:
        await client.send(f"GET /a HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        if has_begun:
            with pytest.raises(ConnectionResetError):
                await client.rest()
        else:
            reply = await client.read_response()
            assert (reply.status, reply.head.get("X-Of")) == (500, None)
            assert reply.error == "the gateway failed; its log says why"
            assert await client.rest() == b""
    status = 200 if has_begun else 500
    assert [(r.status, r.error_kind) for r in records] == [(status, ErrorKind.INTERNAL)]
    assert has_begun or records[0].error == reply.error
    assert "GET /a failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_aborted_response_resets_the_connection(version: str) -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        await response.start(200, "", CIMultiDict())
        await response.write(b"begun")
        await read.wait()
        for _again in range(2):
            response.abort()
            response.abort()
            await asyncio.sleep(0)

    read = asyncio.Event()
    async with running_listener(handle) as running, connect(running.url) as client:
        await client.send(f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        await client.head()
        read.set()
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_each_call_is_observed_though_another_observer_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(record: CallRecord) -> None:
        raise RuntimeError("broken observer")

    records: list[CallRecord] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/bad":
            raise bad_request("no")
        if client.target == "/gone":
            await asyncio.Event().wait()
        await respond(response, b"12345")

    async with running_listener(handle, fail, records.append) as running:
        async with connect(running.url) as client:
            await client.call("GET", "/good?x=%20")
            await client.call("POST", "/bad", b"x")
            await client.send(request("GET", "/gone"))
            await until(lambda: running.listener._active_calls)
        await until(lambda: not running.listener._active_calls)
    assert caplog.text.count("RuntimeError: broken observer") == 3
    assert [(r.method, r.target, r.status, r.response_bytes, r.error) for r in records] == [
        ("GET", "/good?x=%20", 200, 5, ""),
        ("POST", "/bad", 400, 14, "no"),
        ("GET", "/gone", 0, 0, "the client closed the connection"),
    ]
