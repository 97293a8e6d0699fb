from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest

from gateway.errors import ErrorKind, GatewayError, ServerName, bad_response
from gateway.http1.head import ResponseHead
from gateway.system.buffers import MAX_WINDOW
from gateway.upstream.address import parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.connection import (
    MAX_INTERIM_RESPONSES,
    ServerConnection,
    StaleConnectionError,
)
from gateway.upstream.http.endpoint import HttpEndpoint, HttpExchange
from gateway.upstream.transport import UpstreamResponse
from tests.http1.fake_transport import FakeTransport
from tests.http1.splits import all_splits, bytewise
from tests.support.doubles.clock import Clock
from tests.support.http_messages import chunk, chunked, http_response, message
from tests.upstream.endpoints import RecordingReceiver

URL = "http://server:8000"

CHUNKED = message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"})
UNTIL_CLOSE = message("HTTP/1.1 200 OK", {})
INTERIM = [
    message("HTTP/1.1 100 Continue"),
    message("HTTP/1.1 102 Processing", {"X": "a"}),
    message("HTTP/1.1 103 Early Hints", {"Link": "</x>", "Content-Length": "5"}),
]


ENDPOINT_ADDRESS = parse_server_url(URL)


def _ask(
    connection: ServerConnection, receiver: RecordingReceiver, method: str = "POST"
) -> HttpExchange:
    """Let a connection expect the response to a request."""
    exchange = HttpExchange(HttpEndpoint(ENDPOINT_ADDRESS, EndpointOptions(5)), connection)
    exchange.receiver = receiver
    connection.begin_request(method, exchange)
    return exchange


def _expect(
    connection: ServerConnection, method: str = "POST", waits_for_chunks: bool = False
) -> asyncio.Future[UpstreamResponse]:
    """Let a connection expect a response that is read as it arrives."""
    receiver = RecordingReceiver(waits_for_chunks=waits_for_chunks, handles=False)
    _ask(connection, receiver, method)
    return receiver.response


def _connected() -> tuple[ServerConnection, FakeTransport]:
    connection = ServerConnection(ServerName(URL, "upstream 'servers'"))
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport


def _expecting() -> tuple[ServerConnection, FakeTransport, asyncio.Future[UpstreamResponse]]:
    """Make a connection over which a request was sent."""
    connection, transport = _connected()
    return connection, transport, _expect(connection)


async def _read(connection: ServerConnection) -> bytes:
    """Read a complete body to its end."""
    assert connection.body is not None
    data = b""
    async with asyncio.timeout(5):
        while piece := await connection.body.read():
            data += piece
    return data


async def _message(
    failing: asyncio.Future[UpstreamResponse] | ServerConnection,
    kind: ErrorKind = ErrorKind.BAD_RESPONSE,
) -> str:
    """Return the message of the error that the head or the body of a response fails with."""
    with pytest.raises(GatewayError) as caught:
        await (_read(failing) if isinstance(failing, ServerConnection) else failing)
    assert caught.value.kind is kind
    return caught.value.message


# ---------------------------------------------------------------------- responses


MAX_CACHED_HEAD = 2048
WHOLE = 128 * 1024


def _head_of_size(size: int, body: bytes) -> bytes:
    """Write a response whose head has this size."""
    missing = size - len(http_response(body, {"X": ""})) + len(body)
    return http_response(body, {"X": "x" * missing})


