"""The servers' own settings: written at every server, and compared where they are read."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.cluster.broadcast import TargetAt, to_every_endpoint
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    agreed,
    ask_every_endpoint,
    endpoints_of,
    pass_on,
    question,
)
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route, Upstream
from gateway.proxy.passthrough import forward

DIFFERING_ENDPOINTS = "Tensorgate-Differing-Endpoints"
"""The header that names the endpoints whose settings differ from those of the answer."""


async def server_settings(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
    target_at: TargetAt,
    model: str | None = None,
) -> None:
    """Read settings of servers, or write them: those of ``model``, or their own."""
    if request.method == "POST":
        await to_every_endpoint(request, answer, route, upstreams, deadline, target_at, model)
    elif request.method == "GET" and endpoints_of(upstreams) > 1:
        with route.held.reserve() as holding:
            await _read(request, answer, route, upstreams, deadline, target_at, holding, model)
    else:
        await forward(request, answer, route, deadline, target_at(route.upstream))


async def log_setting(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Read what servers log, or tell them what to log."""
    await server_settings(request, answer, route, upstreams, deadline, lambda _: request.target)


async def _read(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
    target_at: TargetAt,
    holding: Reservation,
    model: str | None,
) -> None:
    """Answer with the first endpoint's settings, and tell where they are others."""
    asked = await ask_every_endpoint(
        route,
        upstreams,
        lambda upstream: question(request, target_at(upstream)),
        deadline,
        holding,
        model,
    )
    found = {each.name: each.good for each in asked}
    first = next(filter(None, found.values()), None)
    if first is None:
        await pass_on(agreed(request, asked), answer, deadline)
        return
    wanted = _settings(first)
    differing = [url for url, reply in found.items() if reply and _settings(reply) != wanted]
    failed = [url for url, reply in found.items() if reply is None]
    named = {DIFFERING_ENDPOINTS: differing, FAILED_ENDPOINTS: failed}
    await pass_on(
        first, answer, deadline, {name: ", ".join(urls) for name, urls in named.items() if urls}
    )


def _settings(reply: BufferedResponse) -> object:
    """Read settings, in which the order of the names does not count."""
    try:
        return orjson.loads(reply.body)
    except ValueError:
        return reply.body
