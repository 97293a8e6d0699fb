"""Clients that do not read their responses, or a little at a time, keep no other client out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from gateway.system.buffers import (
    PROGRESS,
    STALLED,
    BodyProgress,
    BufferAccount,
    BufferShare,
    ReservedBytes,
)
from gateway.system.sockets.connection import UnsentOutput
from tests.listener.hostile.slow_clients import (
    GREEDY,
    GRPC,
    INNOCENT,
    SMALL,
    SlowClient,
    SlowStreams,
    gateway_with_little_room,
    leave_no_room,
    until_settled,
)
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.proto_file import message_class
from tests.support.http2_client import connect_http2
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import INFER, binary_response, json_request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import Connection, ScriptedServer

MEDIUM = bytes(200_000)
LARGE = 16 * 2**20
"""Bytes of a response that does not fit into the buffers of two sockets."""

REASON = "the client did not read its response"


class Http1Readers(SlowClient):
    """Responses over HTTP/1.1."""

    async def begin(self, count: int) -> None:
        self._connections: list[RawClient] = []
        for _ in range(count // 3):
            client = await self.clients.enter_async_context(
                connect(self.url, own_host=self.own_host)
            )
            await client.send(request("GET", "/v2/large"))
            assert (await client.head()).status == 200
            self._connections.append(client)

    async def go_on(self) -> None:
        for client in self._connections:
            with suppress(ConnectionError):
                await client.reader.read(1)


class Http2Readers(SlowStreams):
    """Responses over HTTP/2, whose windows are closed, or almost."""

    per_connection = 20
    window = 0
    target = "/v2/medium"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None

    async def begin(self, count: int) -> None:
        for _ in range(count // self.per_connection):
            client = await self.clients.enter_async_context(
                connect_http2(self.url, self.own_host, initial_window_size=self.window)
            )
            client.reads = False
            self.connections.append(client)
            for _ in range(self.per_connection):
                method = "GET" if self.body is None else "POST"
                await client.start(method, self.target, self.body, self.headers)
        for client in self.connections:
            replies = client.replies.values()
            await client.until(lambda replies=replies: all(each.headers for each in replies))

    async def go_on(self) -> None:
        for client, stream in self.open_streams:
            client.open_window(1, stream)


class BufferedReaders(Http2Readers):
    """Responses that are there as a whole."""

    window = 100  # else it is streamed
    target = INFER
    headers = (("content-type", "application/json"),)
    body = json_request(1.5)


class GrpcReaders(Http2Readers):
    """Responses over gRPC."""

    target = f"/{SERVICE}/ModelInfer"
    headers = GRPC

    async def begin(self, count: int) -> None:
        message = message_class("ModelInferRequest")(model_name="m").SerializeToString()
        self.body = b"\0" + len(message).to_bytes(4) + message
        await super().begin(count)


COUNT = 60
RESPONSES = {
    "medium": (http_response(MEDIUM),),
    "large": (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LARGE,
        *[bytes(2**16)] * (LARGE // 2**16),
    ),
}


@asynccontextmanager
async def gateway_of_large_responses() -> AsyncIterator[RunningGateway]:
    async with gateway_with_little_room(binary_response(MEDIUM), **RESPONSES) as gateway:
        yield gateway


KINDS = [Http1Readers, Http2Readers, BufferedReaders, GrpcReaders]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_client_that_reads_too_slowly_keeps_nobody_out(
    kind: type[SlowClient], reads: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    async with gateway_of_large_responses() as gateway, AsyncExitStack() as clients:
        greedy = kind(gateway.url, GREEDY, clients)
        await greedy.begin(COUNT)
        await until_settled(gateway)
        leave_no_room(gateway)
        async with connect(gateway.url, None, INNOCENT) as innocent:
            for _ in range(5):
                leave_no_room(gateway)
                async with asyncio.timeout(5):
                    # Whoever has just read something is not slow yet.
                    while (await innocent.call("POST", "/v2/innocent", SMALL)).status != 200:
                        await asyncio.sleep(0.05)
                        if reads:
                            await greedy.go_on()
    assert REASON in capfd.readouterr().err


@pytest.mark.parametrize("kind", [Http2Readers, GrpcReaders])
async def test_all_clients_behind_one_address_lose_no_response_that_they_read(
    kind: type[Http2Readers],
) -> None:
    async with gateway_of_large_responses() as gateway, AsyncExitStack() as clients:
        slow = kind(gateway.url, GREEDY, clients)
        await slow.begin(COUNT)
        await until_settled(gateway)
        leave_no_room(gateway)
        async with connect(gateway.url, None, GREEDY) as newcomer:
            for _ in range(10):
                await slow.go_on()
                assert (await newcomer.call("POST", "/v2/x", SMALL)).status == 503
        assert not slow.ended


@pytest.mark.needs_source  # compiled code takes no double of a connection
def test_what_a_client_reads_counts_for_all_responses_of_its_connection() -> None:
    """Over HTTP/2 it would hold 100 of them by reading as fast as for one."""
    connection = WaitingConnection()
    output = UnsentOutput(connection, BodyProgress())  # type: ignore[arg-type]
    connection.unread -= 10 * PROGRESS - 1
    assert output.progress.slowness(time.monotonic()) >= STALLED
    connection.unread -= 1
    assert output.progress.slowness(time.monotonic()) < STALLED


class WaitingConnection:
    """A connection whose client has yet to read ten responses."""

    def __init__(self) -> None:
        self.unread = LARGE
        self.reserved = ReservedBytes()
        self.buffers = BufferShare(BufferAccount())
        for _ in range(10):
            self.buffers.open_stream(UnsentOutput(self, BodyProgress()))  # type: ignore[arg-type]

    def unread_bytes(self) -> int:
        return self.unread


async def test_response_of_a_slow_server_goes_on() -> None:
    go_on = asyncio.Event()

    async def respond(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(MEDIUM)[:-100_000])
        await go_on.wait()
        await connection.send(MEDIUM[:100_000])
        await connection.wait_for_close()

    async with (
        ScriptedServer(respond) as server,
        running_gateway(server.url) as gateway,
        AsyncExitStack() as clients,
    ):
        client = await clients.enter_async_context(connect_http2(gateway.url, GREEDY))
        streams = [await client.start("GET", "/v2/x") for _ in range(20)]
        readers = [
            await clients.enter_async_context(connect(gateway.url, own_host=GREEDY))
            for _ in range(20)
        ]
        for reader in readers:
            await reader.send(request("GET", "/v2/x"))
        await client.until(lambda: all(client.replies[each].body for each in streams))
        await until_all_wait(gateway)
        leave_no_room(gateway)
        async with connect(gateway.url, None, INNOCENT) as innocent:
            for _ in range(10):
                assert (await innocent.call("POST", "/v2/x", SMALL)).status == 503
        go_on.set()
        for stream in streams:
            assert len((await client.response(stream)).body) == len(MEDIUM)
        for reader in readers:
            assert len((await reader.read_response()).body) == len(MEDIUM)


async def until_all_wait(gateway: RunningGateway) -> None:
    """Wait until all has been sent, and only bodies of servers are in transit."""
    buffers = gateway.gateway.listener.buffers
    await until(lambda: buffers.streams == 40 and not buffers.buffered)