NO_BODY = message("HTTP/1.1 200 OK", {"Content-Length": "5"})
KEPT = http_response(b"a", {"Connection": "Keep-Alive"})
RESPONSES = {
    "a body": ("POST", http_response(b"whole"), "whole 200", b"whole", True),
    "an empty body": ("POST", http_response(b""), "whole 200", b"", True),
    "empty lines": ("POST", http_response(b"\r\n\r\n"), "whole 200", b"\r\n\r\n", True),
    "an error": ("POST", http_response(b"no", status="404 Not Found"), "whole 404", b"no", True),
    "204": ("POST", message("HTTP/1.1 204 None"), "whole 204", b"", True),
    "304": ("GET", message("HTTP/1.1 304 Same", {"Content-Length": "5"}), "whole 304", b"", True),
    "interim": ("POST", b"".join(INTERIM) + http_response(b"a"), "whole 200", b"a", True),
    "an empty line before it": ("POST", b"\r\n" + http_response(b"a"), "whole 200", b"a", True),
    "the last": ("POST", http_response(b"a", {"Connection": "close"}), "whole 200", b"a", False),
    "HTTP/1.0": ("POST", http_response(b"a").replace(b"/1.1", b"/1.0"), "whole 200", b"a", False),
    "HTTP/1.0, kept": ("POST", KEPT.replace(b"/1.1", b"/1.0"), "whole 200", b"a", True),
    # Some servers send a body after HEAD.
    "HEAD": ("HEAD", NO_BODY, "whole 200", b"", False),
    "HEAD, chunked": ("HEAD", CHUNKED, "whole 200", b"", False),
    "HEAD, until close": ("HEAD", UNTIL_CLOSE, "whole 200", b"", False),
    "chunked": ("POST", CHUNKED + chunked(b"ab", b"c"), "begun 200", b"abc", True),
    "chunked and empty": ("POST", CHUNKED + chunked(), "begun 200", b"", True),
    "trailers": ("POST", CHUNKED + b"1;x=y\r\na\r\n0;z\r\nX: b\r\n\r\n", "begun 200", b"a", True),
}


@pytest.mark.parametrize(
    ("method", "data", "status", "body", "reusable"), RESPONSES.values(), ids=RESPONSES
)
async def test_response_is_read_in_any_pieces(
    method: str, data: bytes, status: str, body: bytes, reusable: bool
) -> None:
    for pieces in all_splits(data):
        connection, transport = _connected()
        head = _expect(connection, method)
        for piece in pieces[:-1]:
            assert not connection.reusable
            connection.data_received(piece)
        connection.data_received(pieces[-1])
        assert (await head).status == int(status[-3:])
        assert await _read(connection) == body
        assert connection.reusable is reusable
        assert transport.calls == []


def _note_reusable(connection: ServerConnection, seen: list[bool]) -> None:
    seen.append(connection.reusable)


IN_ONE_READ = RESPONSES | {
    "the largest body": ("POST", http_response(bytes(WHOLE)), "whole 200", bytes(WHOLE), True),
    "a larger body": ("POST", http_response(bytes(WHOLE + 1)), "begun 200", bytes(WHOLE + 1), True),
    "the largest head": ("POST", _head_of_size(MAX_CACHED_HEAD, b"a"), "whole 200", b"a", True),
    "a larger head": ("POST", _head_of_size(MAX_CACHED_HEAD + 1, b"a"), "begun 200", b"a", True),
    "more behind a body": ("POST", http_response(b"abc") + b"x", "whole 200", b"abc", False),
    "more behind 204": ("POST", message("HTTP/1.1 204 None") + b"x", "whole 204", b"", False),
}


@pytest.mark.parametrize(
    ("method", "data", "call", "body", "reusable"), IN_ONE_READ.values(), ids=IN_ONE_READ
)
async def test_receiver_gets_a_small_complete_response_whole_and_any_other_begun(
    method: str, data: bytes, call: str, body: bytes, reusable: bool
) -> None:
    for view in (bytes, memoryview):
        connection, transport, receiver = _asked(method)
        seen: list[bool] = []
        receiver.then = partial(_note_reusable, connection, seen)
        connection.data_received(view(data))
        assert receiver.calls == [call]
        assert seen == [reusable]  # already in the callback
        if call.startswith("whole"):
            assert connection.body is None
            assert receiver.body == body
        else:
            assert await _read(connection) == body
        assert connection.reusable is reusable
        assert transport.calls == []


async def test_interim_responses_are_ignored_up_to_the_limit() -> None:
    connection, transport = _connected()
    for number in range(2):  # the count starts anew with each request
        head = _expect(connection)
        connection.data_received(INTERIM[1] * MAX_INTERIM_RESPONSES)
        assert not head.done()
        connection.data_received(http_response(b"%d" % number))
        assert (await head).status == 200
        assert await _read(connection) == b"%d" % number
    assert connection.reusable
    assert transport.calls == []
    head = _expect(connection)
    connection.data_received(b"".join(INTERIM * MAX_INTERIM_RESPONSES))
    assert transport.calls == ["abort"]
    text = f"{URL} sent more than 100 interim (1xx) responses to one request"
    assert await _message(head) == text
    assert not connection.reusable


