"""A response that comes before the whole request is sent reaches the caller, also over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from multidict import CIMultiDict

from gateway.errors import GatewayError
from gateway.upstream.transport import UpstreamRequest
from tests.support.certificates import server_context
from tests.support.http_messages import http_response
from tests.upstream.endpoints import EndpointAt

ROUNDS = 20
PIECE = bytes(256 * 1024)
PIECES = 64
REFUSAL = http_response(b"no", {"Connection": "close"}, "413 Too Large")


class RefusingServer:
    """Responds 413 to the head of each request, and then ends the connection in one of three ways.

    It blocks in a thread of its own, so that it is not in step with the gateway.
    """

    def __init__(self, context: ssl.SSLContext | None, end: str) -> None:
        self._context = context
        self._end = end
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._socket.getsockname()[1]}"

    @contextmanager
    def running(self) -> Iterator[str]:
        self._thread.start()
        try:
            yield self.url
        finally:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            sock.settimeout(20)
            # Else the response waits here for an acknowledgement, and a reset throws it away.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock, contextlib.suppress(OSError):
                self._refuse(sock)

    def _refuse(self, sock: socket.socket) -> None:
        if self._context is not None:
            sock = self._context.wrap_socket(sock, server_side=True)
        with sock:
            head = b""
            while b"\r\n\r\n" not in head:
                head += sock.recv(4096)
            sock.sendall(REFUSAL)
            if self._end == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif self._end == "reads on":
                for _ in range(20):
                    sock.recv(64 * 1024)


async def _large_body() -> AsyncIterator[bytes]:
    for _ in range(PIECES):
        yield PIECE


@pytest.mark.parametrize("end", ["close", "reset", "reads on"])
@pytest.mark.parametrize("transport", ["TCP", "TLS 1.2", "TLS 1.3"])
async def test_early_response_is_read_however_the_server_ends_the_connection(
    endpoint_at: EndpointAt, transport: str, end: str
) -> None:
    context = None if transport == "TCP" else server_context()
    if context is not None and transport == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    results: Counter[str] = Counter()
    with RefusingServer(context, end).running() as url:
        endpoint = endpoint_at(url)
        for _ in range(ROUNDS):
            request = UpstreamRequest("POST", "/v2/x", CIMultiDict(), _large_body())
            try:
                async with asyncio.timeout(30):
                    response = await endpoint.send(request)
                    body = await response.read()
                    results[f"{response.status} {bytes(body).decode()}"] += 1
                    response.close()
            except GatewayError as error:
                results[error.message] += 1
    assert results == {"413 no": ROUNDS}


@pytest.mark.parametrize("steps", range(6))
async def test_connect_that_is_cancelled_leaves_nothing(
    endpoint_at: EndpointAt, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server accepts, and never takes part in the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = endpoint_at(f"https://127.0.0.1:{listening.getsockname()[1]}")
        request = UpstreamRequest("GET", "/v2/x", CIMultiDict())
        call = asyncio.create_task(endpoint.send(request))
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for _ in range(10):
            await asyncio.sleep(0)  # lets its transport close
        gc.collect()
    assert caplog.messages == []
