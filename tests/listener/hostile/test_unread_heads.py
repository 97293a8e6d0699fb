"""Clients that ask for responses without a body, and do not read them, get no more of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hpack import Encoder

from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http_messages import http_response
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import Connection, ScriptedServer

GREEDY, INNOCENT = "127.0.0.2", "127.0.0.4"

REQUESTS = 2_000
"""So many responses of 300 bytes each do not fit into the small buffers of two sockets."""
ID = "r" * 128
HEAD = f"HEAD /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Request-Id: {ID}\r\n\r\n".encode()

BLOCKED = 128 * 1024
"""Bytes that may wait in a transport: it is full at 64 KiB, and some responses may follow."""


@asynccontextmanager
async def small_gateway() -> AsyncIterator[RunningGateway]:
    async def respond(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(http_response(b"ok"))

    quiet = {"log": {"access": False}}
    async with (
        ScriptedServer(respond) as server,
        running_gateway(server.url, max_buffered_bytes="1MiB", general=quiet) as gateway,
    ):
        yield gateway


@asynccontextmanager
async def flood(gateway: RunningGateway, requests: bytes) -> AsyncIterator[socket.socket]:
    """Send requests over a connection with small buffers for responses."""
    connections = gateway.gateway.listener._connections
    others = set(connections)
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.bind((GREEDY, 0))
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, int(port)))
        await until(lambda: len(connections) > len(others))
        for each in set(connections) - others:
            served = each.transport.get_extra_info("socket")
            served.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sending = asyncio.create_task(loop.sock_sendall(sock, requests))
        try:
            yield sock
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def until_settled(sizes: list[int], gateway: RunningGateway) -> None:
    """Wait until as many responses wait as will; append how many bytes that were each time."""

    def is_settled() -> bool:
        connections = gateway.gateway.listener._connections
        sizes.append(sum(each.transport.get_write_buffer_size() for each in connections))
        return sizes[-1] > 0 and len(sizes) > 50 and len(set(sizes[-50:])) == 1

    await until(is_settled, 30)


async def test_pipelined_requests_wait_until_their_client_reads() -> None:
    requests = HEAD * REQUESTS + b"GET /last HTTP/1.1\r\nHost: x\r\n\r\n"
    async with (
        small_gateway() as gateway,
        flood(gateway, requests) as greedy,
        connect(gateway.url, own_host=INNOCENT) as innocent,
    ):
        sizes: list[int] = []
        await until_settled(sizes, gateway)
        assert max(sizes) < BLOCKED
        assert gateway.gateway.listener.buffers.buffered >= sizes[-1]
        assert (await innocent.call("GET", "/v2")).status == 200
        received = bytearray()
        async with asyncio.timeout(30):
            while not received.endswith(b"ok"):
                received += await asyncio.get_running_loop().sock_recv(greedy, 2**16)
        assert received.count(b"HTTP/1.1 200") == REQUESTS + 1
        assert received.count(ID.encode()) == REQUESTS


@pytest.mark.parametrize("connections", [1, 6])
async def test_responses_over_http2_count_and_stay_within_the_limit(connections: int) -> None:
    async with small_gateway() as gateway, AsyncExitStack() as clients:
        buffers = gateway.gateway.listener.buffers
        sizes: list[int] = []
        for _ in range(connections):
            await clients.enter_async_context(flood(gateway, _http2_requests(REQUESTS)))
        await until_settled(sizes, gateway)
        # The gateway notices a full limit once it has written the responses of one time slice.
        assert max(sizes) < buffers.limit + connections * BLOCKED
        assert buffers.buffered >= sizes[-1]
        async with connect(gateway.url, own_host=INNOCENT) as innocent:
            for _ in range(100):
                response = await innocent.call("POST", "/v2/x", bytes(20_000))
                if response.status == 200:
                    break
                await asyncio.sleep(0.05)  # whoever has just read something is not slow yet
            assert response.status == 200


def _http2_requests(count: int) -> bytes:
    """Return a connection's start, and requests whose responses name all of their headers."""
    no_table = b"\0\0\6\4\0\0\0\0\0" + b"\0\1\0\0\0\0"
    acknowledged = b"\0\0\0\4\1\0\0\0\0"
    fields = [
        (":method", "HEAD"),
        (":scheme", "http"),
        (":authority", "x"),
        (":path", "/v2/health/live"),
        ("x-request-id", ID),
    ]
    encoder = Encoder()
    first, later = encoder.encode(fields), encoder.encode(fields)  # which names the table's
    frames = [
        len(block).to_bytes(3) + b"\1\5" + (2 * number + 1).to_bytes(4) + block
        for number, block in enumerate([first] + [later] * (count - 1))
    ]
    return b"".join((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", no_table, acknowledged, *frames))
