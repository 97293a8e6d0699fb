"""The endpoints of one upstream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gateway.routing.balancer import least_outstanding
from gateway.upstream.base import UpstreamEndpoint


class Pool:
    """Lends endpoints to exchanges, the least busy one first."""

    def __init__(self, endpoints: Sequence[UpstreamEndpoint]) -> None:
        self._endpoints = tuple(endpoints)
        self._outstanding = [0] * len(self._endpoints)
        self._turn = 0

    @contextmanager
    def endpoint(self) -> Iterator[UpstreamEndpoint]:
        """Lend an endpoint for the length of an exchange."""
        index = least_outstanding(self._outstanding, self._turn)
        self._turn += 1
        self._outstanding[index] += 1
        try:
            yield self._endpoints[index]
        finally:
            self._outstanding[index] -= 1

    async def close(self) -> None:
        """Close the connections that no exchange uses."""
        for endpoint in self._endpoints:
            await endpoint.close()
