"""Which endpoint answers: another one, where the first cannot be reached."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from gateway.errors import GatewayError
from gateway.exchange.base import Upstream
from gateway.exchange.deadline import Deadline
from gateway.upstream.base import UpstreamEndpoint, UpstreamRequest, UpstreamResponse
from gateway.upstream.pool import Loan

_T = TypeVar("_T")


class Attempts:
    """Gives a request to an endpoint of the upstream, and the answer while its context is open.

    Where an endpoint cannot be reached, which has no effect on any server, another one is tried:
    each once, and no more than the upstream's budget allows. ``but`` are those that were tried
    before; ``model`` is the one that the request names. Raises GatewayError as the last of the
    endpoints does.
    """

    response: UpstreamResponse
    url: str

    def __init__(
        self,
        upstream: Upstream,
        request: UpstreamRequest,
        deadline: Deadline,
        but: tuple[UpstreamEndpoint, ...] = (),
        model: str | None = None,
    ) -> None:
        self._upstream = upstream
        self._request = request
        self._deadline = deadline
        self._but = but
        self._model = model

    async def __aenter__(self) -> Self:
        """Send the request; the head of an answer is there then."""
        self._loan, self.response = await reaching(
            self._upstream, self._send, self._but, self._model
        )
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
        if error is None:
            self._loan.give_back(*self._loan.judge(self.response.status))
        else:
            self._loan.end(error)

    async def _send(self, endpoint: UpstreamEndpoint) -> UpstreamResponse:
        return await _send(endpoint, self._request, self._deadline)


async def reaching(
    upstream: Upstream,
    use: Callable[[UpstreamEndpoint], Awaitable[_T]],
    but: tuple[UpstreamEndpoint, ...] = (),
    model: str | None = None,
) -> tuple[Loan, _T]:
    """Use an endpoint that can be reached; give it, taken, and what came of it.

    It has ``model``, as far as is known.
    """
    upstream.retries.request()
    tried = list(but)
    while True:
        loan = upstream.pool.endpoint(tried, model)
        endpoint = loan.take()
        try:
            return loan, await use(endpoint)
        except BaseException as error:
            loan.end(error)
            tried.append(endpoint)
            if not may_ask_another(upstream, error, tried, model):
                raise


def may_ask_another(
    upstream: Upstream,
    error: BaseException,
    tried: Sequence[UpstreamEndpoint],
    model: str | None = None,
) -> bool:
    """Tell whether a request that failed so may go to an endpoint that was not tried yet."""
    if not (isinstance(error, GatewayError) and error.kind.value.retryable):
        return False
    return upstream.pool.has_another(tried, model) and upstream.retries.retry()


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
