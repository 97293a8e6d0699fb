"""Idle streams end when the gateway stops or has new settings; others go on."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway.proxy.grpc import idle_streams
from gateway.proxy.grpc.idle_streams import IdleStreamCheck
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import SERVICE, grpc_client
from tests.support.grpc.proto_file import message_class
from tests.support.servers.grpc_server import GrpcServer, grpc_server, stream_identity

STREAM = f"/{SERVICE}/ModelStreamInfer"
REQUEST = bytes(message_class("ModelInferRequest")(model_name="m", id="7").SerializeToString())


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> list[IdleStreamCheck]:
    """Make idle streams end after a twentieth of a second; return the checks that were made."""
    monkeypatch.setattr(idle_streams, "IDLE_SECONDS", 0.05)
    made: list[IdleStreamCheck] = []
    check = IdleStreamCheck._check

    def count(self: IdleStreamCheck) -> None:
        made.append(self)
        check(self)

    monkeypatch.setattr(IdleStreamCheck, "_check", count)
    return made


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    """A server that returns the inputs of a request as outputs."""
    with grpc_server() as running:
        yield running


class Stream:
    """A stream of a client, which sends a message when it is told to."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call = channel.stream_stream(STREAM)(iter(self._requests.get, None), timeout=20)

    def send(self, message: bytes | None = REQUEST) -> None:
        """Send a message; None ends the request."""
        self._requests.put(message)

    async def receive(self) -> bytes:
        """Wait for the next message of the server."""
        return bytes(await asyncio.to_thread(next, self.call))

    async def error(self) -> tuple[grpc.StatusCode, str]:
        """Wait for the end, which must be an error."""
        with pytest.raises(grpc.RpcError):
            await self.receive()
        return self.call.code(), self.call.details()

    def close(self) -> None:
        """Cancel the call, and end its thread."""
        self.send(None)
        self.call.cancel()


@asynccontextmanager
async def open_stream(server: GrpcServer) -> AsyncIterator[tuple[RunningGateway, Stream]]:
    async with running_gateway(server.url) as gateway, grpc_client(gateway.url) as client:
        stream = Stream(client.channel)
        try:
            yield gateway, stream
        finally:
            stream.close()


async def _stop(gateway: RunningGateway) -> None:
    gateway.gateway.begin_draining()


async def _reload(gateway: RunningGateway) -> None:
    await gateway.gateway.reload(gateway.gateway.settings)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [(_stop, "the gateway is stopping"), (_reload, "the gateway has new settings")],
)
@pytest.mark.parametrize("has_message", [False, True])
async def test_idle_stream_ends_with_unavailable(
    cause: Callable[[RunningGateway], Any], reason: str, has_message: bool, server: GrpcServer
) -> None:
    async with open_stream(server) as (gateway, stream):
        if has_message:
            stream.send()
            await stream.receive()
        else:
            await until(lambda: gateway.gateway.listener.requests)
        await cause(gateway)
        expected = (grpc.StatusCode.UNAVAILABLE, f"{reason}, and nothing moved on this stream")
        assert await stream.error() == expected
        await gateway.until_idle()
        if has_message:
            (state,) = gateway.pool.snapshot()
            assert state.last_error is None  # the server did nothing wrong


@pytest.mark.parametrize("has_ended", [False, True])
async def test_stream_with_a_message_in_flight_goes_on(
    has_ended: bool, checks: list[IdleStreamCheck]
) -> None:
    may_respond = asyncio.Event()
    loop = asyncio.get_running_loop()

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for number, response in enumerate(stream_identity(requests, context)):
            if number:
                asyncio.run_coroutine_threadsafe(may_respond.wait(), loop).result()
            yield response

    with grpc_server(streams={"ModelStreamInfer": serve}) as server:
        async with open_stream(server) as (gateway, stream):
            stream.send()
            await stream.receive()
            stream.send()
            if has_ended:
                stream.send(None)
            gateway.gateway.begin_draining()
            checks.clear()
            await until(lambda: len(checks) > 3)  # an idle one ends at the second
            may_respond.set()
            await stream.receive()


async def test_stream_goes_on_without_a_reason_to_end(
    server: GrpcServer, checks: list[IdleStreamCheck]
) -> None:
    async with open_stream(server) as (_, stream):
        stream.send()
        await stream.receive()
        await until(lambda: len(checks) > 3)
        stream.send()
        await stream.receive()
