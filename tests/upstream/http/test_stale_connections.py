"""A server closes an idle connection just as it is used again."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.transport import Body, RequestTemplate, ReservedConnection, UpstreamRequest
from tests.support.addresses import HOST
from tests.support.compiled import needs_source
from tests.support.gateway import until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    respond_in_turn,
)
from tests.upstream.calls import ask as call_whole
from tests.upstream.endpoints import EndpointAt
from tests.upstream.receivers import RecordingReceiver, try_send

Ask = Callable[[HttpEndpoint], Awaitable[bytes]]
LARGE = (b"a" * 200_000, b"b" * 200_000)
SENT = (
    "closed the connection after the request was sent, without a response; it may have executed "
    "the request"
)
closing = respond_in_turn(http_response(), b"")
"""Responds to one request, and closes the connection at the next."""


async def _ask(endpoint: HttpEndpoint, body: Body = (b"body",)) -> bytes:
    request = UpstreamRequest("POST", "/x", CIMultiDict({"X": "y"}), body, is_idempotent=True)
    return await call_whole(endpoint, request)


async def _ask_by_reserving(endpoint: HttpEndpoint) -> bytes:
    receiver = RecordingReceiver(idempotent=True)
    sent = _at_once(endpoint, receiver)
    try:
        await receiver.wait()
    finally:
        sent.close()
    for error in receiver.errors:
        raise error
    return receiver.body


both_ways = pytest.mark.parametrize("ask", [_ask, _ask_by_reserving])


async def _pieces() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"


def _at_once(endpoint: HttpEndpoint, receiver: RecordingReceiver) -> ReservedConnection:
    start = RequestTemplate("POST", "/x", (("X", "y"),))
    sent = try_send(endpoint, start, (("Content-Length", "4"),), b"body", receiver)
    assert sent is not None
    return sent


async def _error(asking: Awaitable[bytes]) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await asking
    return caught.value


@pytest.mark.parametrize("body", [None, (b"",), (b"ab", b"c"), LARGE], ids=["no", "0", "3", "400k"])
async def test_request_over_a_stale_connection_is_sent_again(
    endpoint_at: EndpointAt, body: Body
) -> None:
    async with ScriptedServer(closing, always_respond(http_response(b"yes"))) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        assert await _ask(endpoint, body) == b"yes"
        assert server.connections[0].requests[1:] == server.connections[1].requests
        assert server.requests[-1].body == b"".join(body or ())  # type: ignore[arg-type]


@both_ways
async def test_connection_of_a_resent_request_is_idle_afterwards(
    endpoint_at: EndpointAt, ask: Ask
) -> None:
    async with ScriptedServer(closing, always_respond(http_response(b"yes"))) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        assert [await ask(endpoint), await ask(endpoint)] == [b"yes", b"yes"]
        first, again = server.connections
        assert first.requests[1:] == again.requests[:1]
        assert [each.body for each in again.requests] == [b"body", b"body"]


async def test_resent_request_may_get_a_response_in_parts(endpoint_at: EndpointAt) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(b"abc")[:-1])
        await begun.wait()
        await connection.send(b"c")

    begun = asyncio.Event()
    async with ScriptedServer(closing, script) as server:
        endpoint, receiver = endpoint_at(server.url), RecordingReceiver(idempotent=True)
        await _ask(endpoint)
        sent = _at_once(endpoint, receiver)
        await receiver.wait()
        (response,) = receiver.responses
        assert await response.read() == b"ab"
        begun.set()
        assert await response.read() == b"c"
        sent.close()


async def test_partly_read_body_is_not_sent_again(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer(closing, always_respond(http_response())) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        error = await _error(_ask(endpoint, _pieces()))
        assert error.kind is ErrorKind.NO_RESPONSE
        assert error.message == f"{server.url} {SENT}"
        assert len(server.connections) == 1


class Rereadable(AsyncIterable[bytes]):
    """A body that can be read again."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _pieces()


async def test_repeatable_body_is_sent_again(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer(closing, always_respond(http_response(b"yes"))) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        assert await _ask(endpoint, Rereadable()) == b"yes"
        assert server.connections[0].requests[1:] == server.connections[1].requests
        assert server.requests[-1].body == b"onetwo"


@both_ways
async def test_close_of_a_new_connection_is_not_stale(endpoint_at: EndpointAt, ask: Ask) -> None:
    async with ScriptedServer(respond_in_turn(b"")) as server:
        error = await _error(ask(endpoint_at(server.url)))
        assert error.message == f"{server.url} closed the connection before it responded"
        assert len(server.requests) == 1


@both_ways
@pytest.mark.parametrize("data", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_partly_responded_request_is_not_sent_again(
    endpoint_at: EndpointAt, ask: Ask, data: bytes
) -> None:
    async with ScriptedServer(
        respond_in_turn(http_response(), data), always_respond(http_response())
    ) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        assert SENT not in (await _error(ask(endpoint))).message
        assert len(server.requests) == 2


@both_ways
async def test_request_is_sent_again_only_once(endpoint_at: EndpointAt, ask: Ask) -> None:
    async with ScriptedServer(closing, respond_in_turn(b"")) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        error = await _error(ask(endpoint))
        assert error.message == f"{server.url} closed the connection before it responded"
        assert len(server.requests) == 3


@both_ways
async def test_server_that_refuses_the_second_connection_is_unreachable(
    endpoint_at: EndpointAt, ask: Ask
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        server._server.close()

    async with ScriptedServer(script, host=HOST) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        error = await _error(ask(endpoint))
        assert error.kind is ErrorKind.UNREACHABLE
        assert server.url in error.message


@needs_source
async def test_close_while_a_request_is_sent_again(
    endpoint_at: EndpointAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(is_control: bool) -> None:
        connecting.set()
        await asyncio.Event().wait()

    connecting = asyncio.Event()
    async with ScriptedServer(closing) as server:
        endpoint, receiver = endpoint_at(server.url), RecordingReceiver(idempotent=True)
        await _ask(endpoint)
        monkeypatch.setattr(endpoint, "connect", never)
        sent = _at_once(endpoint, receiver)
        await asyncio.wait_for(connecting.wait(), 5)
        sent.close()
        await until(lambda: not endpoint._senders)
        assert not receiver.complete
        assert not receiver.responses
        assert not receiver.errors
