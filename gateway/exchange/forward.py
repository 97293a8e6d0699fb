"""Requests and answers that pass through untouched, streamed in both directions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gateway.exchange.base import ClientAnswer, ClientRequest, Route
from gateway.exchange.deadline import Deadline
from gateway.exchange.headers import end_to_end
from gateway.exchange.pump import ClientBody, response_chunks, write
from gateway.upstream.base import Body, UpstreamEndpoint, UpstreamRequest, UpstreamResponse


async def forward(
    request: ClientRequest,
    answer: ClientAnswer,
    route: Route,
    deadline: Deadline,
    target: str | None = None,
) -> None:
    """Pass a request on as it is, and the answer back; ``target`` takes the place of its own."""
    body = ClientBody(request, route.limits.request_bytes, deadline)
    with route.upstream.pool.endpoint() as endpoint:
        response = await send(
            endpoint,
            UpstreamRequest(
                request.method,
                target or request.target,
                end_to_end(request.headers),
                forwarded_body(request, body),
            ),
            deadline,
        )
        try:
            await forward_answer(response, answer, endpoint.url, deadline)
        finally:
            response.close()


def forwarded_body(request: ClientRequest, body: ClientBody) -> Body:
    """Give the body to send: none where the client sent none."""
    if body.size == 0:
        # A Content-Length of 0 is passed on with an empty body, its absence with none.
        return (b"",) if "Content-Length" in request.headers else None
    return body.rest()


async def send(
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


async def forward_answer(
    response: UpstreamResponse, answer: ClientAnswer, url: str, deadline: Deadline
) -> None:
    """Pass an answer back as it is, each chunk when it comes."""
    await answer.start(response.status, response.reason, end_to_end(response.headers))
    async for chunk in response_chunks(response, url, deadline):
        await write(answer, chunk, deadline)
    await answer.finish()
