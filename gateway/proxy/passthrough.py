"""Requests and answers that pass through untouched, streamed in both directions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gateway.codec.json.nesting import NestingCheck
from gateway.protocol.operations import ModelName
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import CHUNK_SIZE, ClientBody, joined, response_chunks, write
from gateway.proxy.headers import end_to_end
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route
from gateway.proxy.retry import UpstreamCall
from gateway.proxy.server_dialect import typed
from gateway.upstream.transport import Body, UpstreamRequest, UpstreamResponse


async def forward(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    deadline: Deadline,
    target: str | None = None,
    model: ModelName | None = None,
) -> None:
    """Pass a request on as it is, and the answer back; ``target`` takes the place of its own.

    ``model`` is the one that it names.
    """
    body = ClientBody(request, route.limits.request_bytes, deadline)
    dialect = route.upstream.dialect_state.dialect
    limits_chunks = dialect is None or dialect.limits_chunks
    headers = await typed(request, route.upstream, deadline)
    depth_cap = route.limits.json_depth
    with route.held.reserve() as holding:
        passed = await forwarded_body(
            request, body, depth_cap, holding, limits_chunks=limits_chunks
        )
        asked = UpstreamRequest(request.method, target or request.target, headers, passed)
        async with UpstreamCall(route, asked, deadline, model=model) as attempt:
            await forward_answer(attempt.response, answer, attempt.url, deadline)


async def forwarded_body(
    request: ClientRequest,
    body: ClientBody,
    depth_cap: int,
    holding: Reservation,
    *,
    limits_chunks: bool,
) -> Body:
    """Give the body to send: none where the client sent none, a small one as a whole.

    What is at hand as a whole can be sent again. A body that does not say its size is given as it
    comes, or in ``limits_chunks``. Raises GatewayError (400), before the server has it, for JSON
    that
    nests deeper than the cap, and 503 where too much is held.
    """
    if body.size == 0:
        # A Content-Length of 0 is passed on with an empty body, its absence with none.
        return (b"",) if "Content-Length" in request.headers else None
    if body.size is not None and body.size <= CHUNK_SIZE:
        whole = await body.whole(holding)
        NestingCheck(depth_cap).feed(whole)
        return (whole,)
    pieces = _as_deep_as_allowed(body, depth_cap)
    return joined(pieces) if limits_chunks and body.size is None else pieces


async def _as_deep_as_allowed(
    body: ClientBody, depth_cap: int
) -> AsyncIterator[bytes | memoryview]:
    walk = NestingCheck(depth_cap)
    async for chunk in body.rest():
        walk.feed(chunk)
        yield chunk


async def forward_answer(
    response: UpstreamResponse, answer: ClientResponse, url: str, deadline: Deadline
) -> None:
    """Pass an answer back as it is, each chunk when it comes."""
    await answer.start(response.status, response.reason, end_to_end(response.headers))
    async for chunk in response_chunks(response, url, deadline):
        await write(answer, chunk, deadline)
    await answer.finish()
