"""Requests and responses over HTTP/1.1, and what TCP, TLS and Unix sockets share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from hashlib import sha256

import pytest

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.system.buffers import MAX_WINDOW
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.transport import (
    Body,
    HeaderLines,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    UpstreamRequest,
)
from tests.support.checks.descriptors import no_descriptors
from tests.support.checks.garbage import no_garbage
from tests.support.doubles.iterations import iterations
from tests.support.gateway import until
from tests.support.http_messages import chunk, http_response, message
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    never_respond,
    respond_in_turn,
)
from tests.upstream.endpoints import (
    EndpointAt,
    RecordingReceiver,
    Serve,
    ask,
    make_request,
    pieces,
    read_whole,
    send_reserved,
)


async def _left(server: ScriptedServer, number: int = 0) -> None:
    async with asyncio.timeout(5):
        await (await server.connection(number)).left.wait()


@pytest.mark.parametrize(
    ("method", "body", "headers", "sent", "body_sent"),
    [
        ("GET", None, {}, {}, b""),
        ("POST", None, {}, {"content-length": "0"}, b""),
        ("GET", (b"a",), {}, {"content-length": "1"}, b"a"),
        ("POST", (b"ab", b"", b"c"), {"X-A": "1"}, {"x-a": "1", "content-length": "3"}, b"abc"),
        ("POST", (b"ab",), {"Content-Length": "2"}, {"content-length": "2"}, b"ab"),
        ("POST", (), {"Content-Length": "0"}, {"content-length": "0"}, b""),
        ("POST", "streamed", {"Content-Length": "7"}, {"content-length": "7"}, b"onefour"),
        ("POST", "streamed", {}, {"transfer-encoding": "chunked"}, b"onefour"),
    ],
)
async def test_request_is_sent_unchanged_and_framed(
    endpoint_at: EndpointAt,
    method: str,
    body: Body | str,
    headers: dict[str, str],
    sent: dict[str, str],
    body_sent: bytes,
) -> None:
    made = pieces(b"one", b"", b"four") if isinstance(body, str) else body
    async with ScriptedServer() as server:
        await read_whole(
            await endpoint_at(server.url).send(make_request(made, headers, "/v2/x?y", method))
        )
        (received,) = server.requests
        assert received.head.first == f"{method} /v2/x?y HTTP/1.1"
        assert dict(received.head.headers) == {"host": server.url.removeprefix("http://"), **sent}
        assert received.body == body_sent


async def test_error_of_the_body_is_raised(endpoint_at: EndpointAt) -> None:
    fault = bad_request("the client stumbled")
    async with ScriptedServer(never_respond) as server:
        with pytest.raises(GatewayError) as caught:
            await endpoint_at(server.url).send(make_request(pieces(b"begun", fault)))
        assert caught.value is fault
        await _left(server)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_connect_leaves_nothing(
    endpoint_at: EndpointAt, turns: int, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server takes no part in the handshake of TLS."""
    async with ScriptedServer(never_respond) as server:
        endpoint = endpoint_at(server.url.replace("http", scheme))
        with no_garbage("the connection"):
            sending = asyncio.create_task(endpoint.send(make_request()))
            await iterations(turns)
            sending.cancel()
            await asyncio.wait((sending,))
            del sending
            await iterations(10)
        assert not endpoint._open
    assert caplog.messages == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_lack_of_descriptors_is_not_the_servers_error(
    endpoint_at: EndpointAt, host: str
) -> None:
    async with ScriptedServer() as server:
        url = server.url.replace("127.0.0.1", host)
        endpoint = endpoint_at(url)
        with no_descriptors(), pytest.raises(GatewayError) as caught:
            await endpoint.send(make_request())
        await read_whole(await endpoint.send(make_request()))
        with no_descriptors():  # an idle connection needs no descriptor
            await read_whole(await endpoint.send(make_request()))
        assert len(server.requests) == 2
    assert caught.value.kind is ErrorKind.EXHAUSTED
    reason = "Too many open files"
    assert caught.value.message == (
        f"the gateway is out of local resources (ports or file descriptors) for {url}: {reason}"
    )
    assert caught.value.retry_after == 1


# ---------------------------------------------------------------------------- reserved connections


HOST = ("Host", "client's")


def _start(
    *headers: tuple[str, str], method: str = "POST", target: str = "/v2/x?y"
) -> RequestTemplate:
    return RequestTemplate(method, target, headers)


async def _warm(endpoint_at: EndpointAt, server: ScriptedServer) -> HttpEndpoint:
    """Make an endpoint with an idle connection."""
    endpoint = endpoint_at(server.url)
    await read_whole(await endpoint.send(make_request()))
    return endpoint


def _sent(
    endpoint: HttpEndpoint, receiver: ResponseReceiver, body: bytes = b""
) -> ReservedConnection:
    length = ("Content-Length", str(len(body)))
    return send_reserved(endpoint, receiver, _start(HOST), body, (length,))


SENT_AT_ONCE = {
    "no headers": (
        _start(method="GET", target="/"),
        (),
        b"",
        b"GET / HTTP/1.1\r\nHost: %(here)s\r\n\r\n",
    ),
    "headers of its own": (
        _start(("X-A", "1"), ("hOST", "h"), ("x-a", "2")),
        (("Content-Length", "2"), ("X-Own", "caf\xe9")),
        b"\r\n",
        b"POST /v2/x?y HTTP/1.1\r\nX-A: 1\r\nhOST: h\r\nx-a: 2\r\n"
        b"Content-Length: 2\r\nX-Own: caf\xe9\r\n\r\n\r\n",
    ),
}


