"""Clients whose calls go on a little at a time, and gateways without room for another call."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from gateway.system.buffers import MIN_STREAM_BYTES
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http2_client import Headers, Http2Client, Http2Reply, connect_http2
from tests.support.http_messages import http_response, message, request
from tests.support.inference_messages import INFER, binary_response
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import Connection, ScriptedServer

GREEDY, USUAL, INNOCENT = "127.0.0.2", "127.0.0.3", "127.0.0.4"

SMALL = bytes(20_000)
"""A request's body for which there is no room."""

GRPC = (("content-type", "application/grpc"), ("te", "trailers"))


class SlowClient(ABC):
    """Calls of one client, which go on a little at a time, or not at all."""

    step = b"x"
    """What is sent of each at a time, or as many bytes are read."""

    def __init__(self, url: str, own_host: str, clients: AsyncExitStack) -> None:
        self.url = url
        self.own_host = own_host
        self.clients = clients

    @abstractmethod
    async def begin(self, count: int) -> None:
        """Begin so many calls."""

    @abstractmethod
    async def go_on(self) -> None:
        """Send or read a little of each call that goes on."""

    @abstractmethod
    def statuses(self) -> list[int]:
        """Return the statuses of those that have ended, 0 without a response."""


Kind = type[SlowClient]


class Http1Uploads(SlowClient):
    """Bodies over HTTP/1.1, each on a connection of its own."""

    target, length, start = "/v2/x", 200_000, bytes(1000)

    def __init__(self, url: str, own_host: str, clients: AsyncExitStack) -> None:
        super().__init__(url, own_host, clients)
        self._responses: dict[RawClient, asyncio.Task[int]] = {}

    async def begin(self, count: int) -> None:
        head = message(
            f"POST {self.target} HTTP/1.1", {"Host": "x", "Content-Length": str(self.length)}
        )
        for _ in range(count):
            client = await self.clients.enter_async_context(connect(self.url, None, self.own_host))
            await client.send(head, self.start)
            reading = self._responses[client] = asyncio.create_task(_status(client))
            self.clients.callback(reading.cancel)

    async def go_on(self) -> None:
        for client, response in self._responses.items():
            if not response.done():
                with suppress(ConnectionError):
                    await client.send(self.step)

    def statuses(self) -> list[int]:
        return [each.result() for each in self._responses.values() if each.done()]


async def _status(client: RawClient) -> int:
    try:
        line = await client.reader.readline()
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0


class Http1Readers(SlowClient):
    """Responses over HTTP/1.1: a third as many, as each is large."""

    async def begin(self, count: int) -> None:
        self._connections: list[RawClient] = []
        for _ in range(count // 3):
            client = await self.clients.enter_async_context(connect(self.url, None, self.own_host))
            await client.send(request("GET", "/v2/large"))
            assert (await client.head()).status == 200
            self._connections.append(client)

    async def go_on(self) -> None:
        for client in self._connections:
            with suppress(ConnectionError):
                await client.reader.read(1)

    def statuses(self) -> list[int]:
        return []


class Http2Calls(SlowClient):
    """Calls over HTTP/2, with many on each connection."""

    per_connection = 40
    target = "/v2/x"
    headers: Headers = ()
    window: int | None = None

    def __init__(self, url: str, own_host: str, clients: AsyncExitStack) -> None:
        super().__init__(url, own_host, clients)
        self.connections: list[Http2Client] = []

    async def begin(self, count: int) -> None:
        while count > 0:
            settings = {} if self.window is None else {"initial_window_size": self.window}
            connecting = connect_http2(self.url, self.own_host, **settings)
            client = await self.clients.enter_async_context(connecting)
            self.connections.append(client)
            for _ in range(min(count, self.per_connection)):
                await self.begin_call(client)
            count -= self.per_connection

    @abstractmethod
    async def begin_call(self, client: Http2Client) -> None:
        """Begin one call."""

    @property
    def streams(self) -> Iterator[tuple[Http2Client, int, Http2Reply]]:
        """Give each stream with its connection and its response."""
        for client in self.connections:
            for stream, reply in client.replies.items():
                yield client, stream, reply

    @property
    def open_streams(self) -> list[tuple[Http2Client, int]]:
        """Give those that go on."""
        return [(client, stream) for client, stream, reply in self.streams if not _has_ended(reply)]

    def statuses(self) -> list[int]:
        return [reply.status or 0 for _, _, reply in self.streams if _has_ended(reply)]


def _has_ended(reply: Http2Reply) -> bool:
    return reply.ended or reply.reset is not None


class Http2Uploads(Http2Calls):
    """Bodies that begin, and go on."""

    headers: Headers = (("content-length", "200000"),)
    start = b"x"

    async def begin_call(self, client: Http2Client) -> None:
        stream = client.send_headers("POST", self.target, self.headers)
        await client.send_data(stream, self.start, end_stream=False)

    async def go_on(self) -> None:
        for client, stream in self.open_streams:
            await client.send_data(stream, self.step, end_stream=False)


class Http2Readers(Http2Calls):
    """Responses whose windows are closed, or almost."""

    per_connection = 20
    window: int | None = 0
    target = "/v2/medium"
    body: bytes | None = None

    async def begin(self, count: int) -> None:
        await super().begin(count)
        for client in self.connections:
            replies = client.replies.values()
            await client.until(lambda replies=replies: all(each.headers for each in replies))

    async def begin_call(self, client: Http2Client) -> None:
        client.reads = False
        method = "GET" if self.body is None else "POST"
        await client.start(method, self.target, self.body, self.headers)

    async def go_on(self) -> None:
        for client, stream in self.open_streams:
            client.open_window(len(self.step), stream)


@asynccontextmanager
async def gateway_with_little_room(
    response: bytes = binary_response(bytes(4)), **others: tuple[bytes, ...]
) -> AsyncIterator[RunningGateway]:
    """Run a gateway whose server gives this response to each infer request.

    ``others`` are the parts of the responses at /v2/NAME.
    """

    async def read(connection: Connection) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                target = (await connection.request()).head.target
                ok = (response if target == INFER else http_response(b"ok"),)
                await connection.send(*others.get(target.removeprefix("/v2/"), ok))

    async with ScriptedServer(read) as server, running_gateway(server.url) as gateway:
        yield gateway


def leave_no_room(gateway: RunningGateway) -> None:
    """Leave none for a call beside what there is."""
    buffers = gateway.gateway.listener.buffers
    buffers.set_limit(buffers.limit - buffers.free + MIN_STREAM_BYTES // 4)


async def until_settled(gateway: RunningGateway) -> None:
    """Wait until nothing moves any more."""
    buffers = gateway.gateway.listener.buffers
    seen = [0] * 20

    def is_settled() -> bool:
        seen.append(buffers.total)
        return buffers.total > 0 and len(set(seen[-20:])) == 1

    await until(is_settled)
