"""Log and trace settings of servers: written at every server, compared when they are read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import orjson

from gateway.errors import Audience, ErrorKind, GatewayError, upstream_name
from gateway.proxy.cluster.broadcast import TargetFor, broadcast
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    count_endpoints,
    make_sub_request,
    query_servers,
    send_buffered,
    send_merged,
    server_names,
)
from gateway.proxy.destination import Upstream
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import passthrough
from gateway.proxy.server_dialect import wait_for_dialects

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
