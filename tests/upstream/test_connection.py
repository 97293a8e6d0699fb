from __future__ import annotations

import asyncio

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.http1.connection import HIGH_WATER
from gateway.http1.head import ResponseHead
from gateway.upstream.base import UpstreamRequest
from gateway.upstream.connection import ServerConnection
from gateway.upstream.http import HttpEndpoint
from tests.http1.pieces import bytewise, ways
from tests.http1.transport import TransportDouble
from tests.servers.faulty_server import Connection, FaultyServer
from tests.servers.http_text import answer, chunk, chunked, message
from tests.servers.running_gateway import nothing_left

URL = "http://server:8000"

CHUNKED = message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"})
UNTIL_CLOSE = message("HTTP/1.1 200 OK", {})
INTERIM = [
    message("HTTP/1.1 100 Continue"),
    message("HTTP/1.1 102 Processing", {"X": "a"}),
    message("HTTP/1.1 103 Early Hints", {"Link": "</x>", "Content-Length": "5"}),
]


def _connected() -> tuple[ServerConnection, TransportDouble]:
    connection = ServerConnection(URL)
    transport = TransportDouble()
    connection.connection_made(transport)
    return connection, transport


async def _read(connection: ServerConnection) -> bytes:
    """Read what has come of a body, to its end; nothing more is to come."""
    assert connection.body is not None
    data = b""
    async with asyncio.timeout(5):
        while piece := await connection.body.read():
            data += piece
    return data


async def _message(failing: asyncio.Future[ResponseHead] | ServerConnection) -> str:
    """Give what an answer's head, or its body, fails with."""
    with pytest.raises(GatewayError) as caught:
        await (_read(failing) if isinstance(failing, ServerConnection) else failing)
    assert caught.value.kind is ErrorKind.BAD_ANSWER
    return caught.value.message


# ---------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("method", "data", "status", "body", "reusable"),
    [
        ("POST", answer(b"whole"), 200, b"whole", True),
        ("POST", answer(b""), 200, b"", True),
        ("POST", answer(b"\r\n\r\n"), 200, b"\r\n\r\n", True),
        ("POST", answer(b"no", status="404 Not Found"), 404, b"no", True),
        ("POST", CHUNKED + chunked(b"ab", b"c"), 200, b"abc", True),
        ("POST", CHUNKED + chunked(), 200, b"", True),
        ("POST", CHUNKED + b"1;x=y\r\na\r\n0;z\r\nX: b\r\n\r\n", 200, b"a", True),
        ("POST", message("HTTP/1.1 204 None"), 204, b"", True),
        ("GET", message("HTTP/1.1 304 Same", {"Content-Length": "5"}), 304, b"", True),
        ("POST", INTERIM[0] + answer(b"a"), 200, b"a", True),
        ("POST", b"".join(INTERIM) + CHUNKED + chunked(b"a"), 200, b"a", True),
        ("POST", b"\r\n" + answer(b"a"), 200, b"a", True),
        ("POST", answer(b"a", {"Connection": "close"}), 200, b"a", False),
        ("POST", answer(b"a").replace(b"/1.1", b"/1.0"), 200, b"a", False),
        ("POST", answer(b"a", {"Connection": "Keep-Alive"}), 200, b"a", True),
        (
            "POST",
            answer(b"a", {"Connection": "Keep-Alive"}).replace(b"/1.1", b"/1.0"),
            200,
            b"a",
            True,
        ),
        # Some servers send a body all the same.
        ("HEAD", message("HTTP/1.1 200 OK", {"Content-Length": "5"}), 200, b"", False),
        ("HEAD", CHUNKED, 200, b"", False),
        ("HEAD", UNTIL_CLOSE, 200, b"", False),
    ],
)
async def test_answers(method: str, data: bytes, status: int, body: bytes, reusable: bool) -> None:
    for pieces in ways(data):
        connection, transport = _connected()
        head = connection.expect(method)
        for piece in pieces[:-1]:
            assert not connection.reusable
            connection.data_received(piece)
        connection.data_received(pieces[-1])
        assert (await head).status == status
        assert await _read(connection) == body
        assert connection.reusable is reusable
        assert transport.calls == []


