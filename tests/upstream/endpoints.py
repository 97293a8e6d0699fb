"""Endpoints for the servers of a test, requests to them, and who gets their responses."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import pytest
from multidict import CIMultiDict

from gateway.http1.head import ResponseHead
from gateway.system.certificates import CertificateFiles, client_context
from gateway.upstream.address import parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.transport import (
    Body,
    FieldLines,
    HeaderLines,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)
from tests.support.certificates import authority
from tests.support.gateway import no_leaks
from tests.support.servers.scripted_server import ScriptedServer


def reset_on_close(sock: socket.socket) -> None:
    """Reset the connection when it is closed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def blocking_server(
    serve: Callable[[socket.socket], None],
    context: ssl.SSLContext | None = None,
    closed: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Serve one connection after the other, and tell when each is closed; return the URL.

    It blocks in a thread of its own, so that it is not in step with the gateway.
    """

    def run() -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            sock.settimeout(20)
            # Else the response waits here for an acknowledgement, and a reset throws it away.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock, suppress(OSError):
                made = sock if context is None else context.wrap_socket(sock, server_side=True)
                with made:
                    serve(made)
            closed()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run)
        thread.start()
        scheme = "http" if context is None else "https"
        try:
            yield "{}://{}:{}".format(scheme, *listening.getsockname())
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


EndpointAt = Callable[[str], HttpEndpoint]
Serve = Callable[..., ScriptedServer]
"""Makes a server of some transport that plays scripts."""


@cache
def trusting_context() -> ssl.SSLContext:
    """Make a TLS context that trusts the tests' authority."""
    context = client_context(CertificateFiles())
    authority().configure_trust(context)
    return context


@pytest.fixture
async def endpoint_at() -> AsyncIterator[EndpointAt]:
    """Make endpoints; they are closed after the test, and nothing may be left of them."""
    endpoints: list[HttpEndpoint] = []

    def endpoint_at(url: str) -> HttpEndpoint:
        endpoints.append(
            HttpEndpoint(parse_server_url(url, trusting_context()), EndpointOptions(5))
        )
        return endpoints[-1]

    async with no_leaks():
        yield endpoint_at
        for endpoint in endpoints:
            await endpoint.close()


@dataclass(frozen=True)
class Reply:
    """A response, whole."""

    status: int
    headers: dict[str, str]
    body: bytes
    trailers: HeaderLines


def make_request(
    body: Body = None,
    headers: dict[str, str] | None = None,
    target: str = "/x",
    method: str = "POST",
) -> UpstreamRequest:
    """Make a request."""
    return UpstreamRequest(method, target, CIMultiDict(headers or {}), body)


async def pieces(*parts: bytes | BaseException) -> AsyncIterator[bytes]:
    """Give the pieces of a body, which may fail."""
    for part in parts:
        if isinstance(part, BaseException):
            raise part
        yield part


class Repeatable(AsyncIterable[bytes]):
    """A streamed body that can be read again from the start."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return pieces(*self._parts)


async def read_whole(response: UpstreamResponse) -> bytes:
    """Read the body of a response, and close it."""
    try:
        body, before = bytearray(), response.received_bytes
        async with asyncio.timeout(30):
            while piece := await response.read():
                body += piece
        assert response.received_bytes == before + len(body)
        return bytes(body)
    finally:
        response.close()


async def read_reply(response: UpstreamResponse) -> Reply:
    """Read a response to its end, and close it."""
    body = await read_whole(response)
    return Reply(response.status, dict(response.headers), body, response.trailers)


async def ask(endpoint: UpstreamEndpoint, request: UpstreamRequest | None = None) -> bytes:
    """Send a request, and read the body of its response."""
    async with asyncio.timeout(30):
        return await read_whole(await endpoint.send(request or make_request()))


async def call(
    endpoint: UpstreamEndpoint,
    body: Body = None,
    headers: dict[str, str] | None = None,
    target: str = "/x",
) -> Reply:
    """Send a request and read its response."""
    return await read_reply(await endpoint.send(make_request(body, headers, target)))


class RecordingReceiver:
    """Records its calls; each of them runs ``then`` and sets ``done``.

    Unless it ``handles`` complete responses, its ``response`` is read as it arrives, or fails.
    """

    def __init__(
        self,
        *,
        waits_for_chunks: bool = False,
        untouched: bool = False,
        idempotent: bool = False,
        handles: bool = True,
    ) -> None:
        self.idempotent = idempotent
        self.waits_for_chunks = waits_for_chunks
        self.untouched = untouched
        self.handles = handles
        self.calls: list[str] = []
        self.complete: list[tuple[ResponseHead, bytes]] = []
        self.responses: list[UpstreamResponse] = []
        self.errors: list[Exception] = []
        self.response: asyncio.Future[UpstreamResponse]
        self.response = asyncio.get_running_loop().create_future()
        self.done = asyncio.Event()
        self.then: Callable[[], object] = lambda: None

    def is_idempotent(self) -> bool:
        return self.idempotent

    def passes_untouched(self, head: ResponseHead) -> bool:
        return self.untouched

    def on_complete(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines = ()
    ) -> bool:
        if self.handles:
            self.complete.append((head, bytes(body)))
            self._note(f"whole {head.status}")
        return self.handles

    def on_headers(self, response: UpstreamResponse) -> None:
        self.responses.append(response)
        if not self.response.done():
            self.response.set_result(response)
        self._note(f"begun {response.status}")

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)
        if not self.handles:
            self.response.set_exception(error)
        self._note("failed")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.then()
        self.done.set()

    async def wait(self) -> None:
        async with asyncio.timeout(5):
            await self.done.wait()
        self.done.clear()

    @property
    def body(self) -> bytes:
        return self.complete[-1][1]


def send_reserved(
    endpoint: UpstreamEndpoint,
    receiver: ResponseReceiver,
    template: RequestTemplate,
    body: bytes = b"",
    headers: HeaderLines = (),
) -> ReservedConnection:
    """Send a request over a reserved connection."""
    connection = endpoint.try_reserve()
    assert connection is not None
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")
    connection.send(template, lines, (body,), receiver)
    return connection
