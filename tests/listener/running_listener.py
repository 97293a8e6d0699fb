"""A running listener with a given handler, over plain TCP and over TLS."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from multidict import CIMultiDict

from gateway.listener.client_call import RequestHandler
from gateway.listener.server import HttpListener
from gateway.listener.sockets import open_tcp_sockets
from gateway.listener.tls import ReloadingTlsContext, TlsFiles
from gateway.observe.call_record import CallObserver
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.support.addresses import HOST
from tests.support.certificates import certificate_files, server_certificate
from tests.support.checks.nothing_left import find_left_in_listener
from tests.support.gateway import no_errors_logged, no_leaks, until
from tests.support.http2_client import connect_http2


class RunningListener:
    """A listener, its socket and its URL."""

    def __init__(self, listener: HttpListener, sock: socket.socket, url: str) -> None:
        self.listener = listener
        self.sock = sock
        self.url = url
        self.is_tls = url.startswith("https:")


class _Scheme:
    """The TLS context of listeners, None for plain HTTP."""

    tls: ReloadingTlsContext | None = None


@pytest.fixture(autouse=True, params=["http", "https"])
def scheme(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test over plain HTTP and over TLS."""
    if request.param == "https":
        files = TlsFiles(*certificate_files(tmp_path, server_certificate()))
        monkeypatch.setattr(_Scheme, "tls", ReloadingTlsContext(files))
    return str(request.param)


@asynccontextmanager
async def running_listener(
    handle: RequestHandler, *observers: CallObserver
) -> AsyncIterator[RunningListener]:
    """Run a listener with this handler; at the end it drains, and no resource may leak."""
    async with no_leaks():
        listener = HttpListener(handle, observers)
        listener.tls = _Scheme.tls
        (sock,) = open_tcp_sockets(HOST, 0)
        scheme = "http" if _Scheme.tls is None else "https"
        url = "{}://{}:{}".format(scheme, *sock.getsockname())
        listener.sockets.listen(sock)
        yield RunningListener(listener, sock, url)
        if not listener.draining:
            await until(lambda: not any(find_left_in_listener(listener).values()))
        await listener.drain(0.05, 0.05)


async def respond(response: ClientResponse, body: bytes, **headers: str) -> None:
    """Send a response with this body."""
    await response.start(200, "", CIMultiDict({"Content-Length": str(len(body)), **headers}))
    await response.write(body)
    await response.finish()


async def read_body(client: ClientRequest) -> bytes:
    """Read a request's body to its end."""
    body = b""
    while piece := await client.read():
        body += piece
    return body


async def echo(client: ClientRequest, response: ClientResponse) -> None:
    """Respond with what the handler knows of the request, and with its body."""
    body = await read_body(client)
    told = f"{client.method} {client.target} {client.content_length} {client.headers.get('X')} "
    await respond(response, told.encode() + body)


@asynccontextmanager
async def nothing_left(
    running: RunningListener, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[None]:
    """Check that peers leave nothing behind, and that an innocent client is served."""
    with no_errors_logged(caplog):
        yield
        await until_nothing_left(running)
        async with connect_http2(running.url) as client:
            assert (await client.call("GET", "/innocent")).status == 200


async def until_nothing_left(running: RunningListener) -> None:
    await until(lambda: not any(find_left_in_listener(running.listener).values()))
