"""The HTTP/2 leg against real gRPC servers: grpcio, whose core Triton has too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.system.buffers import BufferAccount
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamResponse
from tests.support.certificates import server_certificate
from tests.support.gateway import until
from tests.upstream.calls import Reply, call, make_request
from tests.upstream.http2.conftest import Http2EndpointAt

MIB = 1024 * 1024
HEADERS = {"Content-Type": "application/grpc", "TE": "trailers"}


class GrpcService(grpc.GenericRpcHandler):  # type: ignore[misc]  # it has no types
    """Echoes, counts cancellations, and waits if told so."""

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()
        self.stop: Callable[[], object] = bool
        """Stops the server gracefully."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handlers = {
            "/t/Echo": grpc.unary_unary_rpc_method_handler(self._echo),
            "/t/Stream": grpc.stream_stream_rpc_method_handler(self._stream),
            "/t/Hang": grpc.unary_unary_rpc_method_handler(self._hang),
        }
        return handlers.get(handler_call_details.method)

    def _echo(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with self._lock:
            self.calls += 1
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        self.may_finish.wait(10)
        with self._lock:
            self.running -= 1
        context.set_trailing_metadata((("x-trailer", "1"),))
        return message

    def _stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from messages

    def _hang(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        context.add_callback(self.cancelled.set)
        self.cancelled.wait(10)
        return message


@contextmanager
def grpc_server(
    service: GrpcService,
    port: int = 0,
    with_tls: bool = False,
    options: Mapping[str, int] | None = None,
) -> Iterator[str]:
    """Run a server; yield its URL."""
    unlimited = {"max_receive_message_length": -1, "max_send_message_length": -1, "so_reuseport": 0}
    chosen = {**unlimited, **(options or {})}
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(
            threads,
            handlers=(service,),
            options=[(f"grpc.{name}", value) for name, value in chosen.items()],
        )
        if with_tls:
            leaf = server_certificate()
            pair = (leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes())
            port = server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        service.stop = lambda: server.stop(grace=5).wait()
        try:
            yield f"{'https' if with_tls else 'http'}://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


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
    with grpc_server(GrpcService(), with_tls=with_tls) as url:
        reply = await echo(http2_at(url))
        assert reply.headers["content-type"] == "application/grpc"
        assert dict(reply.trailers)["x-trailer"] == "1"


async def test_unknown_method_is_a_trailers_only_response(http2_at: Http2EndpointAt) -> None:
    with grpc_server(GrpcService()) as url:
        reply = await call(http2_at(url), [message(b"")], HEADERS, "/t/Unknown")
        assert (reply.status, reply.headers["grpc-status"]) == (200, "12")
        assert (reply.body, reply.trailers) == (b"", ())


async def test_stream_of_messages_in_both_directions(http2_at: Http2EndpointAt) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def body() -> AsyncIterator[bytes]:
        for number in range(5):
            yield message(b"%d" % number)
            assert await received.get() == message(b"%d" % number)

    with grpc_server(GrpcService()) as url:
        response = await http2_at(url).send(make_request(body(), HEADERS, "/t/Stream"))
        while piece := await response.read():
            received.put_nowait(bytes(piece))
        assert dict(response.trailers)["grpc-status"] == "0"
        response.close()


async def test_cancelled_call_is_cancelled_at_the_server(http2_at: Http2EndpointAt) -> None:
    service = GrpcService()
    with grpc_server(service) as url:
        endpoint = http2_at(url)
        await echo(endpoint)
        hanging = asyncio.create_task(call(endpoint, [message(b"")], HEADERS, "/t/Hang"))
        await asyncio.sleep(0.05)
        hanging.cancel()
        assert await asyncio.to_thread(service.cancelled.wait, 5)
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

    with grpc_server(GrpcService()) as url:
        endpoint = http2_at(url, buffers=buffers)
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
    service = GrpcService()
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

    with grpc_server(service) as url:
        endpoint = http2_at(url)
        loads = [asyncio.create_task(load(endpoint)) for _ in range(8)]
        await progress()
        port = int(url.rpartition(":")[2])
        # A stop blocks, and the load must go on meanwhile.
        await asyncio.to_thread(service.stop)
    with grpc_server(service, port):
        await progress()
        stopped.set()
        await asyncio.gather(*loads)
    # grpcio itself answers CANCELLED to calls that arrive while it stops.
    assert statuses <= {("0", ""), ("1", "CANCELLED")}
    assert {error.kind for error in errors} <= {ErrorKind.UNREACHABLE}
