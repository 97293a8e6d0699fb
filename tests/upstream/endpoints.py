"""Endpoints at the addresses of a test's servers."""

from collections.abc import AsyncIterator, Callable

import pytest

from gateway.upstream.http import HttpEndpoint
from tests.servers.running_gateway import nothing_left

EndpointAt = Callable[[str], HttpEndpoint]


@pytest.fixture
async def endpoint_at() -> AsyncIterator[EndpointAt]:
    """Make endpoints, which are closed, with nothing left of them, when the test is over."""
    endpoints: list[HttpEndpoint] = []

    def endpoint_at(url: str) -> HttpEndpoint:
        endpoints.append(HttpEndpoint(url, connect_time=5))
        return endpoints[-1]

    async with nothing_left():
        yield endpoint_at
        for endpoint in endpoints:
            await endpoint.close()