async def test_one_answer_after_the_other() -> None:
    connection, transport = _connected()
    assert not connection.reusable
    for number in range(3):
        for data in (answer(b"%d" % number), CHUNKED + chunked(b"%d" % number)):
            head = connection.expect("POST")
            assert connection.body is None
            assert not connection.reusable
            for piece in bytewise(data):
                connection.data_received(piece)
            assert (await head).status == 200
            assert await _read(connection) == b"%d" % number
            assert connection.reusable
    assert transport.calls == []


async def test_an_interim_answer_is_none() -> None:
    connection, _ = _connected()
    head = connection.expect("POST")
    for interim in INTERIM:
        connection.data_received(interim)
        assert not head.done()
        assert connection.body is None
    connection.data_received(answer(b"a", {"X": "b"}, status="201 Made"))
    assert ((await head).status, (await head).reason) == (201, "Made")
    assert (await head).headers["X"] == "b"


async def test_a_body_is_there_as_it_comes() -> None:
    connection, _ = _connected()
    head = connection.expect("POST")
    connection.data_received(answer(b"abc")[:-2])
    assert (await head).length == 3
    assert connection.body is not None
    assert await connection.body.read() == b"a"
    assert not connection.body.ended
    connection.data_received(b"b")
    assert await connection.body.read() == b"b"
    connection.data_received(b"c")
    assert connection.body.ended
    assert await connection.body.read() == b"c"


async def test_a_body_nobody_reads_holds_the_server_back() -> None:
    connection, transport = _connected()
    connection.expect("POST")
    connection.data_received(answer(bytes(HIGH_WATER + 1)))
    assert transport.calls == ["pause"]
    assert len(await _read(connection)) == HIGH_WATER + 1
    assert transport.calls == ["pause", "resume"]
    assert connection.reusable


# ---------------------------------------------------------------------------------- more than asked


@pytest.mark.parametrize("unasked", [answer(b"unasked"), b"\x00", b"H", b"\r\n"])
async def test_what_comes_before_any_request_drops_the_connection(unasked: bytes) -> None:
    connection, transport = _connected()
    connection.data_received(unasked)
    assert transport.calls == ["abort"]
    assert not connection.reusable


async def test_an_answer_to_one_who_left_drops_the_connection() -> None:
    connection, transport = _connected()
    connection.expect("POST").cancel()
    connection.data_received(answer(b"late"))
    assert transport.calls == ["abort"]
    assert connection.body is None
    assert not connection.reusable


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (answer(b"asked"), b"asked"),
        (answer(b""), b""),
        (CHUNKED + chunked(b"asked"), b"asked"),
        (message("HTTP/1.1 204 None"), b""),
        (message("HTTP/1.1 304 Same", {"Content-Length": "1"}), b""),
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        *(b"x", b"\x00", b"\r\n\r\nx", b"HTTP/1.1 200", answer(b"unasked"), answer(b"x") * 2),
        CHUNKED + chunked(b"unasked"),
    ],
)
async def test_a_connection_on_which_more_came_is_not_reusable(
    data: bytes, body: bytes, more: bytes
) -> None:
    for pieces in ([data + more], [data, more], bytewise(data + more)):
        connection, _ = _connected()
        head = connection.expect("POST")
        for piece in pieces:
            connection.data_received(piece)
        await head
        assert not connection.reusable
        assert await _read(connection) == body


# ---------------------------------------------------------------------------------- broken off


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\nX:", *INTERIM])
@pytest.mark.parametrize("eof", [True, False])
async def test_closed_before_it_answered(data: bytes, eof: bool) -> None:
    connection, _ = _connected()
    head = connection.expect("POST")
    if data:
        connection.data_received(data)
    if eof:
        connection.eof_received()
    connection.connection_lost(None if eof else ConnectionResetError())
    assert await _message(head) == f"{URL} closed the connection before it answered"
    assert connection.closed
    assert not connection.reusable


