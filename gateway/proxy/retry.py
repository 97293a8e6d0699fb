"""Which endpoint answers: another one, where the first cannot be reached."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from gateway.errors import GatewayError, strip_tracebacks
from gateway.protocol.operations import ModelName
from gateway.proxy.admission.concurrency_limit import enter, leave
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.headers import check_lengths
from gateway.proxy.interfaces import Route, Upstream
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryPolicy
from gateway.upstream.pool.lease import Lease
from gateway.upstream.transport import UpstreamEndpoint, UpstreamRequest, UpstreamResponse

_T = TypeVar("_T")


class UpstreamCall:
    """Gives a request to an endpoint of a route, and the answer while its context is open.

    Where an endpoint cannot be reached, which has no effect on any server, another one is tried;
    where it fails in other ways, if the route says so. Either only while all of the body is at
    hand: of one that comes but once, nothing may have been taken. Each is tried once, and no more
    than the upstream's budget allows. ``but`` are those that were tried before; ``model`` is the
    one that the request names. Raises GatewayError as the last of the endpoints does, 503 where
    too much is under way, and 400 for a head that no server there takes.
    """

    response: UpstreamResponse
    url: str

    def __init__(
        self,
        route: Route,
        request: UpstreamRequest,
        deadline: Deadline,
        but: tuple[UpstreamEndpoint, ...] = (),
        model: ModelName | None = None,
    ) -> None:
        self._gates = route.concurrency_limits
        self._request = request
        self._deadline = deadline
        key = route.upstream.pool.hash_key_of(request.headers)
        self._again = RetryState(route.upstream, route.retry, list(but), model, key)

    async def __aenter__(self) -> Self:
        """Send the request; the head of an answer is there then."""
        check_lengths(self._request, self._again.upstream.dialect_state.dialect)
        await enter(self._gates, self._deadline)
        try:
            await self._attempt()
        except BaseException:
            leave(self._gates)
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
        if error is None:
            self._loan.release(*self._loan.classify_status(self.response.status))
        else:
            self._loan.finish(self._deadline.cause(error))
        leave(self._gates)

    async def _attempt(self) -> None:
        """Send the request until there is an answer for the client."""
        again = self._again
        self._loan, self.response = await self._reach()
        while again.should_retry_status(self.response.status, self._loan.endpoint):
            self.response.close()
            self._loan.release(*self._loan.classify_retried(self.response.status))
            self._loan, self.response = await self._reach()

    async def _reach(self) -> tuple[Lease, UpstreamResponse]:
        return await _reach(self._again, self._send, self._deadline)

    async def _send(self, endpoint: UpstreamEndpoint) -> UpstreamResponse:
        self._deadline.expect_server(endpoint.url)
        request = self._request
        if isinstance(request.body, AsyncIterable):
            body = _ServerNext(request.body, endpoint.url, self._deadline, self._again)
            once = isinstance(request.body, AsyncIterator)
            request = replace(request, body=aiter(body) if once else body)
        return await endpoint.send(request)


class RetryState:
    """Tells whether a request may be sent to another endpoint, which counts it as a retry.

    ``tried`` are those that it was sent to; ``model`` is the one that it names, ``key`` what its
    endpoint is chosen by.
    """

    repeatable: bool = True
    """All of it is at hand; to be unset when what was taken of it is gone."""

    def __init__(
        self,
        upstream: Upstream,
        policy: RetryPolicy,
        tried: list[UpstreamEndpoint],
        model: ModelName | None = None,
        key: str | None = None,
    ) -> None:
        self.upstream = upstream
        self.key = key
        self.model = model
        self.tried = tried
        self._policy = policy

    def should_retry_error(self, error: BaseException, endpoint: UpstreamEndpoint) -> bool:
        """Tell it of one that has failed at an endpoint."""
        self.tried.append(endpoint)
        if not isinstance(error, GatewayError):
            return False
        return self._policy.allows(error.kind, self.repeatable) and self._allowed()

    def should_retry_status(self, status: int, endpoint: UpstreamEndpoint) -> bool:
        """Tell it of one that an endpoint has answered with this status."""
        if status not in self._policy.statuses or not self.repeatable:
            return False
        self.tried.append(endpoint)
        return self._allowed()

    def _allowed(self) -> bool:
        """Tell whether there is another endpoint, and the budget allows to ask it."""
        pool = self.upstream.pool
        if not pool.has_alternative(self.tried, self.model):
            return False
        return self.upstream.retry_budget.try_spend(pool.leases_total, sum(pool.outstanding))


async def use_reachable_endpoint(
    upstream: Upstream,
    use: Callable[[UpstreamEndpoint], Awaitable[_T]],
    deadline: Deadline,
    model: ModelName | None = None,
) -> tuple[Lease, _T]:
    """Use an endpoint that can be reached; give it, taken, and what came of it.

    It has ``model``, as far as is known.
    """
    return await _reach(RetryState(upstream, SAFE_RETRIES_ONLY, [], model), use, deadline)


async def _reach(
    again: RetryState, use: Callable[[UpstreamEndpoint], Awaitable[_T]], deadline: Deadline
) -> tuple[Lease, _T]:
    while True:
        loan = again.upstream.pool.lease(again.tried, again.model, again.key)
        endpoint = loan.acquire()
        try:
            return loan, await use(endpoint)
        except BaseException as error:
            loan.finish(deadline.cause(error))
            if not again.should_retry_error(error, endpoint):
                raise
            strip_tracebacks(error)


class _ServerNext(AsyncIterable[bytes | memoryview]):
    """Chunks to come of a body; with each of them it is the server's turn.

    ``again`` is told when it is begun to be taken, if it comes but once.
    """

    def __init__(
        self,
        body: AsyncIterable[bytes | memoryview],
        url: str,
        deadline: Deadline,
        again: RetryState,
    ) -> None:
        self._body = body
        self._url = url
        self._deadline = deadline
        self._again = again

    async def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the chunks, from the start."""
        # Even the wait for a first chunk cannot be begun anew: it is cancelled with the attempt.
        self._again.repeatable = not isinstance(self._body, AsyncIterator)
        async for chunk in self._body:
            self._deadline.expect_server(self._url)
            yield chunk
        self._deadline.expect_server(self._url)
