"""An attempt that is captured works as any other."""

import asyncio
import base64
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_capture import CallCapture
from gateway.proxy.attempts.captured_attempt import send_captured
from gateway.upstream.transport import (
    Body,
    HeaderLines,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)
from tests.support.doubles.streaming import (
    URL,
    EventLog,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
)

OK = ScriptedUpstreamResponse(200, {"X-A": "1"}, [b"yes", b"no"])
PIECES = (b"some", memoryview(b"body"))


class _Again(AsyncIterable[bytes]):
    """A body that can be read again."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def _request(body: Body, is_grpc: bool = False) -> UpstreamRequest:
    return UpstreamRequest("POST", "/x", CIMultiDict(A="b"), body, is_grpc=is_grpc)


async def _send(
    endpoint: UpstreamEndpoint, body: Body = None, is_grpc: bool = False
) -> tuple[UpstreamResponse, CallCapture]:
    capture = CallCapture()
    return await send_captured(endpoint, _request(body, is_grpc), capture, "u"), capture


def _described(capture: CallCapture) -> dict[str, Any]:
    (attempt,) = capture.describe()
    return attempt


def _body(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message["body"])


@pytest.mark.parametrize(
    ("body", "sent"),
    [(None, b""), ((), b""), (PIECES, b"somebody"), (_Again(b"a", b"b"), b"ab")],
    ids=["none", "empty", "buffered", "streamed"],
)
async def test_request_and_response_are_captured(body: Body, sent: bytes) -> None:
    endpoint = ScriptedEndpoint(EventLog(), OK)
    response, capture = await _send(endpoint, body)
    assert await response.read() == b"yes"
    assert _body(_described(capture)["response"]) == b"yes"  # as far as it was read
    assert [await response.read(), await response.read()] == [b"no", b""]
    response.close()
    assert endpoint.bodies == [sent]
    attempt = _described(capture)
    assert (attempt["upstream"], attempt["endpoint"], attempt["error"]) == ("u", URL, None)
    assert attempt["request"]["start"] == "POST /x HTTP/1.1"
    assert attempt["request"]["headers"] == [("A", "b")]
    assert (attempt["request"]["size"], _body(attempt["request"])) == (len(sent), sent)
    assert attempt["response"]["start"] == "HTTP/1.1 200 Scripted"
    assert attempt["response"]["headers"] == [("X-A", "1")]
    assert (attempt["response"]["size"], _body(attempt["response"])) == (5, b"yesno")


class _Twice(ScriptedEndpoint):
    """It reads the body again, as over a new connection instead of one that was stale."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        assert isinstance(request.body, AsyncIterable)
        async for _ in request.body:
            break
        return await super().send(request)


async def test_body_that_is_read_again_is_captured_once() -> None:
    endpoint = _Twice(EventLog(), OK)
    _, capture = await _send(endpoint, _Again(b"one", b"two"))
    assert endpoint.bodies == [b"onetwo"]
    assert _body(_described(capture)["request"]) == b"onetwo"
    (request,) = endpoint.requests
    assert not isinstance(request.body, AsyncIterator)


async def test_body_that_is_an_iterator_stays_one() -> None:
    """Else it would be taken for one that can be sent again."""
    endpoint = ScriptedEndpoint(EventLog(), OK)
    _, capture = await _send(endpoint, aiter(_Again(b"one", b"two")))
    (request,) = endpoint.requests
    assert isinstance(request.body, AsyncIterator)
    assert _body(_described(capture)["request"]) == b"onetwo"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatewayError(ErrorKind.UNREACHABLE, "cannot connect"), "cannot connect"),
        (asyncio.CancelledError(), "cancelled: a timeout, or the client has closed"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
    ids=["error", "cancelled", "unexpected"],
)
async def test_error_is_captured_and_passed_on(error: BaseException, words: str) -> None:
    capture = CallCapture()
    with pytest.raises(type(error)):
        await send_captured(ScriptedEndpoint(EventLog(), error), _request(PIECES), capture, "u")
    attempt = _described(capture)
    assert attempt["response"] is None
    assert attempt["error"].startswith(words)
    assert _body(attempt["request"]) == b"somebody"

    cut = ScriptedUpstreamResponse(200, {}, [b"be", error])
    response, capture = await _send(ScriptedEndpoint(EventLog(), cut))
    assert await response.read() == b"be"
    with pytest.raises(type(error)):
        await response.read()
    attempt = _described(capture)
    assert attempt["error"].startswith(words)
    assert _body(attempt["response"]) == b"be"


class _GrpcResponse(ScriptedUpstreamResponse):
    head_delay = 0.5

    @property
    def received_bytes(self) -> int:
        return 7

    @property
    def trailers(self) -> HeaderLines:
        return (("grpc-status", "5"), ("grpc-message", "no%20such"))


class _GrpcEndpoint(ScriptedEndpoint):
    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        await super().send(request)
        return _GrpcResponse(200, {"Content-Length": "3"}, [b"abc"])


async def test_response_is_passed_through_with_its_trailers() -> None:
    response, capture = await _send(_GrpcEndpoint(EventLog(), OK), PIECES, is_grpc=True)
    assert (response.status, response.reason, response.content_length) == (200, "Scripted", 3)
    assert (response.received_bytes, response.head_delay) == (7, 0.5)
    assert (response.grpc_status, response.grpc_message, response.final_status) == (
        5,
        "no such",
        404,
    )
    assert _described(capture)["response"]["trailers"] == []
    while await response.read():
        pass
    attempt = _described(capture)
    assert attempt["request"]["start"] == "POST /x HTTP/2"
    assert attempt["response"]["start"] == "HTTP/2 200 Scripted"
    assert attempt["response"]["trailers"] == list(response.trailers)
