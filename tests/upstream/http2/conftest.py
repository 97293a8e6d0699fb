import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import cache
from typing import Any

import pytest

from gateway.system.certificates import CertificateFiles, client_context
from gateway.upstream.address import parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http2.endpoint import Http2Endpoint
from tests.support.certificates import authority
from tests.support.gateway import no_leaks
from tests.support.servers.scripted_server import Script, ScriptedServer


@cache
def http2_context() -> ssl.SSLContext:
    """Make a TLS context for HTTP/2 that trusts the tests' authority."""
    context = client_context(CertificateFiles(), is_http2=True)
    authority().configure_trust(context)
    return context


Http2EndpointAt = Callable[..., Http2Endpoint]


@pytest.fixture
async def http2_at() -> AsyncIterator[Http2EndpointAt]:
    """Make HTTP/2 endpoints; they are closed after the test, and nothing may be left of them."""
    endpoints: list[Http2Endpoint] = []

    def http2_at(url: str, **options: Any) -> Http2Endpoint:
        address = parse_server_url(url.replace("http", "grpc"), http2_context())
        names = {field.name for field in fields(EndpointOptions)}
        common = {name: options.pop(name) for name in names & options.keys()}
        made = EndpointOptions(**{"connect_timeout": 5.0, **common})
        endpoints.append(Http2Endpoint(address, made, **options))
        return endpoints[-1]

    async with no_leaks():
        yield http2_at
        for endpoint in endpoints:
            await endpoint.close()


@asynccontextmanager
async def connected(
    http2_at: Http2EndpointAt, *scripts: Script, **options: object
) -> AsyncIterator[tuple[ScriptedServer, Http2Endpoint]]:
    """Run a server that plays scripts, and make an endpoint for it."""
    async with ScriptedServer(*scripts) as server:
        yield server, http2_at(server.url, **options)
