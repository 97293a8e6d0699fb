"""Which endpoint answers: another one, where the first cannot be reached."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from gateway.errors import GatewayError, without_frames
from gateway.protocol.model_name import ModelName
from gateway.proxy.admission.concurrency_limit import enter, leave
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.headers import check_lengths
from gateway.proxy.interfaces import Route, Upstream
from gateway.routing.retry import CAREFUL, RetryPolicy
from gateway.upstream.pool.lease import Loan
from gateway.upstream.transport import UpstreamEndpoint, UpstreamRequest, UpstreamResponse

_T = TypeVar("_T")


class Attempts:
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
        self._gates = route.gates
        self._request = request
        self._deadline = deadline
        key = route.upstream.pool.key_of(request.headers)
        self._again = Again(route.upstream, route.retry, list(but), model, key)

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
            self._loan.give_back(*self._loan.retried(self.response.status))
            self._loan, self.response = await self._reach()

    async def _reach(self) -> tuple[Loan, UpstreamResponse]:
        return await _reach(self._again, self._send, self._deadline)

    async def _send(self, endpoint: UpstreamEndpoint) -> UpstreamResponse:
        self._deadline.wait_for_server(endpoint.url)
        request = self._request
        if isinstance(request.body, AsyncIterable):
            body = _ServerNext(request.body, endpoint.url, self._deadline, self._again)
            once = isinstance(request.body, AsyncIterator)
            request = replace(request, body=aiter(body) if once else body)
        return await endpoint.send(request)


class Again:
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

    def after_failure(self, error: BaseException, endpoint: UpstreamEndpoint) -> bool:
        """Tell it of one that has failed at an endpoint."""
        self.tried.append(endpoint)
        if not isinstance(error, GatewayError):
            return False
        return self._policy.after(error.kind, self.repeatable) and self._allowed()

    def after_answer(self, status: int, endpoint: UpstreamEndpoint) -> bool:
        """Tell it of one that an endpoint has answered with this status."""
        if status not in self._policy.statuses or not self.repeatable:
            return False
        self.tried.append(endpoint)
        return self._allowed()

    def _allowed(self) -> bool:
        """Tell whether there is another endpoint, and the budget allows to ask it."""
        pool = self.upstream.pool
        if not pool.has_another(self.tried, self.model):
            return False
        return self.upstream.retries.retry(pool.turn, sum(pool.outstanding))


async def reaching(
    upstream: Upstream,
    use: Callable[[UpstreamEndpoint], Awaitable[_T]],
    deadline: Deadline,
    model: ModelName | None = None,
) -> tuple[Loan, _T]:
    """Use an endpoint that can be reached; give it, taken, and what came of it.

    It has ``model``, as far as is known.
    """
    return await _reach(Again(upstream, CAREFUL, [], model), use, deadline)


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
            without_frames(error)


class _ServerNext(AsyncIterable[bytes | memoryview]):
    """Chunks to come of a body; with each of them it is the server's turn.

    ``again`` is told when it is begun to be taken, if it comes but once.
    """

    def __init__(
        self,
        body: AsyncIterable[bytes | memoryview],
        url: str,
        deadline: Deadline,
        again: Again,
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
            self._deadline.wait_for_server(self._url)
            yield chunk
        self._deadline.wait_for_server(self._url)
