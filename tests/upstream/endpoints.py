"""Endpoints for the servers of a test."""

import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import pytest

from gateway.system.certificates import CertificateFiles, client_context
from gateway.upstream.address import parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.endpoint import HttpEndpoint
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