async def test_unread_body_pauses_reading() -> None:
    connection, transport, _ = _expecting()
    connection.data_received(http_response(bytes(MAX_WINDOW + 2))[:-1])
    assert transport.calls == ["pause"]
    assert connection.body is not None
    assert len(await connection.body.read()) == MAX_WINDOW + 1
    assert transport.calls == ["pause", "resume"]
    connection.data_received(b"x")
    assert await _read(connection) == b"x"
    assert connection.reusable


async def test_connection_with_unsent_bytes_of_a_request_is_not_used_again() -> None:
    connection, transport, _ = _expecting()
    transport.unsent = 1
    connection.data_received(http_response(b"early"))
    assert not connection.reusable
    transport.unsent = 0
    assert connection.reusable


# ---------------------------------------------------------------------- unexpected bytes


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (http_response(b"asked"), b"asked"),
        (CHUNKED + chunked(b"asked"), b"asked"),
        (message("HTTP/1.1 304 Same", {"Content-Length": "1"}), b""),
    ],
)
@pytest.mark.parametrize("more", [b"\x00", b"\r\n\r\nx", http_response(b"unasked") * 2])
async def test_bytes_after_a_response_make_the_connection_unusable(
    data: bytes, body: bytes, more: bytes
) -> None:
    for pieces in ([data + more], [data, more], bytewise(data + more)):
        connection, transport, head = _expecting()
        for piece in pieces:
            connection.data_received(piece)
        await head
        assert not connection.reusable
        assert await _read(connection) == body
    for late in (more, b"\r\n"):
        connection, transport, receiver = _asked()
        connection.data_received(data)
        assert (connection.reusable, transport.calls) == (True, [])
        if receiver.complete:
            connection.data_received(late)
            assert (connection.reusable, transport.calls) == (False, ["abort"])


# ---------------------------------------------------------------------- incomplete responses


@pytest.mark.parametrize("is_reused", [False, True])
async def test_certificate_can_be_refused_before_the_first_request_only(is_reused: bool) -> None:
    connection, _ = _connected()
    if is_reused:
        first = _expect(connection)
        connection.data_received(http_response())
        await first
    head = _expect(connection)
    alert = ssl.SSLError()
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    connection.connection_lost(alert)
    # The one error lets the gateway try another endpoint, the other does not.
    kind = ErrorKind.NO_RESPONSE if is_reused else ErrorKind.UNREACHABLE
    says = "may have executed" if is_reused else "asks for a client certificate"
    assert says in await _message(head, kind)


@pytest.mark.parametrize(("seconds", "is_stale"), [(0.75, True), (1.0, False)])
async def test_late_close_means_that_the_server_has_seen_the_request(
    seconds: float, is_stale: bool
) -> None:
    clock = Clock()
    with mock.patch("asyncio.get_running_loop", return_value=clock):
        connection, _ = _connected()
    receiver = RecordingReceiver()
    _ask(connection, receiver)
    connection.data_received(http_response())
    _ask(connection, receiver)
    clock.advance(seconds)
    connection.connection_lost(None)
    assert isinstance(receiver.errors[0], StaleConnectionError) is is_stale


@pytest.mark.parametrize("body", [b"", b"abc", b"0\r\n\r\n"])
async def test_body_until_close_ends_with_the_connection(body: bytes) -> None:
    for pieces in all_splits(UNTIL_CLOSE + body):
        connection, _, head = _expecting()
        for piece in pieces:
            connection.data_received(piece)
        assert (await head).content_length is None
        assert connection.body is not None
        assert not connection.body.ended
        connection.eof_received()
        assert connection.body.ended
        assert not connection.reusable
        connection.connection_lost(None)
        assert await _read(connection) == body
        assert not connection.reusable


# ---------------------------------------------------------------------- invalid responses


INVALID = "sent an invalid HTTP response: "
FRAMED_TWICE = http_response(headers={"Transfer-Encoding": "chunked"})
INVALID_RESPONSES: dict[str, tuple[bytes, str]] = {
    "no HTTP": (b"what?\r\n\r\n", INVALID),
    "TLS": (b"\x15\x03\x01\x00\x02\x02\x46", INVALID),
    "HTTP/2": (b"HTTP/2.0 200 OK\r\n\r\n", f"{INVALID}only HTTP/1.1"),
    "control character": (http_response(headers={"X": "\x01"}), f"{INVALID}a control character in"),
    "two lengths": (FRAMED_TWICE, INVALID),
    "large head": (http_response(headers={"X": "a" * 65536}), f"{INVALID}a head of more than "),
    "after interim responses": (b"".join(INTERIM) + b"what?\r\n\r\n", INVALID),
    "101": (message("HTTP/1.1 101 Switching Protocols"), "returned 101 Switching Protocols, which"),
    "after a good chunk": (CHUNKED + chunk(b"good") + b"what?\r\n", INVALID),
    "more around chunks than in them": (CHUNKED + (b"1;%b\r\na\r\n" % (b"x" * 999)) * 200, INVALID),
    "chunk after interim responses": (b"".join(INTERIM) + CHUNKED + b"what?\r\n", INVALID),
}


