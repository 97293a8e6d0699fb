"""Requests and responses over HTTP/2, by scripted servers and those of grpcio."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from gateway.errors import ErrorKind, GatewayError
from gateway.http2.frames import (
    INITIAL_WINDOW_SIZE,
    encode_headers,
    encode_settings,
    encode_window_update,
)
from gateway.http2.hpack import Encoder
from gateway.system.buffers import BufferAccount
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import RequestTemplate, UpstreamResponse
from tests.support.checks.garbage import no_garbage
from tests.support.gateway import until
from tests.support.servers.grpc_server import GrpcServer, grpc_server
from tests.support.servers.http2_server import (
    Http2Peer,
    Play,
    ReceivedStream,
    answering,
    http2_script,
    http2_tls,
)
from tests.support.servers.scripted_server import Connection, ScriptedServer
from tests.upstream.endpoints import (
    RecordingReceiver,
    Repeatable,
    blocking_server,
    call,
    make_request,
    pieces,
    read_reply,
    reset_on_close,
)
from tests.upstream.http2.conftest import Http2EndpointAt, connected

HTTP_1_ADDRESS = "the address of a server that speaks HTTP/1.1 begins with http:// or https://"


def _recorder(received: list[ReceivedStream]) -> Play:
    """Make the script that answers requests, and records them."""

    async def play(peer: Http2Peer) -> None:
        number = 0
        while True:
            received.append(await peer.request(number))
            for status in ("100", "103"):  # interim responses are ignored
                peer.h2.send_headers(received[-1].id, [(":status", status)])
            await peer.respond(received[-1], b"ok", [("x-a", "1"), ("x-a", "2")], [("t", "\xfc")])
            number += 1

    return play


LINES: dict[bytes, tuple[bytes, bytes] | None] = {
    b"X-A:  b\xfc c \t": (b"x-a", b"b\xfc c"),
    b"X-Empty:": (b"x-empty", b""),
    b"X-Colon: a:b": (b"x-colon", b"a:b"),
    b"traceparent: 00-1": (b"traceparent", b"00-1"),
    b"X-Long: " + b"x" * 5000: (b"x-long", b"x" * 5000),
    b"Connection: close": None,
    b"keep-alive: timeout=5": None,
    b"TE: Trailers": (b"te", b"Trailers"),
    b"TE: trailers, deflate": None,
    b"te: trailers\xa0": None,
}
"""Header lines, and the fields that they become."""


async def test_lines_become_fields_the_first_time_and_later(http2_at: Http2EndpointAt) -> None:
    endpoint = http2_at("http://127.0.0.1:1")
    template = RequestTemplate("POST", "/x", (("Accept", "*/*"),))
    expected = [field for field in LINES.values() if field is not None]
    for _ in range(2):
        _, _, _, _, accept, *more = endpoint.template_fields(template, b"\r\n".join((*LINES, b"")))
        assert accept == (b"accept", b"*/*")
        assert more == expected


async def test_lines_that_differ_each_time_take_no_memory(http2_at: Http2EndpointAt) -> None:
    endpoint = http2_at("http://127.0.0.1:1")
    template = RequestTemplate("POST", "/x", ())

    def send(name: bytes, size: int) -> None:
        for number in range(100):
            line = b"%b: %d%b\r\n" % (name, number, b"x" * size)
            for _ in range(3):
                endpoint.template_fields(template, line)

    send(b"x-long", 10)  # the caches themselves
    tracemalloc.start()
    send(b"traceparent", 200)
    send(b"x-long", 10_000)
    found = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert found < 10_000


async def test_request_and_response_carry_headers_bodies_and_trailers(
    http2_at: Http2EndpointAt,
) -> None:
    received: list[ReceivedStream] = []
    async with connected(http2_at, http2_script(_recorder(received))) as (server, endpoint):
        headers = {
            "Content-Type": "application/grpc",
            "TE": "trailers",
            "X-B": " v\xff",
            "Connection": "close",
            "Transfer-Encoding": "chunked",
            "Keep-Alive": "5",
            "Upgrade": "h2c",
            "Proxy-Authorization": "secret",
            "Expect": "100-continue",
        }
        response = await endpoint.send(make_request([b"a", b"", b"bc"], headers, "/p?q=%20"))
        assert response.headers.getall("X-A") == ["1", "2"]
        reply = await read_reply(response)
        assert (reply.status, reply.body, reply.trailers) == (200, b"ok", (("t", "\xc3\xbc"),))
        await call(endpoint, headers={"Host": "models.example", "TE": "gzip"})
    request, other = received
    assert dict(other.headers)[":authority"] == "models.example"
    assert not {"host", "te"} & set(dict(other.headers))
    assert request.body == b"abc"
    assert request.headers == [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/p?q=%20"),
        (":authority", server.url.removeprefix("http://")),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("x-b", "v\xff"),
    ]


@pytest.mark.parametrize(
    ("body", "window"),
    [
        *((None, 65_535), ((b"",), 65_535), ((b"x" * 200_000,), 65_535)),
        *(((b"x" * 70_000, b"y" * 1_000_000, b""), 65_535), ((bytes(range(200)),), 1)),
    ],
)
async def test_buffered_bodies_arrive(
    http2_at: Http2EndpointAt, body: tuple[bytes, ...] | None, window: int
) -> None:
    received: list[ReceivedStream] = []
    settings = {SettingCodes.INITIAL_WINDOW_SIZE: window}
    async with connected(http2_at, http2_script(_recorder(received), settings)) as (_, endpoint):
        assert (await call(endpoint, body)).body == b"ok"
    assert received[0].body == b"".join(body or ())


async def test_error_of_a_body_ends_its_call_only(http2_at: Http2EndpointAt) -> None:
    seen: list[int | None] = []

    async def play(peer: Http2Peer) -> None:
        first, second = await peer.stream(0), await peer.stream(1)
        await peer.until(lambda: first.reset is not None)
        seen.append(first.reset)
        await peer.until(lambda: second.ended)
        await peer.respond(second, b"ok")
        await peer.serve_to_end()

    proceed = asyncio.Event()

    async def failing() -> AsyncIterator[bytes]:
        yield b"a"
        await proceed.wait()
        raise ValueError("the client left")

    async with connected(http2_at, http2_script(play)) as (server, endpoint):
        broken = asyncio.create_task(call(endpoint, failing()))
        await (await server.connection()).reader.read(0)
        other = asyncio.create_task(call(endpoint, [b"b"]))
        await asyncio.sleep(0)
        proceed.set()
        with pytest.raises(ValueError, match="the client left"):
            await broken
        assert (await other).body == b"ok"
    assert seen == [ErrorCodes.CANCEL]


@pytest.mark.parametrize("code", [ErrorCodes.NO_ERROR, ErrorCodes.CANCEL])
async def test_early_response_is_complete_although_the_server_stops_the_request(
    http2_at: Http2EndpointAt, code: int
) -> None:
    """RFC 9113, section 8.1: gRPC servers do so with errors."""

    async def play(peer: Http2Peer) -> None:
        stream = await peer.stream()
        await peer.respond(stream, b"no", trailers=[("grpc-status", "8")])
        await peer.reset(stream, code)
        await peer.serve_to_end()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 10_000

    # It lets the client send no more than 64 KiB.
    async with ScriptedServer(http2_script(play, opens_windows=False)) as server:
        reply = await call(http2_at(server.url), endless())
        assert (reply.body, reply.trailers) == (b"no", (("grpc-status", "8"),))


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it responded in HTTP/1.1"),
        (b"220 mail.example.org ESMTP\r\n", "it does not speak HTTP/2: .*"),
        (b"", "it closed the connection before it sent its HTTP/2 settings"),
    ],
)
async def test_server_that_does_not_speak_http2_is_unreachable(
    http2_at: Http2EndpointAt, response: bytes, why: str
) -> None:
    async def play(connection: Connection) -> None:
        await connection.reader.read(100)
        for byte in response:
            await connection.send(bytes([byte]))
            await asyncio.sleep(0)

    async with connected(http2_at, play, public_name="upstream 'u'") as (_, endpoint):
        with pytest.raises(GatewayError) as raised:
            await call(endpoint)
    error = raised.value
    assert error.kind is ErrorKind.UNREACHABLE
    for server_name, text in (
        (endpoint.url, error.message),
        ("upstream 'u'", error.public_message),
    ):
        assert re.fullmatch(f"cannot connect to {server_name}: {why}; {HTTP_1_ADDRESS}", text)


async def test_refused_request_is_sent_again(http2_at: Http2EndpointAt) -> None:
    async def refuse(peer: Http2Peer) -> None:
        await peer.reset(await peer.request(), ErrorCodes.REFUSED_STREAM)
        stream = await peer.request(1)
        await peer.respond(stream, b"got " + bytes(stream.body))
        await peer.serve_to_end()

    for body in ([b"a", b"b"], Repeatable(b"a", b"b")):
        async with ScriptedServer(http2_script(refuse)) as server:
            assert (await call(http2_at(server.url), body)).body == b"got ab"


async def test_refused_request_with_a_consumed_body_fails_as_unseen(
    http2_at: Http2EndpointAt,
) -> None:
    async def refuse(peer: Http2Peer) -> None:
        await peer.reset(await peer.request(), ErrorCodes.REFUSED_STREAM)
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(refuse)) as (_, endpoint):
        with pytest.raises(GatewayError) as raised:
            await call(endpoint, pieces(b"a"))
    assert raised.value.kind is ErrorKind.REFUSED
    assert raised.value.kind.value.retryable
    assert raised.value.message == (
        f"{endpoint.url} did not process the request: the peer reset the stream: REFUSED_STREAM"
    )


@pytest.mark.parametrize("end", ["close", "CANCEL", "INTERNAL_ERROR", "goaway that takes it"])
async def test_request_that_the_server_may_have_executed_is_not_sent_again(
    http2_at: Http2EndpointAt, end: str
) -> None:
    async def executes(peer: Http2Peer) -> None:
        stream = await peer.request()
        executed.append(stream.path)
        if end == "goaway that takes it":
            await peer.go_away(stream.id)
        elif end != "close":
            await peer.reset(stream, ErrorCodes[end])
            await peer.serve_to_end()

    executed: list[str] = []
    async with connected(http2_at, http2_script(executes)) as (server, endpoint):
        with pytest.raises(GatewayError) as raised:
            await call(endpoint, [b"a"])
        assert raised.value.kind is ErrorKind.NO_RESPONSE
        assert executed == ["/x"]
        assert len(server.connections) == 1


async def test_request_that_is_always_refused_fails_in_the_end(http2_at: Http2EndpointAt) -> None:
    refused: list[ReceivedStream] = []

    async def refuse(peer: Http2Peer) -> None:
        for number in range(100):
            refused.append(await peer.request(number))
            await peer.reset(refused[-1], ErrorCodes.REFUSED_STREAM)

    async with ScriptedServer(http2_script(refuse)) as server:
        with pytest.raises(GatewayError, match="did not process"):
            await call(http2_at(server.url), [b"a"])
        assert len(server.connections) == 1
    assert len(refused) == 3


async def test_calls_leave_no_garbage(http2_at: Http2EndpointAt) -> None:
    async with connected(http2_at, answering(b"x" * 100_000, [("t", "1")])) as (_, endpoint):
        await call(endpoint)
        with no_garbage("calls"):
            for _ in range(3):
                await call(endpoint, [b"y" * 300_000])
                await call(endpoint, pieces(b"a", b"b"))


@pytest.mark.parametrize("resets", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["TCP", "TLS"])
async def test_early_response_is_read_although_the_next_write_fails(
    http2_at: Http2EndpointAt, is_tls: bool, resets: bool
) -> None:
    closed = threading.Event()
    refusal = ((b":status", b"200"), (b"grpc-status", b"8"))

    def refuse(sock: socket.socket) -> None:
        sock.sendall(
            encode_settings([(INITIAL_WINDOW_SIZE, 1 << 30)]) + encode_window_update(0, 1 << 30)
        )
        received = 0
        while received < 64 * 1024:
            received += len(sock.recv(64 * 1024 - received))
        sock.sendall(encode_headers(1, Encoder().encode(refusal), end_stream=True))
        if resets:
            reset_on_close(sock)

    async def body() -> AsyncIterator[bytes]:
        yield bytes(128 * 1024)
        # The event loop stands still meanwhile: it learns of the close by its next write.
        assert closed.wait(5)
        for _ in range(100):
            yield bytes(128 * 1024)

    with blocking_server(refuse, http2_tls() if is_tls else None, closed.set) as url:
        reply = await read_reply(await http2_at(url).send(make_request(body())))
        assert (reply.status, reply.headers["grpc-status"], reply.body) == (200, "8", b"")


MIB = 1024 * 1024
HEADERS = {"Content-Type": "application/grpc", "TE": "trailers"}


def _echo(data: bytes, context: grpc.ServicerContext) -> bytes:
    context.set_trailing_metadata((("x-trailer", "1"),))
    return data


def _serve(**arguments: Any) -> AbstractContextManager[GrpcServer]:
    """Run a server that echoes."""
    return grpc_server(unary={"/t/Echo": _echo}, **arguments)


def message(data: bytes) -> bytes:
    """Frame a gRPC message."""
    return b"\0" + len(data).to_bytes(4) + data


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


async def test_server_may_send_all_of_a_response_at_once_if_the_last_one_was_large(
    http2_at: Http2EndpointAt,
) -> None:
    large, small = message(bytes(200_000)), message(b"ok")
    sent = (small, large, large, small, large)
    first_windows: list[int] = []

    async def play(peer: Http2Peer) -> None:
        for number, body in enumerate(sent):
            stream = await peer.request(number)
            first_windows.append(peer.h2.local_flow_control_window(stream.id))
            await peer.respond(stream, body, trailers=[("grpc-status", "0")])
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(play)) as (_, endpoint):
        assert (await call(endpoint, (b"x",))).body == small  # connects to the server
        template = RequestTemplate("POST", "/x", ())
        for body in sent[1:]:
            receiver = RecordingReceiver(untouched=True)
            connection = endpoint.try_reserve_stream()
            assert connection is not None
            connection.send(template, b"", (b"x",), receiver)
            await receiver.done.wait()
            if receiver.responses:  # it took longer
                assert (await read_reply(receiver.responses[0])).body == body
            else:
                assert receiver.complete[0][1] == body
            connection.close()
    assert [size >= len(large) for size in first_windows] == [False, False, True, True, False]


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
