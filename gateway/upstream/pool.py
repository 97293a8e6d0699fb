"""The endpoints of one upstream."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from gateway.routing.balancer import least_outstanding
from gateway.upstream.base import UpstreamEndpoint


class Pool:
    """Lends endpoints to exchanges, the least busy one first."""

    def __init__(self, endpoints: Sequence[UpstreamEndpoint]) -> None:
        self._endpoints = tuple(endpoints)
        self._outstanding = [0] * len(self._endpoints)
        self._turn = 0

    def endpoint(self) -> Loan:
        """Lend an endpoint for the length of an exchange."""
        return Loan(self._endpoints, self._outstanding, self._next())

    def _next(self) -> int:
        if len(self._endpoints) == 1:
            return 0
        self._turn += 1
        return least_outstanding(self._outstanding, self._turn - 1)

    async def close(self) -> None:
        """Close the connections that no exchange uses."""
        for endpoint in self._endpoints:
            await endpoint.close()


class Loan:
    """An endpoint lent, while its context is open, or until it is given back."""

    def __init__(
        self, endpoints: Sequence[UpstreamEndpoint], outstanding: list[int], index: int
    ) -> None:
        self._endpoint = endpoints[index]
        self._outstanding = outstanding
        self._index = index

    def take(self) -> UpstreamEndpoint:
        """Count the exchange, and give the endpoint."""
        self._outstanding[self._index] += 1
        return self._endpoint

    def give_back(self) -> None:
        """Count the exchange no more."""
        self._outstanding[self._index] -= 1

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
