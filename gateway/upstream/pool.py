"""The endpoints of one upstream."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from gateway.routing.balancer import least_outstanding
from gateway.upstream.base import UpstreamEndpoint


class Pool:
    """Lends endpoints to exchanges, the least busy one first."""

    def __init__(self, endpoints: Sequence[UpstreamEndpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self.outstanding = [0] * len(self.endpoints)
        """Of each endpoint, the exchanges under way."""
        self.turn = 0
        """Endpoints lent so far."""

    def endpoint(self) -> Loan:
        """Lend an endpoint for the length of an exchange; it counts once it is taken."""
        if len(self.endpoints) == 1:
            return Loan(self, 0)
        return Loan(self, least_outstanding(self.outstanding, self.turn))

    async def close(self) -> None:
        """Close the connections that no exchange uses."""
        for endpoint in self.endpoints:
            await endpoint.close()


class Loan:
    """An endpoint lent, while its context is open, or until it is given back."""

    def __init__(self, pool: Pool, index: int) -> None:
        self._pool = pool
        self._index = index
        self.endpoint = pool.endpoints[index]

    def take(self) -> UpstreamEndpoint:
        """Count the exchange, and give the endpoint."""
        self._pool.outstanding[self._index] += 1
        self._pool.turn += 1
        return self.endpoint

    def give_back(self) -> None:
        """Count the exchange no more."""
        self._pool.outstanding[self._index] -= 1

    def __enter__(self) -> UpstreamEndpoint:
        """Take the endpoint."""
        return self.take()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.give_back()
