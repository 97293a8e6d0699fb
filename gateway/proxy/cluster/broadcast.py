"""What changes a server goes to every server, so that all of them go on answering alike."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Sequence

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import Operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import ClientBody, kept
from gateway.proxy.cluster.scatter_gather import (
    agreed,
    ask_every_endpoint,
    endpoints_of,
    pass_on,
    question,
)
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Limits, Route, Upstream
from gateway.proxy.passthrough import forward, forwarded_body
from gateway.upstream.transport import Body

TargetAt = Callable[[Upstream], str]
"""Gives the raw target under which the servers of an upstream have what is asked for."""


async def to_every_endpoint(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
    target_at: TargetAt,
    model: str | None = None,
) -> None:
    """Send a request to every endpoint, and answer as all of them did.

    ``model`` is one that they have to have, where they differ in their models.
    Raises GatewayError (502) where only some did it, which tells which, and why the others did not.
    """
    if endpoints_of(upstreams) == 1:
        await forward(request, answer, route, deadline, target_at(route.upstream))
        return
    with route.held.reserve() as holding:
        body = await whole_body(request, route.limits, deadline, holding)
        asked = await ask_every_endpoint(
            route,
            upstreams,
            lambda upstream: question(request, target_at(upstream), body),
            deadline,
            holding,
            model,
        )
        await pass_on(agreed(request, asked), answer, deadline)


async def load(
    request: ClientRequest,
    answer: ClientResponse,
    asked: Operation,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Have a model loaded or unloaded everywhere; whatever comes of it, its metadata is old."""
    is_unload = request.target.partition("?")[0].endswith("/unload")
    model = asked.model if is_unload else None  # it is loaded where it is not yet
    try:
        await to_every_endpoint(
            request, answer, route, upstreams, deadline, lambda _: request.target, model
        )
    finally:
        for upstream in upstreams:
            upstream.metadata.invalidate(asked.model or "")
            upstream.pool.refresh_models()


async def whole_body(
    request: ClientRequest, limits: Limits, deadline: Deadline, holding: Reservation
) -> Body:
    """Give all of a client's body, which several servers are to have; None where there is none.

    Raises GatewayError: 413 over the caps, 400 for a broken body, 503 where too much is held.
    """
    body = ClientBody(request, limits.request_bytes, deadline)
    _check_held(body.size or 0, limits)
    passed = await forwarded_body(request, body, limits.json_depth, holding, limits_chunks=False)
    if not isinstance(passed, AsyncIterable):
        return passed
    chunks: list[bytes] = []
    size = 0
    async for chunk in kept(passed):
        size += len(chunk)
        _check_held(size, limits)
        holding.more(len(chunk))
        chunks.append(chunk)
    return chunks


def _check_held(size: int, limits: Limits) -> None:
    if size > limits.spool_bytes:
        raise GatewayError(
            ErrorKind.TOO_LARGE,
            "a request that goes to several servers is held, and is larger than "
            f"{limits.spool_bytes} bytes (limits.spool_bytes)",
        )
