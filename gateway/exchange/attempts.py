"""Which endpoint answers: another one, where the first cannot be reached."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from gateway.errors import GatewayError
from gateway.exchange.base import Route, Upstream
from gateway.exchange.deadline import Deadline
from gateway.exchange.gate import enter, leave
from gateway.exchange.headers import check_lengths
from gateway.protocol.model_name import ModelName
from gateway.routing.retry import CAREFUL, RetryPolicy
from gateway.upstream.base import Body, UpstreamEndpoint, UpstreamRequest, UpstreamResponse
from gateway.upstream.pool import Loan, Outcome

_T = TypeVar("_T")


class Attempts:
    """Gives a request to an endpoint of a route, and the answer while its context is open.

    Where an endpoint cannot be reached, which has no effect on any server, another one is tried;
    where it fails in other ways, if the route says so and all of the body is at hand. Each is
    tried once, and no more than the upstream's budget allows. ``but`` are those that were tried
    before; ``model`` is the one that the request names. Raises GatewayError as the last of the
    endpoints does, 503 where too much is under way, and 400 for a head that no server there takes.
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
        self._gates = route.gates
        self._request = request
        self._deadline = deadline
        repeatable = can_be_repeated(request.body)
        key = route.upstream.pool.key_of(request.headers)
        self._again = Again(route.upstream, route.retry, repeatable, list(but), model, key)

    async def __aenter__(self) -> Self:
        """Send the request; the head of an answer is there then."""
        check_lengths(self._request, self._again.upstream.speech.dialect)
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
            self._loan.give_back(*self._loan.judge(self.response.status))
        else:
            self._loan.end(self._deadline.cause(error))
        leave(self._gates)

    async def _attempt(self) -> None:
        """Send the request until there is an answer for the client."""
        again = self._again
        self._loan, self.response = await self._reach()
        while again.after_answer(self.response.status, self._loan.endpoint):
            self.response.close()
            self._loan.give_back(Outcome.FAILED, f"it answered {self.response.status}")
            self._loan, self.response = await self._reach()

    async def _reach(self) -> tuple[Loan, UpstreamResponse]:
        return await _reach(self._again, self._send, self._deadline)

    async def _send(self, endpoint: UpstreamEndpoint) -> UpstreamResponse:
        return await _send(endpoint, self._request, self._deadline)


class Again:
    """Tells whether a request may be sent to another endpoint, which counts it as a retry.

    ``tried`` are those that it was sent to; ``repeatable`` tells whether all of it is at hand;
    ``model`` is the one that it names, ``key`` what its endpoint is chosen by.
    """

    def __init__(
        self,
        upstream: Upstream,
        policy: RetryPolicy,
        repeatable: bool,
        tried: list[UpstreamEndpoint],
        model: ModelName | None = None,
        key: str | None = None,
    ) -> None:
        self.upstream = upstream
        self.key = key
        self.model = model
        self.tried = tried
        self._policy = policy
        self._repeatable = repeatable

    def after_failure(self, error: BaseException, endpoint: UpstreamEndpoint) -> bool:
        """Tell it of one that has failed at an endpoint."""
        self.tried.append(endpoint)
        if not isinstance(error, GatewayError):
            return False
        return self._policy.after(error.kind, self._repeatable) and self._allowed()

    def after_answer(self, status: int, endpoint: UpstreamEndpoint) -> bool:
        """Tell it of one that an endpoint has answered with this status."""
        if status not in self._policy.statuses or not self._repeatable:
            return False
        self.tried.append(endpoint)
        return self._allowed()

    def _allowed(self) -> bool:
        """Tell whether there is another endpoint, and the budget allows to ask it."""
        pool = self.upstream.pool
        return pool.has_another(self.tried, self.model) and self.upstream.retries.retry(pool.turn)


def can_be_repeated(body: Body) -> bool:
    """Tell whether a body can be sent more than once: what has streamed through is gone."""
    return not isinstance(body, AsyncIterator)


async def reaching(
    upstream: Upstream,
    use: Callable[[UpstreamEndpoint], Awaitable[_T]],
    deadline: Deadline,
    model: ModelName | None = None,
) -> tuple[Loan, _T]:
    """Use an endpoint that can be reached; give it, taken, and what came of it.

    It has ``model``, as far as is known.
    """
    return await _reach(Again(upstream, CAREFUL, True, [], model), use, deadline)


async def _reach(
    again: Again, use: Callable[[UpstreamEndpoint], Awaitable[_T]], deadline: Deadline
) -> tuple[Loan, _T]:
    while True:
        loan = again.upstream.pool.endpoint(again.tried, again.model, again.key)
        endpoint = loan.take()
        try:
            return loan, await use(endpoint)
        except BaseException as error:
            loan.end(deadline.cause(error))
            if not again.after_failure(error, endpoint):
                raise


async def _send(
    endpoint: UpstreamEndpoint, request: UpstreamRequest, deadline: Deadline
) -> UpstreamResponse:
    """Send a request to an endpoint, whose turn it is from then on."""
    deadline.wait_for_server(endpoint.url)
    if isinstance(request.body, AsyncIterable):
        body = _ServerNext(request.body, endpoint.url, deadline)
        once = isinstance(request.body, AsyncIterator)
        sent = aiter(body) if once else body
        request = UpstreamRequest(request.method, request.target, request.headers, sent)
    return await endpoint.send(request)


class _ServerNext(AsyncIterable[bytes | memoryview]):
    """Chunks to come of a body; with each of them it is the server's turn."""

    def __init__(
        self, body: AsyncIterable[bytes | memoryview], url: str, deadline: Deadline
    ) -> None:
        self._body = body
        self._url = url
        self._deadline = deadline

    async def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the chunks, from the start."""
        async for chunk in self._body:
            self._deadline.wait_for_server(self._url)
            yield chunk
        self._deadline.wait_for_server(self._url)