@pytest.mark.parametrize(("data", "saying"), INVALID_RESPONSES.values(), ids=INVALID_RESPONSES)
async def test_invalid_response_is_an_error(data: bytes, saying: str) -> None:
    connection, transport, head = _expecting()
    connection.data_received(data)
    assert transport.calls == ["abort"]
    connection.connection_lost(None)
    assert (await _message(head)).startswith(f"{URL} {saying}")
    assert not connection.reusable
    connection, _, receiver = _asked()
    connection.data_received(data)
    connection.connection_lost(None)
    assert receiver.calls == ["failed"]


TINY = chunk(b"x") * 100_000


async def test_tiny_chunks_yield_to_the_event_loop() -> None:
    connection, transport, head = _expecting()
    connection.data_received(CHUNKED + TINY)
    connection.data_received(chunk(b"y") + chunked())  # already received when reading was paused
    assert (await head).status == 200
    assert transport.calls == ["pause"]
    assert not connection.reusable
    assert connection.body is not None
    pieces: list[bytes | memoryview] = []
    while piece := await connection.body.read():
        pieces.append(piece)
    assert b"".join(pieces) == b"x" * 100_000 + b"y"
    # Each comes from another time slice.
    assert max(map(len, pieces)) < 5000
    assert connection.reusable
    assert transport.calls == ["pause", "resume"]


async def test_invalid_tiny_chunk_before_a_close_is_an_error() -> None:
    connection, transport, _ = _expecting()
    connection.data_received(CHUNKED + TINY + b"what?\r\n")
    connection.connection_lost(None)
    assert "sent an invalid HTTP response" in await _message(connection)
    assert "abort" in transport.calls


async def test_dropped_connection_discards_tiny_chunks() -> None:
    connection, transport, _ = _expecting()
    connection.data_received(CHUNKED + TINY)
    connection.drop()
    for _ in range(3):
        await asyncio.sleep(0)
    assert transport.calls == ["pause", "resume", "abort"]
    assert not connection._read_ahead


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("body", [b"", b"a", b"abc"])
async def test_small_body_is_waited_for_a_moment(body: bytes) -> None:
    connection, _ = _connected()
    receiver = RecordingReceiver(handles=False)
    exchange, head = _ask(connection, receiver), receiver.response
    connection.data_received(http_response(b"abcd")[: len(body) - 4])
    await asyncio.sleep(0)
    assert not head.done()
    exchange.on_timeout()
    assert (await head).content_length == 4
    assert connection.body is not None
    assert not body or await connection.body.read() == body
    connection.data_received(b"abcd"[len(body) :])
    assert await connection.body.read() == b"abcd"[len(body) :]
    assert connection.reusable


async def test_chunked_body_is_waited_for_if_that_is_wanted() -> None:
    for waits in (False, True):
        connection, _ = _connected()
        head = _expect(connection, waits_for_chunks=waits)
        connection.data_received(CHUNKED + chunk(b"abc"))
        await asyncio.sleep(0)
        assert head.done() is not waits
        connection.data_received(chunked())
        # A body that is all there has a size.
        assert (await head).content_length == (3 if waits else None)
        assert connection.body is not None
        assert await connection.body.read() == b"abc"
        assert connection.reusable


# ---------------------------------------------------------------------- receivers


def _asked(method: str = "POST") -> tuple[ServerConnection, FakeTransport, RecordingReceiver]:
    connection, transport = _connected()
    receiver = RecordingReceiver()
    _ask(connection, receiver, method)
    return connection, transport, receiver


async def test_next_request_begun_in_on_complete_fails_after_a_close() -> None:
    connection, _, receiver = _asked()
    second = RecordingReceiver()
    receiver.then = lambda: _ask(connection, second)
    connection.data_received(http_response(b"first"))
    connection.connection_lost(None)
    assert (receiver.calls, second.calls) == (["whole 200"], ["failed"])


