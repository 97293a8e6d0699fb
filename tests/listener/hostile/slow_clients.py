"""Clients whose calls go on a little at a time, and gateways without room for another call."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from gateway.system.buffers import MIN_STREAM_BYTES
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http2_client import Http2Client, Http2Reply
from tests.support.http_messages import http_response
from tests.support.inference_messages import INFER, binary_response
from tests.support.servers.scripted_server import Connection, ScriptedServer

GREEDY, USUAL, INNOCENT = "127.0.0.2", "127.0.0.3", "127.0.0.4"

SMALL = bytes(20_000)
"""A request's body for which there is no room."""

GRPC = (("content-type", "application/grpc"), ("te", "trailers"))


class SlowClient(ABC):
    """Calls of one client, which go on a little at a time, or not at all."""

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


class SlowStreams(SlowClient):
    """Calls over HTTP/2."""

    def __init__(self, url: str, own_host: str, clients: AsyncExitStack) -> None:
        super().__init__(url, own_host, clients)
        self.connections: list[Http2Client] = []

    @property
    def streams(self) -> Iterator[tuple[Http2Client, int, Http2Reply]]:
        """Give each stream with its connection and its response."""
        for client in self.connections:
            for stream, reply in client.replies.items():
                yield client, stream, reply

    @property
    def open_streams(self) -> Iterator[tuple[Http2Client, int]]:
        """Give those that go on."""
        for client, stream, reply in self.streams:
            if not (reply.ended or reply.reset is not None):
                yield client, stream

    @property
    def ended(self) -> int:
        """Return how many have ended."""
        return len(list(self.streams)) - len(list(self.open_streams))


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
