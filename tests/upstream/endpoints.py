"""Endpoints for the servers of a test."""

import ssl
from collections.abc import AsyncIterator, Callable
from functools import cache

import pytest

from gateway.upstream.address import parse_server_url
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.tls import CertificateFiles, client_context
from tests.support.certificates import authority
from tests.support.gateway import no_leaks
from tests.support.servers.scripted_server import ScriptedServer

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
        endpoints.append(HttpEndpoint(parse_server_url(url, trusting_context()), connect_timeout=5))
        return endpoints[-1]

    async with no_leaks():
        yield endpoint_at
        for endpoint in endpoints:
            await endpoint.close()
