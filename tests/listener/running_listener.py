"""A listener at work, on a plain address or on one with TLS."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from multidict import CIMultiDict

from gateway.listener.dispatcher import RequestHandler
from gateway.listener.server import HttpListener
from gateway.listener.sockets import tcp_sockets
from gateway.listener.tls import ReloadingTlsContext, TlsFiles
from gateway.observe.access_log import AccessLog
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.support.addresses import HOST
from tests.support.certificates import certificate_files, server_certificate
from tests.support.gateway import no_leaks


class Listening:
    """A listener at work, at an address of its own."""

    def __init__(self, listener: HttpListener, sock: socket.socket, url: str) -> None:
        self.listener = listener
        self.sock = sock
        self.url = url
        self.is_tls = url.startswith("https:")


class _Spoken:
    """What is spoken on the listener's address."""

    tls: ReloadingTlsContext | None = None


@pytest.fixture(autouse=True, params=["http", "https"])
def spoken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test over TLS too: all that holds on a plain connection holds there."""
    if request.param == "https":
        files = TlsFiles(*certificate_files(tmp_path, server_certificate()))
        monkeypatch.setattr(_Spoken, "tls", ReloadingTlsContext(files))
    return str(request.param)


@asynccontextmanager
async def listening(
    exchange: RequestHandler, access_log: AccessLog | None = None
) -> AsyncIterator[Listening]:
    """Have a listener make such exchanges; in the end it drains, and nothing of it is left."""
    async with no_leaks():
        listener = HttpListener(exchange, access_log, tls=_Spoken.tls)
        (sock,) = tcp_sockets(HOST, 0)
        scheme = "http" if _Spoken.tls is None else "https"
        url = "{}://{}:{}".format(scheme, *sock.getsockname())
        await listener.listen(sock)
        yield Listening(listener, sock, url)
        await listener.drain(0.05, 0.05)


async def send(answer: ClientResponse, body: bytes, **headers: str) -> None:
    """Answer with a body that is there as a whole."""
    await answer.start(200, "", CIMultiDict({"Content-Length": str(len(body)), **headers}))
    await answer.write(body)
    await answer.finish()


async def whole_body(client: ClientRequest) -> bytes:
    """Read a request's body to its end."""
    body = b""
    while piece := await client.read():
        body += piece
    return body


async def echo(client: ClientRequest, answer: ClientResponse) -> None:
    """Answer with what the exchange is told of a request, and with its body."""
    body = await whole_body(client)
    told = f"{client.method} {client.target} {client.content_length} {client.headers.get('X')} "
    await send(answer, told.encode() + body)
