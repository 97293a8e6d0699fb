"""A connection that the server has closed before the request carries none."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from gateway.upstream.transport import RequestTemplate
from tests.support.addresses import HOST
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond
from tests.upstream.calls import ask, make_request
from tests.upstream.endpoints import EndpointAt, Serve
from tests.upstream.receivers import RecordingReceiver, try_send

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


async def test_close_that_the_event_loop_has_not_seen_is_noticed_by_a_reserved_connection(
    serve: Serve, endpoint_at: EndpointAt
) -> None:
    async with serve(YES, YES) as server:
        endpoint, receiver = endpoint_at(server.url), RecordingReceiver()
        await ask(endpoint, DELETE)
        reserved = endpoint.try_reserve()
        assert reserved is not None
        # As while the gateway converts the request.
        server.connections[0].shutdown_write_below_tls()
        reserved.send(WRITE, b"", (), receiver)
        await receiver.wait()
        assert (receiver.body, receiver.errors) == (b"yes", [])
        assert [len(each.requests) for each in server.connections] == [1, 1]
        reserved.close()


async def test_reset_that_the_event_loop_has_not_seen_is_noticed(endpoint_at: EndpointAt) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        endpoint = endpoint_at("http://{}:{}".format(*listening.getsockname()))
        for _ in range(2):
            calling = asyncio.create_task(ask(endpoint, DELETE))
            async with asyncio.timeout(5):
                sock, _ = await loop.sock_accept(listening)
            assert await loop.sock_recv(sock, 4096)
            await loop.sock_sendall(sock, http_response(b"yes"))
            assert await calling == b"yes"
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


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
        sent = try_send(endpoint, WRITE, (), b"", first)
        assert sent is not None
        await first.wait()
        waiting = try_send(endpoint, WRITE, (), b"", second)
        assert waiting is not None
        server.connections[0].shutdown_write_below_tls()
        sent.close()
        await second.wait()
        assert (second.body, second.errors) == (b"yes", [])
        assert [len(each.requests) for each in server.connections] == [1, 1]
        waiting.close()
