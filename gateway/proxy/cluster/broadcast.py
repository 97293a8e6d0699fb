"""Sends requests that modify servers to every endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Sequence
from contextlib import suppress
from functools import partial

from gateway.errors import GatewayError
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import ClientBody, buffer_chunks, too_large_to_buffer
from gateway.proxy.cluster.scatter_gather import (
    count_endpoints,
    make_sub_request,
    query_servers,
    send_merged,
)
from gateway.proxy.destination import Upstream
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import checked_body, passthrough
from gateway.proxy.server_dialect import wait_for_dialects

TargetFor = Callable[[Upstream], str]
"""Returns the raw target of an operation at the servers of an upstream."""

_too_large = partial(too_large_to_buffer, "a request that goes to several servers")


async def broadcast(call: Call, target_for: TargetFor, model: str | None = None) -> None:
    """Send a request to every endpoint, and the response that all agree on to the client.

    Under model discovery only endpoints that have ``model`` get it. Raises GatewayError (502) if
    only some succeeded, with the names of all and the errors.
    """
    if count_endpoints(call.upstreams) == 1:
        await passthrough(call, target_for(call.destination.upstream))
        return
    with call.reserve() as reservation:
        body = await buffer_body(call, reservation)
        sub_responses = await query_servers(
            call,
            lambda upstream: make_sub_request(call.request, target_for(upstream), body),
            reservation,
            model,
        )
        await send_merged(call, sub_responses)


async def load(call: Call) -> None:
    """Load or unload a model everywhere, and drop its cached metadata, whatever comes of it."""
    request, model = call.request, call.operation.model
    is_unload = request.target.partition("?")[0].endswith("/unload")
    for upstream in call.upstreams:
        if upstream.speaks_grpc:  # servers differ in which field of the message has the model
            with suppress(GatewayError):  # the load itself tells that a server is unreachable
                await wait_for_dialects([upstream], call.deadline)
    try:
        # An unload needs the model; a load goes where it is not yet.
        await broadcast(call, lambda _: request.target, model if is_unload else None)
    finally:
        for upstream in call.upstreams:
            upstream.metadata.invalidate(model or "")
            upstream.pool.refresh_models()


async def buffer_body(call: Call, reservation: Reservation) -> Sequence[bytes | memoryview] | None:
    """Buffer the client's body for several servers; None without a body.

    Raises GatewayError: 413 over the caps, 400 for a broken body, 503 for overload.
    """
    request, limits = call.request, call.destination.limits
    cap = limits.max_buffered_body_bytes
    body = ClientBody(request, limits.max_request_bytes, call.deadline)
    if (body.size or 0) > cap:
        raise _too_large(cap)
    checked = await checked_body(
        request, body, limits.max_json_depth, reservation, limits_chunks=False
    )
    if not isinstance(checked, AsyncIterable):
        return checked
    return await buffer_chunks(checked, reservation, cap, _too_large)
