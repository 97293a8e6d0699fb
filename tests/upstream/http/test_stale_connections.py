"""A server closes an idle connection just as it is used again, or before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable

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
    Script,
    ScriptedServer,
    always_respond,
    respond_in_turn,
)
from tests.upstream.endpoints import (
    EndpointAt,
    RecordingReceiver,
    Repeatable,
    Serve,
    ask,
    make_request,
    pieces,
    send_reserved,
)

LARGE = (b"a" * 200_000, b"b" * 200_000)
SENT = (
    "closed the connection after the request was sent, without a response; it may have executed "
    "the request"
)
closing = respond_in_turn(http_response(), b"")
"""Responds to one request, and closes the connection at the next."""


async def _ask(endpoint: HttpEndpoint, body: Body = (b"body",)) -> bytes:
    request = UpstreamRequest("POST", "/x", CIMultiDict({"X": "y"}), body, is_idempotent=True)
    return await ask(endpoint, request)


def _at_once(endpoint: HttpEndpoint, receiver: RecordingReceiver) -> ReservedConnection:
    start = RequestTemplate("POST", "/x", (("X", "y"),))
    return send_reserved(endpoint, receiver, start, b"body", (("Content-Length", "4"),))


async def _error(asking: Awaitable[bytes]) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await asking
    return caught.value


BODIES: dict[str, tuple[Body, bytes]] = {
    "no": (None, b""),
    "0": ((b"",), b""),
    "3": ((b"ab", b"c"), b"abc"),
    "400k": (LARGE, b"".join(LARGE)),
    "repeatable": (Repeatable(b"one", b"two"), b"onetwo"),
}


@pytest.mark.parametrize(("body", "sent"), BODIES.values(), ids=BODIES)
async def test_request_over_a_stale_connection_is_sent_again(
    endpoint_at: EndpointAt, body: Body, sent: bytes
) -> None:
    async with ScriptedServer(closing, always_respond(http_response(b"yes"))) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        assert await _ask(endpoint, body) == b"yes"
        assert server.connections[0].requests[1:] == server.connections[1].requests
        assert server.requests[-1].body == sent


async def test_partly_read_body_is_not_sent_again(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer(closing, always_respond(http_response())) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        error = await _error(_ask(endpoint, pieces(b"one", b"two")))
        assert error.kind is ErrorKind.NO_RESPONSE
        assert error.message == f"{server.url} {SENT}"
        assert len(server.connections) == 1


ENDS: dict[str, tuple[tuple[Script, ...], int]] = {
    "close of a new connection": ((respond_in_turn(b""),), 1),
    "second close": ((closing, respond_in_turn(b"")), 3),
    "part of a head": ((respond_in_turn(http_response(), b"H"),), 2),
    "interim": ((respond_in_turn(http_response(), b"HTTP/1.1 100 Continue\r\n\r\n"),), 2),
}
"""Scripts of the server, and how many requests it gets."""


@pytest.mark.parametrize(("scripts", "requests"), ENDS.values(), ids=ENDS)
async def test_request_is_sent_again_once_after_a_close_without_a_byte_of_a_response(
    endpoint_at: EndpointAt, scripts: tuple[Script, ...], requests: int
) -> None:
    async with ScriptedServer(*scripts, always_respond(http_response())) as server:
        endpoint = endpoint_at(server.url)
        if requests > 1:
            await _ask(endpoint)
        error = await _error(_ask(endpoint))
        assert error.message == f"{server.url} closed the connection before it responded"
        assert len(server.requests) == requests


async def test_server_that_refuses_the_second_connection_is_unreachable(
    endpoint_at: EndpointAt,
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        server._server.close()

    async with ScriptedServer(script, host=HOST) as server:
        endpoint = endpoint_at(server.url)
        await _ask(endpoint)
        error = await _error(_ask(endpoint))
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


YES = always_respond(http_response(b"yes"))
WRITE = RequestTemplate("DELETE", "/x", ())
"""A request that must not be sent again once a byte of it was written."""
DELETE = make_request(method="DELETE")


async def test_close_that_the_event_loop_has_not_seen_is_noticed_by_send(
    serve: Serve, endpoint_at: EndpointAt
) -> None:
    async with serve(YES, YES) as server:
        endpoint = endpoint_at(server.url)
        assert await ask(endpoint, DELETE) == b"yes"
        server.connections[0].shutdown_write_below_tls()
        assert await ask(endpoint, DELETE) == b"yes"
        assert [len(each.requests) for each in server.connections] == [1, 1]


async def _streamed() -> AsyncIterator[bytes]:
    yield b"body"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["large", "streamed"])
async def test_head_is_written_in_the_iteration_in_which_the_connection_was_checked(
    endpoint_at: EndpointAt, is_streamed: bool
) -> None:
    async def received_by_next_iteration() -> bytes:
        await asyncio.sleep(0)
        return sock.recv(4096)

    loop = asyncio.get_running_loop()
    body = _streamed() if is_streamed else (bytes(1_000_000),)
    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        endpoint = endpoint_at("http://{}:{}".format(*listening.getsockname()))
        calling = asyncio.create_task(ask(endpoint, DELETE))
        async with asyncio.timeout(5):
            sock, _ = await loop.sock_accept(listening)
        assert await loop.sock_recv(sock, 4096)
        await loop.sock_sendall(sock, http_response(b"yes"))
        assert await calling == b"yes"
        # It runs in the iteration after the first step of the call, before all else.
        receiving = asyncio.create_task(received_by_next_iteration())
        calling = asyncio.create_task(ask(endpoint, make_request(body)))
        assert (await receiving).startswith(b"POST /x HTTP/1.1\r\n")
        calling.cancel()
        sock.close()


async def test_all_stale_connections_are_passed_over(endpoint_at: EndpointAt) -> None:
    async def responds_to_all_at_once(connection: Connection) -> None:
        while True:
            await connection.request()
            await together.wait()
            await connection.send(http_response(b"yes"))

    together = asyncio.Barrier(3)
    async with ScriptedServer(*[responds_to_all_at_once] * 3, YES) as server:
        endpoint = endpoint_at(server.url)
        await asyncio.gather(*(ask(endpoint, DELETE) for _ in range(3)))
        for connection in server.connections:
            connection.shutdown_write_below_tls()
        assert await ask(endpoint, DELETE) == b"yes"
        assert [len(each.requests) for each in server.connections] == [1, 1, 1, 1]


async def test_connection_that_is_freed_after_its_close_goes_to_no_waiting_request(
    endpoint_at: EndpointAt,
) -> None:
    async with ScriptedServer(YES, YES) as server:
        endpoint = endpoint_at(server.url)
        first, second = RecordingReceiver(), RecordingReceiver()
        sent = send_reserved(endpoint, first, WRITE)
        await first.wait()
        waiting = send_reserved(endpoint, second, WRITE)
        server.connections[0].shutdown_write_below_tls()
        sent.close()
        await second.wait()
        assert (second.body, second.errors) == (b"yes", [])
        assert [len(each.requests) for each in server.connections] == [1, 1]
        waiting.close()