async def test_closed_before_it_was_asked() -> None:
    connection, _ = _connected()
    connection.connection_lost(None)
    head = connection.expect("POST")
    assert await _message(head) == f"{URL} closed the connection before it answered"


@pytest.mark.parametrize(
    "data",
    [
        answer(b"abcd")[:-1],
        CHUNKED + chunk(b"abc"),
        CHUNKED + chunked(b"abc")[:-1],
        CHUNKED + b"4\r\nabc",
    ],
)
@pytest.mark.parametrize("eof", [True, False])
async def test_closed_before_the_end_of_its_answer(data: bytes, eof: bool) -> None:
    connection, _ = _connected()
    head = connection.expect("POST")
    connection.data_received(data)
    if eof:
        connection.eof_received()
    connection.connection_lost(None if eof else ConnectionResetError())
    await head
    assert connection.body is not None
    assert await connection.body.read() == b"abc"
    text = await _message(connection)
    assert text == f"{URL} closed the connection before the end of its answer"
    assert not connection.reusable


@pytest.mark.parametrize("body", [b"", b"abc", b"0\r\n\r\n"])
async def test_a_body_until_close_ends_with_the_connection(body: bytes) -> None:
    for pieces in ways(UNTIL_CLOSE + body):
        connection, _ = _connected()
        head = connection.expect("POST")
        for piece in pieces:
            connection.data_received(piece)
        assert (await head).length is None
        assert connection.body is not None
        assert not connection.body.ended
        connection.eof_received()
        assert connection.body.ended
        assert not connection.reusable
        connection.connection_lost(None)
        assert await _read(connection) == body
        assert not connection.reusable


async def test_a_body_until_close_fails_with_a_reset() -> None:
    connection, _ = _connected()
    head = connection.expect("POST")
    connection.data_received(UNTIL_CLOSE + b"abc")
    connection.connection_lost(ConnectionResetError())
    await head
    assert connection.body is not None
    assert await connection.body.read() == b"abc"
    text = await _message(connection)
    assert text == f"{URL} closed the connection before the end of its answer"


async def test_a_whole_answer_is_whole_though_the_server_closes() -> None:
    connection, _ = _connected()
    head = connection.expect("POST")
    connection.data_received(answer(b"abc"))
    connection.eof_received()
    assert not connection.reusable
    connection.connection_lost(None)
    await head
    assert await _read(connection) == b"abc"
    assert not connection.reusable


# ---------------------------------------------------------------------------------- no answer


@pytest.mark.parametrize(
    ("data", "saying"),
    [
        (b"what?\r\n\r\n", "answered what is not HTTP: "),
        (b"\x15\x03\x01\x00\x02\x02\x46", "answered what is not HTTP: "),
        (b"HTTP/2.0 200 OK\r\n\r\n", "answered what is not HTTP: only HTTP/1.1"),
        (answer(headers={"X": "\x01"}), "answered what is not HTTP: Invalid header value"),
        (answer(headers={"Transfer-Encoding": "chunked"}), "answered what is not HTTP: "),
        (answer(headers={"X": "a" * 65536}), "answered what is not HTTP: a head of more than "),
        (b"".join(INTERIM) + b"what?\r\n\r\n", "answered what is not HTTP: "),
        (message("HTTP/1.1 101 Switching Protocols"), "answered 101 Switching Protocols, for "),
    ],
    ids=range(8),
)
async def test_what_is_no_answer(data: bytes, saying: str) -> None:
    connection, transport = _connected()
    head = connection.expect("POST")
    connection.data_received(data)
    assert transport.calls == ["abort"]
    connection.connection_lost(None)
    assert (await _message(head)).startswith(f"{URL} {saying}")
    assert not connection.reusable


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_broken_chunk(at_once: bool) -> None:
    connection, transport = _connected()
    head = connection.expect("POST")
    connection.data_received(CHUNKED + chunk(b"good"))
    if at_once:
        assert (await head).chunked
        assert connection.body is not None
        assert await connection.body.read() == b"good"
    connection.data_received(b"what\r\n")
    assert transport.calls == ["abort"]
    connection.connection_lost(None)
    if not at_once:
        assert connection.body is not None
        assert await connection.body.read() == b"good"
    assert (await _message(connection)).startswith(f"{URL} answered what is not HTTP: ")
    assert not connection.reusable


