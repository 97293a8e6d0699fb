"""Whatever line fails once a call has started, its request is sent once, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import CodeType

import pytest
from h2.exceptions import ProtocolError

from gateway.listener.client_call import RequestDispatcher
from gateway.protocol.grpc.framing import frame
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit, release_all
from gateway.proxy.attempts.attempt import Attempt
from gateway.proxy.calls.buffered import BufferedCall
from gateway.system.buffers import BufferAccount, BufferShare
from gateway.system.sockets.body_stream import BodyStream
from gateway.system.sockets.connection import Connection as GatewayConnection
from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.exchange import ConnectionQueue, Exchange
from gateway.upstream.pool.pool import Lease
from tests.support.checks.failing_lines import SOURCES, FailingLines, Line, code_of, name_of
from tests.support.compiled import needs_source
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.grpc.client import SERVICE
from tests.support.grpc.wire_bytes import field
from tests.support.http2_client import connect_http2
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    FLOATS,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    json_request,
    metadata,
)
from tests.support.raw_client import connect
from tests.support.scale import SCALE
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import Connection, ScriptedServer

pytestmark = needs_source  # compiled code has no lines

_HTTP2 = (f"{SOURCES}/http2/", f"{SOURCES}/upstream/http2/")
"""The code of HTTP/2 itself. If a line of it fails, frames are written in part."""

_COUNTING = (
    Attempt.hold,
    Attempt.end,
    BufferedCall._hold,
    BufferedCall._release,
    BufferedCall._release_endpoint,
    BufferedCall._stop_timers,
    Lease.acquire,
    Lease.release,
    ConcurrencyLimit.release,
    release_all,
    TimeoutQueue.remove,
    RequestDispatcher.remove_call,
    BufferShare.change,
    BufferShare.open_stream,
    BufferShare.close_stream,
    BufferShare._change_streams,
    BufferAccount.resize_windows,
    BufferAccount.add_streams,
    BufferAccount.remove_streams,
    BufferAccount.forget,
    BodyStream._drop,
    BodyStream._count,
    BodyStream._close_stream,
    ConnectionQueue.stop_waiting,
    Exchange._stop_sender,
    Exchange.take_held,
)
"""They count, and give back. If a line of theirs failed, the count would stay wrong."""

_CANNOT_FAIL = code_of(*_COUNTING, GatewayConnection.write)

_SHAPE = field(2, b"FP32") + field(3, b"\x03")
_OUTPUT = field(1, b"m") + field(5, field(1, b"OUT") + _SHAPE) + field(6, FLOATS.tobytes())
_METADATA = field(1, b"m") + field(
    4, field(1, b"IN") + field(2, b"FP32") + field(3, b"\xff" * 9 + b"\x01")
)
_MESSAGES = {
    name: frame(len(message)) + message
    for name, message in (("ModelInfer", _OUTPUT), ("ModelMetadata", _METADATA), ("", b""))
}
_GRPC_REQUEST = field(1, b"m") + field(5, field(1, b"IN") + _SHAPE) + field(7, FLOATS.tobytes())

_SETTLED = 5
"""Turns of the event loop in which a call has ended behind its response."""


def _is_watched(code: CodeType) -> bool:
    file = code.co_filename
    return file.startswith(SOURCES) and not file.startswith(_HTTP2) and code not in _CANNOT_FAIL


def _lines(failing: Line | None = None) -> FailingLines:
    return FailingLines(_is_watched, failing, after=BufferedCall.start)


async def _serve(connection: Connection) -> None:
    while True:
        target = (await connection.request()).head.target
        if target.endswith("/infer"):
            await connection.send(binary_response(FLOATS.tobytes()))
        elif target == "/v2/models/m":
            await connection.send(http_response(metadata(-1)))
        else:
            await connection.send(http_response(b"hello"))


async def _serve_grpc(peer: Http2Peer) -> None:
    served = 0
    while True:
        stream = await peer.request(served)
        served += 1
        rpc = stream.path.rpartition("/")[2]
        message = _MESSAGES.get(rpc, _MESSAGES[""])
        head, trailers = [("content-type", "application/grpc")], [("grpc-status", "0")]
        with suppress(ProtocolError):  # the gateway has closed the connection meanwhile
            await peer.respond(stream, message, head, trailers)


_Call = Callable[[str, FailingLines], Awaitable[None]]


async def _settle() -> None:
    for _ in range(_SETTLED):
        await asyncio.sleep(0)


def _http1(data: bytes) -> _Call:
    async def call(url: str, lines: FailingLines) -> None:
        """Send a request; there must be one response, or the end of the connection."""
        async with connect(url) as client:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                with lines.watched():
                    response = await client.ask(data)
                    await _settle()
                assert response.status in (200, 500, 502, 504)
                with suppress(RuntimeError):  # the gateway has closed the connection
                    client.shutdown_write()
                assert await client.rest() == b""

    return call


def _http2(target: str, body: bytes, *headers: tuple[str, str]) -> _Call:
    async def call(url: str, lines: FailingLines) -> None:
        """Send a request; there must be a response, or the end of the stream or connection."""
        async with connect_http2(url) as client:
            with suppress(ConnectionError):
                with lines.watched():
                    reply = await client.call("POST", target, body, headers)
                    await _settle()
                assert reply.reset is not None or reply.status in (200, 500, 502, 504)

    return call


_CALLS: dict[str, _Call] = {
    "JSON": _http1(infer_json()),
    "binary": _http1(infer_binary(binary_header(12), FLOATS.tobytes())),
    "V1": _http1(request("POST", "/v1/models/m:predict", b'{"instances": [1, 2]}')),
    "passthrough": _http1(request("POST", "/v2/x", b"abc")),
    "JSON over HTTP/2": _http2(INFER, json_request()),
    "JSON to gRPC": _http1(infer_json()),
    "V1 to gRPC": _http1(request("POST", "/v1/models/m:predict", b'{"instances": [1, 2]}')),
    "gRPC": _http2(
        f"/{SERVICE}/ModelInfer",
        frame(len(_GRPC_REQUEST)) + _GRPC_REQUEST,
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ),
    "gRPC to HTTP": _http2(
        f"/{SERVICE}/ModelInfer",
        frame(len(_GRPC_REQUEST)) + _GRPC_REQUEST,
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ),
}


@asynccontextmanager
async def _running(is_grpc: bool) -> AsyncIterator[tuple[RunningGateway, Callable[[], int]]]:
    """Run a gateway before a server; the function counts the POST requests at the server."""
    peers: list[Http2Peer] = []

    async def serve_grpc(peer: Http2Peer) -> None:
        peers.append(peer)
        await _serve_grpc(peer)

    def count() -> int:
        streams = sum(len(peer.streams) for peer in peers)
        return streams + sum(each.head.first.startswith("POST ") for each in server.requests)

    async with ScriptedServer(http2_script(serve_grpc) if is_grpc else _serve) as server:
        url = server.url.replace("http:", "grpc:") if is_grpc else server.url
        async with running_gateway(
            url, route={"server_timing": True}, request_timeout=0.3, max_requests=10
        ) as running:
            yield running, count


STEP = 1 if SCALE >= 1 else 3
"""A full run tries each line of each form; else each form tries another third of its lines."""


@pytest.mark.parametrize("name", _CALLS)
async def test_line_that_fails_after_the_start_of_a_call_sends_nothing_twice(name: str) -> None:
    """Each line fails once; whichever it is, the gateway keeps nothing of the call."""
    call = _CALLS[name]
    async with _running(name.endswith("gRPC")) as (running, count):
        normal = _lines()
        for _ in range(3):  # the first ones fill caches, and connect
            normal.seen.clear()
            await call(running.url, normal)
        await running.remains.until_nothing()
        assert len(normal.seen) > 100
        first = list(_CALLS).index(name) % STEP
        # A frame that still runs goes on to tell its lines.
        for line in list(normal.seen)[first::STEP]:
            before = count()
            try:
                await call(running.url, _lines(line))
                running.remains.forget_faults()
                await running.remains.until_nothing()
                assert count() - before <= 1
            except (AssertionError, TimeoutError) as error:
                error.add_note(f"{name_of(line)} has failed")
                raise