@pytest.mark.parametrize(
    ("start", "headers", "body", "data"), SENT_AT_ONCE.values(), ids=SENT_AT_ONCE
)
async def test_reserved_connection_sends_template_headers_and_body(
    endpoint_at: EndpointAt, start: RequestTemplate, headers: HeaderLines, body: bytes, data: bytes
) -> None:
    got: list[bytes] = []

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        for _ in range(2):
            got.append(await connection.reader.readexactly(len(expected)))
            await connection.send(http_response(b"got it"))
        got.append(await connection.reader.read())

    async with ScriptedServer(script) as server:
        here = server.url.removeprefix("http://").encode()
        expected = data.replace(b"%(here)s", here)
        endpoint = await _warm(endpoint_at, server)
        for _ in range(2):
            receiver = RecordingReceiver()
            sent = send_reserved(endpoint, receiver, start, body, headers)
            await receiver.wait()
            assert receiver.body == b"got it"
            sent.close()
        await endpoint.close()
        await until(lambda: len(got) == 3)
        assert got == [expected, expected, b""]


async def test_connection_is_idle_again_after_a_complete_response(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer() as server:
        endpoint, receiver = await _warm(endpoint_at, server), RecordingReceiver()
        for number in range(3):
            sent = _sent(endpoint, receiver, b"%d" % number)
            await receiver.wait()
            sent.close()
            sent.close()
        await read_whole(await endpoint.send(make_request()))
        assert len(server.connections) == 1
        assert [received.body for received in server.requests] == [b"", b"0", b"1", b"2", b""]


async def test_connection_may_be_reused_in_on_complete(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer() as server:
        endpoint, first, second = endpoint_at(server.url), RecordingReceiver(), RecordingReceiver()
        await read_whole(await endpoint.send(make_request()))
        sent = _sent(endpoint, first, b"first")
        after: list[ReservedConnection] = []

        def then() -> None:
            sent.close()
            after.append(_sent(endpoint, second, b"second"))

        first.then = then
        await second.wait()
        after[0].close()
        assert (len(first.complete), len(second.complete)) == (1, 1)
        assert [received.body for received in server.requests] == [b"", b"first", b"second"]
        assert len(server.connections) == 1


DROPPED = {
    "no answer": b"",
    "half of a chunk": message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}, b"9\r\na"),
    "the last": http_response(b"abc", {"Connection": "close"}),
    "more than an answer": http_response(b"abc") + b"x",
}


@pytest.mark.parametrize("data", DROPPED.values(), ids=DROPPED)
async def test_close_drops_the_connection_of_an_incomplete_response(
    endpoint_at: EndpointAt, data: bytes
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        await connection.send(data)
        asked.set()
        await never_respond(connection)

    asked = asyncio.Event()
    async with ScriptedServer(script) as server:
        endpoint, receiver = await _warm(endpoint_at, server), RecordingReceiver()
        sent = _sent(endpoint, receiver)
        await asked.wait()
        if b"\r\n\r\n" in data:
            await receiver.wait()
        calls = len(receiver.complete) + len(receiver.responses)
        sent.close()
        await _left(server)
        assert endpoint.connections.take() is None
        assert len(receiver.complete) + len(receiver.responses) == calls
        assert not receiver.errors


async def test_close_of_an_endpoint_leaves_responses_that_wait_for_their_bodies(
    endpoint_at: EndpointAt,
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        await connection.send(http_response(b"abc")[:-1])
        await connection.wait_for_close()

    async with ScriptedServer(script) as server:
        endpoint, receiver = await _warm(endpoint_at, server), RecordingReceiver()
        sent = _sent(endpoint, receiver)
        await until(lambda: endpoint.deferrals.size == 1)
        await endpoint.close()
        await receiver.wait()  # the head is handed over although its body is not complete
        assert [response.status for response in receiver.responses] == [200]
        assert endpoint.deferrals.size == 0
        sent.close()


async def test_close_of_an_endpoint_waits_for_the_bodies_of_cancelled_calls(
    endpoint_at: EndpointAt,
) -> None:
    begun, cancelled, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await may_end.wait()

    async with ScriptedServer(never_respond) as server:
        endpoint = endpoint_at(server.url)
        sending = asyncio.create_task(endpoint.send(make_request(body())))
        await begun.wait()
        sending.cancel()
        await cancelled.wait()
        closing = asyncio.create_task(endpoint.close())
        await iterations(9)
        assert not closing.done()
        may_end.set()
        await closing


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


async def _until_it_stands(count: Callable[[], int]) -> int:
    """Wait until a slow peer lets a count grow no more, and return it."""
    before = 0
    while not before or before != count():
        before = count()
        await asyncio.sleep(0.1)
    return before


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
        assert await _until_it_stands(lambda: written) < ON_THE_WAY
        assert len(await read_whole(response)) == size


async def test_slow_server_slows_the_sender_down(serve: Serve, endpoint_at: EndpointAt) -> None:
    size = 64 * MIB
    given = 0
    go_on = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        nonlocal given
        while given < size:
            given += len(PIECE)
            yield PIECE

    async def script(connection: Connection) -> None:
        await connection.head()
        await go_on.wait()
        await connection.reader.readexactly(size)
        await connection.send(http_response(b"all of it"))

    async with serve(script) as server:
        request = make_request(body(), {"Content-Length": str(size)})
        sending = asyncio.create_task(ask(endpoint_at(server.url), request))
        assert await _until_it_stands(lambda: given) < ON_THE_WAY
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