async def test_a_connect_behind_a_chunked_answer_is_only_more() -> None:
    connection, _ = _connected()
    head = connection.expect("POST")
    connection.data_received(CHUNKED + chunked(b"a") + b"CONNECT a:80 HTTP/1.1\r\n\r\n")
    await head
    assert not connection.reusable
    assert await _read(connection) == b"a"


# ---------------------------------------------------------------------------------- given up


async def test_who_waits_for_the_head_has_the_error() -> None:
    connection, transport = _connected()
    head = connection.expect("POST")
    fault = bad_request("the client's")
    connection.fail(fault)
    connection.connection_lost(None)
    with pytest.raises(GatewayError) as caught:
        await head
    assert caught.value is fault
    assert transport.calls[0] == "abort"
    assert not connection.reusable


async def test_who_reads_the_body_has_the_error() -> None:
    connection, transport = _connected()
    head = connection.expect("POST")
    connection.data_received(answer(b"abc")[:-1])
    fault = bad_request("the client's")
    connection.fail(fault)
    connection.connection_lost(None)
    await head
    assert connection.body is not None
    assert await connection.body.read() == b"ab"
    with pytest.raises(GatewayError) as caught:
        await connection.body.read()
    assert caught.value is fault
    assert transport.calls[0] == "abort"


async def test_an_error_behind_the_end_leaves_the_answer_whole() -> None:
    connection, transport = _connected()
    head = connection.expect("POST")
    connection.data_received(answer(b"abc"))
    connection.fail(bad_request("late"))
    await head
    assert await _read(connection) == b"abc"
    assert transport.calls == ["abort"]
    assert not connection.reusable


async def test_a_dropped_connection_is_not_reusable() -> None:
    connection, transport = _connected()
    head = connection.expect("POST")
    connection.data_received(answer(b"abc"))
    await head
    assert connection.reusable
    connection.drop()
    assert not connection.reusable
    assert transport.calls == ["abort"]


# ---------------------------------------------------------------------------------- over TCP


async def test_who_reads_a_body_is_told_that_it_is_broken() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(b"good"))
        await seen.wait()
        await connection.send(b"what\r\n")
        await connection.wait_until_left()

    seen = asyncio.Event()
    async with nothing_left(), FaultyServer(script) as server:
        endpoint = HttpEndpoint(server.url, connect_time=5)
        response = await endpoint.send(UpstreamRequest("GET", "/", CIMultiDict(), None))
        assert await response.read() == b"good"
        seen.set()
        with pytest.raises(GatewayError, match="answered what is not HTTP: "):
            await response.read()
        response.close()
        await endpoint.close()
        async with asyncio.timeout(5):
            await (await server.connection()).left.wait()


async def test_a_body_until_close_over_tcp() -> None:
    async def closes(connection: Connection) -> None:
        await connection.request()
        await connection.send(UNTIL_CLOSE, b"ab", b"c")

    async def resets(connection: Connection) -> None:
        await connection.request()
        await connection.send(UNTIL_CLOSE, b"ab", b"c")
        await seen.wait()
        connection.reset()

    seen = asyncio.Event()
    async with nothing_left(), FaultyServer(closes, resets) as server:
        endpoint = HttpEndpoint(server.url, connect_time=5)
        request = UpstreamRequest("GET", "/", CIMultiDict(), None)
        response = await endpoint.send(request)
        data = b""
        while piece := await response.read():
            data += piece
        assert data == b"abc"
        response.close()
        response = await endpoint.send(request)
        data = b""
        while data != b"abc":
            data += await response.read()
        seen.set()
        with pytest.raises(GatewayError, match="before the end of its answer"):
            await response.read()
        response.close()
        await endpoint.close()
