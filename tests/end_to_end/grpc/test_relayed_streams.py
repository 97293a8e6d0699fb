"""Messages of a gRPC stream pass both ways as they arrive, however slow or broken a side is."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.proto_file import infer_request
from tests.support.http2_client import Http2Client, Http2Reply, connect_http2
from tests.support.servers.grpc_server import GrpcServer, grpc_server

GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
SMALL = infer_request()


def framed(*messages: bytes) -> bytes:
    return b"".join(b"\0" + len(each).to_bytes(4, "big") + each for each in messages)


def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


class Stream:
    """A stream of a client, with the messages that it has sent."""

    def __init__(self, client: Http2Client, metadata: list[tuple[str, str]]) -> None:
        self.client = client
        self.id = client.send_headers("POST", f"/{SERVICE}/ModelStreamInfer", GRPC + metadata)
        self.sent = b""

    @property
    def reply(self) -> Http2Reply:
        return self.client.replies[self.id]

    async def send(self, data: bytes) -> None:
        self.sent += data
        await self.client.send_data(self.id, data, end_stream=False)

    async def exchange(self, message: bytes = SMALL) -> None:
        """Send a message, and wait until it has come back."""
        await self.send(framed(message))
        await self.client.until(lambda: self.reply.body == self.sent)

    async def end(self) -> dict[str, str]:
        """Wait for the end of the response; return its trailers."""
        await self.client.response(self.id)
        return dict(self.reply.trailers or self.reply.headers)


@asynccontextmanager
async def opened(
    serve: Callable[..., Iterator[bytes]] = echo,
    metadata: tuple[tuple[str, str], ...] = (),
    **settings: Any,
) -> AsyncIterator[tuple[GrpcServer, RunningGateway, Stream]]:
    with grpc_server(streams={"ModelStreamInfer": serve}) as server:
        async with running_gateway(server.url, **settings) as gateway:
            async with connect_http2(gateway.url) as client:
                stream = Stream(client, list(metadata))
                await stream.exchange()
                await stream.exchange()
                yield server, gateway, stream
            await gateway.until_idle()


async def test_messages_come_back_whole_and_in_order_however_they_are_cut() -> None:
    chance = random.Random(1)
    async with opened() as (_, gateway, stream):
        sizes = [0, 4, 64, 4000, 20_000, 70_000, 1_000_000]
        rest = b"".join(
            framed(infer_request(values=chance.randbytes(chance.choice(sizes)), id=str(number)))
            for number in range(60)
        )
        while rest:
            cut = chance.choice([1, 3, 50, 500, 16_000, 200_000])
            await stream.send(rest[:cut])
            rest = rest[cut:]
        await stream.client.send_data(stream.id, b"")
        assert (await stream.end())["grpc-status"] == "0"
        assert stream.reply.body == stream.sent
    (state,) = gateway.pool.snapshot()
    assert state.last_error is None


async def test_client_that_reads_late_gets_all_and_the_gateway_buffers_little() -> None:
    sent = framed(*(infer_request(values=bytes(40_000), id=str(i)) for i in range(60)))

    def respond(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in range(2):
            yield next(requests)
        next(requests)
        for number in range(60):
            yield infer_request(values=bytes(40_000), id=str(number))

    async with opened(respond) as (_, gateway, stream):
        buffers = gateway.gateway.listener.buffers
        before = stream.reply.body
        stream.client.reads = False
        await stream.send(framed(SMALL))
        await until(lambda: buffers.buffered > 100_000)
        assert buffers.buffered < len(sent) // 2
        stream.client.reads = True
        stream.client.open_window(10**7)
        stream.client.open_window(10**7, stream.id)
        assert (await stream.end())["grpc-status"] == "0"
        assert stream.reply.body == before + sent


async def test_server_that_reads_late_gets_all_and_the_gateway_buffers_little() -> None:
    may_read = threading.Event()
    got: list[bytes] = []

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield next(requests)
        yield next(requests)
        may_read.wait(20)
        got.extend(requests)

    messages = [infer_request(values=bytes(40_000), id=str(number)) for number in range(60)]
    async with opened(serve) as (_, gateway, stream):
        buffers = gateway.gateway.listener.buffers
        try:
            for message in messages[:20]:
                await stream.send(framed(message))
            await stream.client.until_processed()
            assert buffers.buffered < 20 * 40_000
        finally:
            may_read.set()
        for message in messages[20:]:
            await stream.send(framed(message))
        await stream.client.send_data(stream.id, b"")
        assert (await stream.end())["grpc-status"] == "0"
    assert got == messages


@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_client_that_leaves_in_mid_message_leaves_nothing_behind(how: str) -> None:
    async with opened() as (_, gateway, stream):
        await stream.send(framed(SMALL) + framed(SMALL)[:-7])
        if how == "reset":
            stream.client.reset_stream(stream.id)
            assert (await stream.client.call("GET", "/v2/health/live")).status == 200
        else:
            await stream.client.close()
        await gateway.until_idle()


async def test_error_of_the_server_ends_a_stream_in_mid_message() -> None:
    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield next(requests)
        yield next(requests)
        next(requests)
        context.abort(grpc.StatusCode.INTERNAL, "out of memory")

    async with opened(serve) as (_, _, stream):
        await stream.send(framed(SMALL) + framed(SMALL)[:-7])
        trailers = await stream.end()
        assert (trailers["grpc-status"], trailers["grpc-message"]) == ("13", "out of memory")


@pytest.mark.parametrize(
    ("metadata", "limits", "code", "text"),
    [
        ((("grpc-timeout", "300m"),), {}, "4", "deadline"),
        ((), {"request_timeout": "300ms"}, "4", "request_timeout"),
        ((), {"idle_timeout": "300ms"}, "4", "idle_timeout"),
    ],
)
async def test_time_limits_hold_while_messages_pass(
    metadata: tuple[tuple[str, str], ...], limits: dict[str, str], code: str, text: str
) -> None:
    async with opened(echo, metadata, **limits) as (_, _, stream):
        if "idle_timeout" not in limits:
            while not stream.reply.ended:
                await stream.send(framed(SMALL))
                await stream.client.until(
                    lambda: stream.reply.ended or stream.reply.body == stream.sent
                )
        trailers = await stream.end()
        assert trailers["grpc-status"] == code
        assert text in trailers["grpc-message"]


async def test_minimum_rate_holds_while_a_large_message_passes() -> None:
    limits: dict[str, Any] = {"min_body_rate": "1MiB", "min_body_rate_grace": "100ms"}
    message = framed(infer_request(values=bytes(2_000_000)))
    with grpc_server() as server:
        async with (
            running_gateway(server.url, **limits) as gateway,
            connect_http2(gateway.url) as client,
        ):
            call = client.send_headers("POST", f"/{SERVICE}/ModelInfer", GRPC)
            await client.send_data(call, message[:200_000], end_stream=False)
            reply, position = client.replies[call], 200_000
            while not reply.ended and position < 250_000:
                piece = message[position : position + 10]
                await client.send_data(call, piece, end_stream=False)
                position += 10
                await client.until_processed()
            assert "min_body_rate" in dict(reply.trailers or reply.headers)["grpc-message"]


async def test_message_for_another_route_ends_the_stream_and_reaches_no_server() -> None:
    routes = [{"match": {"model": name}, "upstream": "servers"} for name in ("m", "other")]
    got: list[bytes] = []

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            got.append(request)
            yield request

    async with opened(serve, general={"routes": routes}) as (_, gateway, stream):
        await stream.send(framed(infer_request(model="other")))
        trailers = await stream.end()
        assert trailers["grpc-status"] == "3"
        assert "has another route than the stream" in unquote(trailers["grpc-message"])
        (state,) = gateway.pool.snapshot()
        assert state.last_error is None
    assert got == [SMALL, SMALL]