FAILURES: dict[str, Callable[[ServerConnection], object]] = {
    "closed": lambda connection: connection.connection_lost(None),
    "reset": lambda connection: connection.connection_lost(ConnectionResetError()),
    "no HTTP": lambda connection: connection.data_received(b"what?\r\n\r\n"),
    "101": lambda connection: connection.data_received(message("HTTP/1.1 101 Switching Protocols")),
    "given up": lambda connection: connection.fail(bad_response(f"{URL} was given up")),
}


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 2", INTERIM[0]])
@pytest.mark.parametrize("fails", FAILURES.values(), ids=FAILURES)
async def test_receiver_gets_one_error(
    fails: Callable[[ServerConnection], object], before: bytes
) -> None:
    connection, transport, receiver = _asked()
    if before:
        connection.data_received(before)
    seen: list[bool] = []
    receiver.then = lambda: seen.append(connection.reusable)
    fails(connection)
    assert receiver.calls == ["failed"]
    (error,) = receiver.errors
    assert isinstance(error, GatewayError)
    silent = not before and fails in (FAILURES["closed"], FAILURES["reset"])
    assert error.kind is (ErrorKind.NO_RESPONSE if silent else ErrorKind.BAD_RESPONSE)
    assert URL in error.message
    if fails in (FAILURES["closed"], FAILURES["reset"]):
        assert error.message == f"{URL} closed the connection before it responded"
    assert seen == [False]
    assert "abort" in transport.calls
    for again in FAILURES.values():
        again(connection)
    assert receiver.calls == ["failed"]


@pytest.mark.parametrize("data", [http_response(b"abc"), CHUNKED + chunk(b"abc")])
@pytest.mark.parametrize("fails", FAILURES.values(), ids=FAILURES)
async def test_receiver_gets_no_error_after_a_complete_response(
    data: bytes, fails: Callable[[ServerConnection], object]
) -> None:
    """If the body is incomplete, its reader gets the error."""
    connection, _, receiver = _asked()
    connection.data_received(data)
    (call,) = receiver.calls
    fails(connection)
    connection.connection_lost(None)
    assert receiver.calls == [call]
    assert not connection.reusable


LATE: list[Callable[[ServerConnection], object]] = [
    lambda connection: connection.data_received(http_response(b"late")),
    lambda connection: connection.data_received(http_response(bytes(WHOLE + 1))),
    lambda connection: connection.eof_received(),
]


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 200 OK\r\nX:", INTERIM[0]])
async def test_receiver_is_not_called_after_drop(before: bytes) -> None:
    for happens in (*FAILURES.values(), *LATE):
        connection, _, receiver = _asked()
        if before:
            connection.data_received(before)
        connection.drop()
        happens(connection)
        connection.connection_lost(None)
        assert receiver.calls == []
        assert connection.body is None
        assert not connection.reusable


# ---------------------------------------------------------------------- over TCP


class _FailingReceiver(RecordingReceiver):
    """Fails when it is asked whether a body passes, or told of an error."""

    def passes_untouched(self, head: ResponseHead) -> bool:
        raise ZeroDivisionError("it is asked")

    def on_error(self, error: Exception) -> None:
        super().on_error(error)
        raise ZeroDivisionError("it is told")


async def test_connection_is_dropped_before_its_receiver_is_told() -> None:
    connection, transport = _connected()
    receiver = _FailingReceiver()
    _ask(connection, receiver)
    connection.data_received(http_response(b"body")[:-1])  # the rest is waited for
    assert connection.buffers.streams == 1
    with pytest.raises(ZeroDivisionError, match="it is told"):
        connection.fail(bad_response("it fell over"))
    assert "abort" in transport.calls
    assert (connection.buffers.streams, connection.buffers.buffered) == (0, 0)


async def test_error_of_the_gateway_while_reading_reaches_the_receiver(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection, transport = _connected()
    receiver = _FailingReceiver()
    _ask(connection, receiver)
    with pytest.raises(ZeroDivisionError, match="it is told"):
        connection.data_received(http_response(bytes(MAX_WINDOW // 2))[:1000])
    (error,) = receiver.errors
    assert isinstance(error, ZeroDivisionError)
    assert "it is asked" in caplog.text
    assert "abort" in transport.calls
