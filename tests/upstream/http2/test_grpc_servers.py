"""The HTTP/2 leg against real gRPC servers: grpcio, whose core Triton has too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.system.buffers import BufferAccount
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamResponse
from tests.support.certificates import server_certificate
from tests.support.gateway import until
from tests.support.servers.grpc_server import GrpcServer, grpc_server
from tests.upstream.calls import Reply, call, make_request
from tests.upstream.http2.conftest import Http2EndpointAt

MIB = 1024 * 1024
HEADERS = {"Content-Type": "application/grpc", "TE": "trailers"}


def _echo(data: bytes, context: grpc.ServicerContext) -> bytes:
    context.set_trailing_metadata((("x-trailer", "1"),))
    return data


def _stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


def _serve(**arguments: Any) -> AbstractContextManager[GrpcServer]:
    """Run a server that echoes."""
    unary = {"/t/Echo": _echo, **arguments.pop("unary", {})}
    return grpc_server(unary=unary, streams={"/t/Stream": _stream}, **arguments)


def message(data: bytes) -> bytes:
    """Frame a gRPC message."""
    return b"\0" + len(data).to_bytes(4) + data


async def echo(endpoint: Http2Endpoint, data: bytes = b"hello") -> Reply:
    """Make a unary call, whose response must be as its request."""
    reply = await call(endpoint, [message(data)], HEADERS, "/t/Echo")
    assert reply.body == message(data)
    assert dict(reply.trailers)["grpc-status"] == "0"
    return reply


@pytest.mark.parametrize("with_tls", [False, True])
async def test_unary_call(http2_at: Http2EndpointAt, with_tls: bool) -> None:
    leaf = server_certificate()
    pair = (leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_server_credentials([pair]) if with_tls else None
    with _serve(credentials=credentials) as server:
        reply = await echo(http2_at(server.url))
        assert reply.headers["content-type"] == "application/grpc"
        assert dict(reply.trailers)["x-trailer"] == "1"


async def test_unknown_method_is_a_trailers_only_response(http2_at: Http2EndpointAt) -> None:
    with _serve() as server:
        reply = await call(http2_at(server.url), [message(b"")], HEADERS, "/t/Unknown")
        assert (reply.status, reply.headers["grpc-status"]) == (200, "12")
        assert (reply.body, reply.trailers) == (b"", ())


async def test_stream_of_messages_in_both_directions(http2_at: Http2EndpointAt) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def body() -> AsyncIterator[bytes]:
        for number in range(5):
            yield message(b"%d" % number)
            assert await received.get() == message(b"%d" % number)

    with _serve() as server:
        response = await http2_at(server.url).send(make_request(body(), HEADERS, "/t/Stream"))
        while piece := await response.read():
            received.put_nowait(bytes(piece))
        assert dict(response.trailers)["grpc-status"] == "0"
        response.close()


async def test_cancelled_call_is_cancelled_at_the_server(http2_at: Http2EndpointAt) -> None:
    cancelled = threading.Event()

    def hang(data: bytes, context: grpc.ServicerContext) -> bytes:
        context.add_callback(cancelled.set)
        cancelled.wait(10)
        return data

    with _serve(unary={"/t/Hang": hang}) as server:
        endpoint = http2_at(server.url)
        await echo(endpoint)
        hanging = asyncio.create_task(call(endpoint, [message(b"")], HEADERS, "/t/Hang"))
        await asyncio.sleep(0.05)
        hanging.cancel()
        assert await asyncio.to_thread(cancelled.wait, 5)
        await echo(endpoint)
        assert len(endpoint.connections.sessions) == 1


async def test_large_message_passes_with_bounded_memory(http2_at: Http2EndpointAt) -> None:
    size, chunk = 100 * MIB, bytes(256 * 1024)
    buffers = BufferAccount()
    most = 0

    async def body() -> AsyncIterator[bytes]:
        yield b"\0" + size.to_bytes(4)
        for _ in range(size // len(chunk)):
            yield chunk

    with _serve() as server:
        endpoint = http2_at(server.url, buffers=buffers)
        response: UpstreamResponse = await endpoint.send(make_request(body(), HEADERS, "/t/Echo"))
        while await response.read():
            most = max(most, buffers.buffered)
        assert response.received_bytes == size + 5
        assert dict(response.trailers)["grpc-status"] == "0"
        response.close()
    assert most < 4 * MIB


async def test_restarted_server_loses_no_call_that_can_be_retried(
    http2_at: Http2EndpointAt,
) -> None:
    """It stops gracefully: GOAWAY, and what runs finishes. Only connects may fail meanwhile."""
    errors: list[GatewayError] = []
    statuses: set[tuple[str, str]] = set()
    done = 0
    stopped = asyncio.Event()

    async def load(endpoint: Http2Endpoint) -> None:
        nonlocal done
        while not stopped.is_set():
            try:
                reply = await call(endpoint, [message(b"x")], HEADERS, "/t/Echo")
                metadata = {**reply.headers, **dict(reply.trailers)}
                statuses.add((metadata["grpc-status"], metadata["grpc-message"]))
                done += 1
            except GatewayError as error:
                errors.append(error)
                await asyncio.sleep(0.01)

    async def progress() -> None:
        before = done
        await until(lambda: done > before + 200)

    with _serve() as server:
        endpoint = http2_at(server.url)
        loads = [asyncio.create_task(load(endpoint)) for _ in range(8)]
        await progress()
        # A stop blocks, and the load must go on meanwhile.
        await asyncio.to_thread(server.stop, 5)
    with _serve(port=server.port):
        await progress()
        stopped.set()
        await asyncio.gather(*loads)
    # grpcio itself answers so to calls that arrive while it stops.
    assert statuses <= {("0", ""), ("1", "CANCELLED"), ("14", "Cancelling all calls")}
    assert {error.kind for error in errors} <= {ErrorKind.UNREACHABLE}
