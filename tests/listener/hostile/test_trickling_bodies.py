"""Bodies that come a byte at a time keep no other client out."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from contextlib import AsyncExitStack, suppress

import pytest

from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.system.buffers import MANY_STREAMS, MIN_STREAM_BYTES, PROGRESS, STALLED
from tests.listener.hostile.slow_clients import (
    GREEDY,
    GRPC,
    INNOCENT,
    SMALL,
    USUAL,
    SlowClient,
    SlowStreams,
    gateway_with_little_room,
    leave_no_room,
)
from tests.listener.running_listener import echo, running_listener
from tests.support.gateway import RunningGateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.proto_file import message_class
from tests.support.http2_client import Http2Client, connect_http2
from tests.support.http_messages import request
from tests.support.inference_messages import INFER, json_request
from tests.support.raw_client import RawClient, connect

ROOM = 64
"""Bodies in transit for which there is room."""

LARGE = bytes(200_000)
"""A body that is not buffered as a whole."""


class Bodies(SlowClient):
    """Bodies of one client that begin, and go on a byte at a time."""

    @abstractmethod
    def statuses(self) -> list[int]:
        """Return the statuses of those that have ended, 0 if the connection ended."""


class Http1Bodies(Bodies):
    """Bodies over HTTP/1.1, each on a connection of its own."""

    def __init__(self, url: str, own_host: str, clients: AsyncExitStack) -> None:
        super().__init__(url, own_host, clients)
        self._bodies: list[RawClient] = []
        self._responses: dict[RawClient, asyncio.Task[int]] = {}

    async def begin(self, count: int) -> None:
        for _ in range(count):
            body = await self.clients.enter_async_context(connect(self.url, None, self.own_host))
            await body.send(request("POST", "/v2/x", LARGE)[:-199_000])
            self._bodies.append(body)
            reading = self._responses[body] = asyncio.create_task(self._status(body))
            self.clients.callback(reading.cancel)

    async def go_on(self) -> None:
        for body in self._bodies:
            if not self._responses[body].done():
                with suppress(ConnectionError):
                    body.send_nowait(b"x")

    def statuses(self) -> list[int]:
        return [each.result() for each in self._responses.values() if each.done()]

    async def _status(self, body: RawClient) -> int:
        try:
            line = await body.reader.readline()
            return int(line.split()[1]) if line else 0
        except ConnectionError:
            return 0


class Http2Bodies(SlowStreams, Bodies):
    """Bodies over HTTP/2, with many on each connection."""

    per_connection = 40
    target = "/v2/x"
    headers: tuple[tuple[str, str], ...] = (("content-length", "200000"),)
    start = b"x"

    async def begin(self, count: int) -> None:
        for first in range(0, count, self.per_connection):
            client = await self.clients.enter_async_context(connect_http2(self.url, self.own_host))
            self.connections.append(client)
            for _ in range(first, min(count, first + self.per_connection)):
                stream = client.send_headers("POST", self.target, self.headers)
                await client.send_data(stream, self.start, end_stream=False)

    async def go_on(self) -> None:
        for client, stream in self.open_streams:
            client.h2.send_data(stream, b"x")
            client.flush()

    def statuses(self) -> list[int]:
        return [reply.status for _, _, reply in self.streams if reply.ended]


class GrpcBodies(Http2Bodies):
    """Streams of gRPC, with few on each connection; they may be silent for long."""

    per_connection = MANY_STREAMS
    target = f"/{SERVICE}/ModelStreamInfer"
    headers = GRPC
    start = b"\0\0\0\0\x10"

    async def go_on(self) -> None:
        pass


async def fill(gateway: RunningGateway) -> None:
    """Leave no room for a call beside the bodies, all of which are admitted first."""
    buffers = gateway.gateway.listener.buffers
    await until(lambda: buffers.streams == ROOM and not buffers.buffered)
    leave_no_room(gateway)


def infer_message() -> bytes:
    message = message_class("ModelInferRequest")(model_name="m")
    message.inputs.add(name="IN", datatype="FP32", shape=[100_000])
    message.raw_input_contents.append(bytes(400_000))
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("kind", [Http1Bodies, Http2Bodies, GrpcBodies])
async def test_client_of_many_trickling_bodies_keeps_nobody_out(kind: type[Bodies]) -> None:
    async with gateway_with_little_room() as gateway, AsyncExitStack() as clients:
        usual = [
            await clients.enter_async_context(connect(gateway.url, None, USUAL)) for _ in range(4)
        ]
        upload = request("POST", "/v2/upload", LARGE)
        for client in usual:
            await client.send(upload[:-100])
        greedy = kind(gateway.url, GREEDY, clients)
        await greedy.begin(ROOM - len(usual))
        await fill(gateway)
        async with connect(gateway.url, None, INNOCENT) as innocent:
            for _ in range(10):
                await greedy.go_on()
                reply = await innocent.call("POST", "/v2/innocent", SMALL)
                assert reply.status == 200
                leave_no_room(gateway)
        await until(lambda: len(greedy.statuses()) == 10)
        assert set(greedy.statuses()) == {200 if kind is GrpcBodies else 408}
        for client in usual:
            assert (await client.ask(upload[-100:])).status == 200


async def test_call_that_is_buffered_gets_the_room_of_trickling_bodies() -> None:
    """It takes more than a body in transit counts."""
    async with gateway_with_little_room() as gateway, AsyncExitStack() as clients:
        greedy = Http2Bodies(gateway.url, GREEDY, clients)
        await greedy.begin(ROOM)
        await fill(gateway)
        async with connect(gateway.url, None, INNOCENT) as innocent:
            await innocent.send(request("POST", INFER, json_request(*[1.5] * 100_000)))
            assert (await innocent.read_response()).status == 200
        async with connect_http2(gateway.url, INNOCENT) as innocent_of_grpc:
            leave_no_room(gateway)
            message = infer_message()
            data = b"\0" + len(message).to_bytes(4) + message
            reply = await innocent_of_grpc.call("POST", f"/{SERVICE}/ModelInfer", data, GRPC)
            assert reply.status == 200
            assert ("grpc-status", "0") in reply.trailers


async def test_innocent_uploads_have_room_beside_trickling_bodies() -> None:
    async with gateway_with_little_room() as gateway, AsyncExitStack() as clients:
        greedy = Http1Bodies(gateway.url, GREEDY, clients)
        await greedy.begin(ROOM)
        await fill(gateway)
        upload = request("POST", "/v2/upload", LARGE)
        uploads = [
            await clients.enter_async_context(connect(gateway.url, None, INNOCENT))
            for _ in range(ROOM // 4)
        ]
        for client in uploads:
            await greedy.go_on()
            await client.send(upload[:-100])
        await until(lambda: len(greedy.statuses()) >= len(uploads))
        assert set(greedy.statuses()) == {408}
        for client in uploads:
            assert (await client.ask(upload[-100:])).status == 200


@pytest.mark.parametrize("kind", [Http1Bodies, Http2Bodies, GrpcBodies])
async def test_all_clients_behind_one_address_lose_no_body_that_trickles(
    kind: type[Bodies],
) -> None:
    """Such as behind a proxy: whoever comes next is refused, as nobody else holds more."""
    async with gateway_with_little_room() as gateway, AsyncExitStack() as clients:
        slow = kind(gateway.url, GREEDY, clients)
        await slow.begin(ROOM)
        await fill(gateway)
        async with connect(gateway.url, None, GREEDY) as newcomer:
            for _ in range(10):
                await slow.go_on()
                assert (await newcomer.call("POST", "/v2/x", SMALL)).status == 503
        assert not slow.statuses()
        assert gateway.gateway.listener.buffers.streams == ROOM


def block_event_loop(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("newcomer", [GREEDY, INNOCENT])
async def test_body_whose_bytes_the_gateway_has_not_read_goes_on(newcomer: str) -> None:
    """The bytes wait in the socket while something blocks the event loop."""
    budget = MemoryBudget(ROOM * MIN_STREAM_BYTES)
    uploads: list[Http2Client] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/newcomer":
            for upload in uploads:
                for stream in upload.replies:
                    upload.h2.send_data(stream, bytes(PROGRESS))
                upload.flush()
            block_event_loop(1.1 * STALLED)
            budget.check_admission(response.record.reserved.client)
        await echo(client, response)

    async with running_listener(handle) as running, AsyncExitStack() as clients:
        budget.buffers = running.listener.buffers
        for _ in range(4):
            upload = await clients.enter_async_context(connect_http2(running.url, GREEDY))
            for _ in range(ROOM // 4):
                await upload.send_data(
                    upload.send_headers("POST", "/"), bytes(PROGRESS), end_stream=False
                )
            uploads.append(upload)
        await until(lambda: running.listener.requests == ROOM)
        await until(lambda: not budget.buffers.buffered)
        budget.set_limit(ROOM * MIN_STREAM_BYTES)
        async with connect(running.url, None, newcomer) as other:
            assert (await other.call("GET", "/newcomer")).status == 200
        for upload in uploads:
            for stream in upload.replies:
                await upload.send_data(stream, b"")
                reply = await upload.response(stream)
                assert reply.status == 200
                assert reply.body.endswith(bytes(2 * PROGRESS))
