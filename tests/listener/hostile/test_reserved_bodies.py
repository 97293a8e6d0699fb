"""A few calls that are buffered as a whole, with a slow client, keep no other client out."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from contextlib import AsyncExitStack, suppress

import pytest

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
    until_settled,
)
from tests.support.gateway import RunningGateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.proto_file import message_class
from tests.support.http2_client import connect_http2
from tests.support.http_messages import message, request
from tests.support.inference_messages import INFER, binary_response, json_request
from tests.support.raw_client import RawClient, connect

COUNT = 6
"""Large bodies of one client: fewer than are usual."""

LENGTH = 8_000_000
HELD = 2**20
"""Bytes of each that come at once."""
STEP = 600
"""Bytes that come at each step: enough for a body that streams through."""

NUMBERS = b"1.5," * (HELD // 4)
JSON = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[' + NUMBERS


def grpc_start() -> bytes:
    content = message_class("ModelInferRequest")(model_name="m").SerializeToString()
    field = b"\x3a" + b"\x80\x92\xf4\x01"  # raw_input_contents of 4,000,000 bytes
    size = len(content) + len(field) + 4_000_000
    return b"\0" + size.to_bytes(4) + bytes(content) + field


class LargeBodies(SlowClient):
    """Large bodies of one client, which go on slowly."""

    step = STEP
    """Bytes of each that go on at a time."""

    @property
    @abstractmethod
    def ended(self) -> int:
        """Return how many were refused."""


class Http1LargeBodies(LargeBodies):
    """JSON bodies over HTTP/1.1."""

    async def begin(self, count: int) -> None:
        self._responses: dict[RawClient, asyncio.Task[bytes]] = {}
        headers = {"Host": "gateway", "Content-Length": str(LENGTH)}
        for _ in range(count):
            body = await self.clients.enter_async_context(connect(self.url, None, self.own_host))
            await body.send(message(f"POST {INFER} HTTP/1.1", headers), JSON)
            reading = self._responses[body] = asyncio.create_task(body.reader.readline())
            self.clients.callback(reading.cancel)

    async def go_on(self) -> None:
        for body, response in self._responses.items():
            if not response.done():
                with suppress(ConnectionError):
                    await body.send(NUMBERS[: self.step])

    @property
    def ended(self) -> int:
        return sum(response.done() for response in self._responses.values())


class Http2LargeBodies(SlowStreams, LargeBodies):
    """JSON bodies over one HTTP/2 connection."""

    target = INFER
    headers: tuple[tuple[str, str], ...] = (("content-length", str(LENGTH)),)
    start = JSON

    async def begin(self, count: int) -> None:
        client = await self.clients.enter_async_context(connect_http2(self.url, self.own_host))
        self.connections.append(client)
        for _ in range(count):
            stream = client.send_headers("POST", self.target, self.headers)
            await client.send_data(stream, self.start, end_stream=False)

    async def go_on(self) -> None:
        for client, stream in self.open_streams:
            await client.send_data(stream, NUMBERS[: self.step], end_stream=False)


class GrpcLargeBodies(Http2LargeBodies):
    """Messages over gRPC, which the gateway converts as a whole."""

    target = f"/{SERVICE}/ModelInfer"
    headers = GRPC
    start = grpc_start() + bytes(HELD)


class UnreadCalls(Http2LargeBodies):
    """Calls whose responses the client reads slowly: they hold what is buffered of either side."""

    body = json.dumps(
        {
            "inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.5]}],
            "outputs": [{"name": "OUT0", "parameters": {"binary_data": True}}, {"name": "OUT1"}],
        }
    ).encode()

    async def begin(self, count: int) -> None:
        client = await self.clients.enter_async_context(
            connect_http2(self.url, self.own_host, initial_window_size=0)
        )
        self.connections.append(client)
        for _ in range(count):
            await client.start("POST", INFER, self.body)

    async def go_on(self) -> None:
        for client, stream in self.open_streams:
            client.open_window(self.step, stream)


ARRIVING = [Http1LargeBodies, Http2LargeBodies, GrpcLargeBodies]
RESPONSE = binary_response(bytes(HELD), bytes(4))


async def fill(gateway: RunningGateway, bodies: LargeBodies) -> None:
    """Begin the bodies, and leave no room for a call beside what they hold."""
    await bodies.begin(COUNT)
    buffers = gateway.gateway.listener.buffers
    await until(lambda: buffers.reserved >= 0.9 * COUNT * HELD)
    await until_settled(gateway)
    leave_no_room(gateway)


@pytest.mark.parametrize("kind", [*ARRIVING, UnreadCalls])
async def test_client_of_a_few_large_bodies_keeps_nobody_out(kind: type[LargeBodies]) -> None:
    async with gateway_with_little_room(RESPONSE) as gateway, AsyncExitStack() as clients:
        usual = await clients.enter_async_context(connect(gateway.url, None, USUAL))
        upload = request("POST", INFER, json_request(*[1.5] * 100_000))
        await usual.send(upload[:-100])
        greedy = kind(gateway.url, GREEDY, clients)
        await fill(gateway, greedy)
        async with connect(gateway.url, None, INNOCENT) as innocent:
            for _ in range(4):
                async with asyncio.timeout(5):
                    # Whoever has just sent something is not slow yet.
                    while (await innocent.call("POST", "/v2/x", SMALL)).status != 200:
                        await asyncio.sleep(0.05)
                        await greedy.go_on()
                leave_no_room(gateway)
        await until(lambda: greedy.ended == 4)
        gateway.gateway.listener.buffers.set_limit(2**30)  # its response takes room as well
        assert (await usual.ask(upload[-100:])).status == 200


@pytest.mark.parametrize("kind", ARRIVING)
async def test_all_clients_behind_one_address_lose_no_large_body_that_goes_on(
    kind: type[LargeBodies],
) -> None:
    async with gateway_with_little_room(RESPONSE) as gateway, AsyncExitStack() as clients:
        slow = kind(gateway.url, GREEDY, clients)
        await fill(gateway, slow)
        slow.step = 1  # so little that none needs more room
        async with connect(gateway.url, None, GREEDY) as newcomer:
            for _ in range(30):
                await slow.go_on()
                assert (await newcomer.call("POST", "/v2/x", SMALL)).status == 503
                leave_no_room(gateway)
                await asyncio.sleep(0.05)
        assert not slow.ended
