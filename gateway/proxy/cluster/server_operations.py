"""Operations of servers as such: health, metadata, log and trace settings, and the load of models.

Requests that modify servers go to every endpoint. Settings are compared when they are read.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from gateway.errors import Audience, ErrorKind, GatewayError, ServerName, upstream_name
from gateway.protocol.dialect_detection import add_binary_extension, merge_server_metadata
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.retry import send_call
from gateway.proxy.body_io import ClientBody, buffer_chunks, too_large_to_buffer
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    count_endpoints,
    make_sub_request,
    merge_responses,
    query_servers,
    send_buffered,
    send_json,
    send_merged,
    server_names,
)
from gateway.proxy.destination import Upstream
from gateway.proxy.headers import with_body
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import (
    ResponseRelay,
    checked_body,
    passthrough,
    relay_response,
    relay_rewritten,
)
from gateway.proxy.server_dialect import wait_for_dialects
from gateway.sizes import MAX_SERVER_DOCUMENT
from gateway.upstream.content_decoding import decode_response
from gateway.upstream.transport import UpstreamRequest

# The protocol requires an object as the body. Triton sends none, and its clients read the status;
# KServe's client reads the object.


async def live(call: Call) -> None:
    """Report that the gateway is live, whatever its servers do."""
    await send_json(call, b'{"live":true}')


async def ready(call: Call) -> None:
    """Report that the gateway is ready; raises GatewayError (503) that tells what is not."""
    readiness = call.readiness
    endpoints = f"the endpoints of {', '.join(readiness.names)}"
    call.deadline.expect_server(ServerName(endpoints, endpoints))
    unready = await readiness.check()
    if unready:
        public_message = f"not ready: {readiness.public_reason}"
        raise GatewayError(
            ErrorKind.NOT_READY, f"not ready: {unready}", public_message=public_message
        )
    await send_json(call, b'{"ready":true}')


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


DIFFERING_ENDPOINTS = "Tensorgate-Differing-Endpoints"
"""The response header that names endpoints with other settings than those of the response."""

_log = logging.getLogger("tensorgate.trace")


async def log_settings(call: Call) -> None:
    """Read or write the log settings of servers."""
    await _server_settings(call, lambda _: call.request.target)


async def trace_settings(call: Call) -> None:
    """Read or write trace settings, at the path that each server has for them.

    Raises GatewayError (501), before any server is queried, that names upstreams without the
    extension.
    """
    await wait_for_dialects(call.upstreams, call.deadline)
    unsupported = [each for each in call.upstreams if each.dialect.trace is None]
    if unsupported:
        raise _no_trace_extension(unsupported)
    operation = call.operation
    query = "".join(call.request.target.partition("?")[1:])

    def target_for(upstream: Upstream) -> str:
        dialect = upstream.dialect
        if dialect.trace is None:
            raise _no_trace_extension([upstream])  # another server was detected meanwhile
        if operation.version is not None and not dialect.trace.per_version:
            _log.info(
                "trace settings of version %s of model %s: a %s server has one set per model, "
                "which all versions share",
                operation.version,
                operation.model,
                dialect.name,
            )
        return dialect.trace.path(operation.model, operation.version) + query

    await _server_settings(call, target_for, operation.model)


async def _server_settings(call: Call, target_for: TargetFor, model: str | None = None) -> None:
    """Read or write settings of servers: their own, or those of ``model``."""
    if call.request.method == "POST":
        await broadcast(call, target_for, model)
    elif call.request.method == "GET" and count_endpoints(call.upstreams) > 1:
        await _compare_settings(call, target_for, model)
    else:
        await passthrough(call, target_for(call.destination.upstream))


async def _compare_settings(call: Call, target_for: TargetFor, model: str | None) -> None:
    """Send the first endpoint's settings, with headers that name endpoints that differ or fail."""
    with call.reserve() as reservation:
        sub_responses = await query_servers(
            call,
            lambda upstream: make_sub_request(call.request, target_for(upstream)),
            reservation,
            model,
        )
        failed = [each for each in sub_responses if not each.success]
        first = next((each.success for each in sub_responses if each.success), None)
        if first is None:
            await send_merged(call, failed)
            return
        settings = _parse_settings(first)
        differing = [
            each
            for each in sub_responses
            if each.success and _parse_settings(each.success) != settings
        ]
        headers = server_names(DIFFERING_ENDPOINTS, differing, Audience.OPERATORS)
        headers |= server_names(FAILED_ENDPOINTS, failed, Audience.OPERATORS)
        await send_buffered(call, first, headers)


def _parse_settings(response: BufferedResponse) -> object:
    """Parse settings, so that the order of their names does not count."""
    try:
        return orjson.loads(response.body)
    except ValueError:
        return response.body


def _no_trace_extension(upstreams: Sequence[Upstream]) -> GatewayError:
    names = [f"{upstream_name(each.name)} ({each.dialect.name})" for each in upstreams]
    verb = "lacks" if len(names) == 1 else "lack"
    return GatewayError(ErrorKind.UNSUPPORTED, f"{' and '.join(names)} {verb} the trace extension")


async def server_metadata(call: Call) -> None:
    """Send the server's metadata, with the binary extension added.

    With several upstreams it is that of the first one, with the extensions that all share.
    """
    request = make_sub_request(call.request, call.request.target)
    if len(call.upstreams) == 1:
        await _relay_metadata(call, request)
        return
    with call.reserve() as reservation:
        sub_responses = await query_servers(
            call, lambda _: request, reservation, queries_all=lambda _: False
        )
        first = merge_responses(call.request, sub_responses)
        succeeded = [each for each in sub_responses if each.success]
        servers = [each.parse(_as_object, "valid server metadata") for each in succeeded]
        if not servers:
            await send_buffered(call, first)
            return
        document = merge_server_metadata(servers)
        call.deadline.expect_client()
        headers = with_body(first.headers, {})
        await call.response.send(first.status, first.reason, headers, document)


async def _relay_metadata(call: Call, request: UpstreamRequest) -> None:
    async with send_call(call, request, to_any=True) as upstream_call:
        received, server = upstream_call.response, upstream_call.server
        relay = ResponseRelay(received, server, call.response, call.destination, call.deadline)
        if received.status != 200:
            await relay_response(relay)
            return
        relay = replace(relay, upstream_response=decode_response(received, server))
        await relay_rewritten(relay, relay.chunks(), add_binary_extension, MAX_SERVER_DOCUMENT)


def _as_object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError
    return document
