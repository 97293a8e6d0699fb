"""Which endpoint answers: another one, where the first cannot be reached."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from gateway.errors import GatewayError
from gateway.exchange.base import Upstream
from gateway.exchange.deadline import Deadline
from gateway.exchange.gate import enter, leave
from gateway.upstream.base import UpstreamEndpoint, UpstreamRequest, UpstreamResponse
from gateway.upstream.pool import Loan

_T = TypeVar("_T")


class Attempts:
    """Gives a request to an endpoint of the upstream, and the answer while its context is open.

    Where an endpoint cannot be reached, which has no effect on any server, another one is tried:
    each once, and no more than the upstream's budget allows. ``but`` are those that were tried
    before. Raises GatewayError as the last of them does, and 503 where too much is under way.
    """

    response: UpstreamResponse
    url: str

    def __init__(
        self,
        upstream: Upstream,
        request: UpstreamRequest,
        deadline: Deadline,
        but: tuple[UpstreamEndpoint, ...] = (),
    ) -> None:
        self._upstream = upstream
        self._request = request
        self._deadline = deadline
        self._but = but

    async def __aenter__(self) -> Self:
        """Send the request; the head of an answer is there then."""
        await enter(self._upstream.gates, self._deadline)
        try:
            self._loan, self.response = await reaching(self._upstream, self._send, self._but)
        except BaseException:
            leave(self._upstream.gates)
            raise
        self.url = self._loan.endpoint.url
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the endpoint go."""
        self.response.close()
        self._loan.end(error)
        leave(self._upstream.gates)

    async def _send(self, endpoint: UpstreamEndpoint) -> UpstreamResponse:
        return await _send(endpoint, self._request, self._deadline)


async def reaching(
    upstream: Upstream,
    use: Callable[[UpstreamEndpoint], Awaitable[_T]],
    but: tuple[UpstreamEndpoint, ...] = (),
) -> tuple[Loan, _T]:
    """Use an endpoint that can be reached; give it, taken, and what came of it."""
    upstream.retries.request()
    tried = list(but)
    while True:
        loan = upstream.pool.endpoint(tried)
        endpoint = loan.take()
        try:
            return loan, await use(endpoint)
        except BaseException as error:
            loan.end(error)
            tried.append(endpoint)
            if not may_ask_another(upstream, error, tried):
                raise


def may_ask_another(
    upstream: Upstream, error: BaseException, tried: Sequence[UpstreamEndpoint]
) -> bool:
    """Tell whether a request that failed so may go to an endpoint that was not tried yet."""
    if not (isinstance(error, GatewayError) and error.kind.value.retryable):
        return False
    return bool(set(upstream.pool.endpoints) - set(tried)) and upstream.retries.retry()


async def _send(
    endpoint: UpstreamEndpoint, request: UpstreamRequest, deadline: Deadline
) -> UpstreamResponse:
    """Send a request to an endpoint, whose turn it is from then on."""
    deadline.wait_for_server(endpoint.url)
    if isinstance(request.body, AsyncIterator):
        request = UpstreamRequest(
            request.method,
            request.target,
            request.headers,
            _server_next(request.body, endpoint.url, deadline),
        )
    return await endpoint.send(request)


async def _server_next(
    body: AsyncIterator[bytes | memoryview], url: str, deadline: Deadline
) -> AsyncIterator[bytes | memoryview]:
    async for chunk in body:
        deadline.wait_for_server(url)
        yield chunk
    deadline.wait_for_server(url)
