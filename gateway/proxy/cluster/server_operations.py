"""Operations of servers as such: health, metadata, settings, loads, model lists and statistics.

Requests that modify servers go to every endpoint. Settings are compared when they are read. Models
are listed for V2 and V1 clients; each server is asked for the list that its dialect has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from gateway.errors import Audience, ErrorKind, GatewayError, ServerName, upstream_name
from gateway.protocol.dialect_detection import add_binary_extension, merge_server_metadata
from gateway.protocol.operations import model_path
from gateway.protocol.v1 import (
    MODELS_PATH,
    error_document,
    models_document,
    ready_document,
    ready_model_names,
    reports_ready,
    unseen_models,
    write_entries,
)
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.retry import send_call
from gateway.proxy.body_io import (
    ClientBody,
    ResponseRelay,
    buffer_chunks,
    checked_body,
    passthrough,
    relay_response,
    relay_rewritten,
    too_large_to_buffer,
)
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    SubResponse,
    count_endpoints,
    make_sub_request,
    merge_responses,
    query_servers,
    read_response,
    send_buffered,
    send_json,
    send_merged,
    server_names,
)
from gateway.proxy.destination import Upstream
from gateway.proxy.headers import with_body
from gateway.proxy.interfaces import Call
from gateway.proxy.server_dialect import prepare_dialect, wait_for_dialects
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
    checked = await checked_body(call, body, reservation, limits_chunks=False)
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


_FULL_INDEX = b"{}"
"""A request for the whole index; MLServer does not accept an empty body."""

_INDEX = "/v2/repository/index"

_NO_INDEX_STATUSES = frozenset((400, 401, 403, 404, 405, 501))
"""Statuses of a server that has no index, or none for this client.

A single server then gets the request itself, and may have a response of its own.
"""


_DETECTION_SHARE = 0.5
"""The share of the time for the detection of dialects; the rest is for the lists."""
_NO_LIST_STATUSES = frozenset((404, 405, 501))
"""Statuses of a server without a list. Others may be about the client, or temporary."""


async def _query_model_lists(
    call: Call, index_request: UpstreamRequest, reservation: Reservation
) -> tuple[list[SubResponse], list[SubResponse]]:
    """Query one endpoint of each upstream, or all under model discovery, for its models.

    Return the lists, errors among them, and the responses of the servers that have no list.
    KServe has no repository index and is queried for its V1 list. All others get the
    ``index_request``, servers of unknown dialect too: they are named with their error. Raises
    GatewayError as ``query_servers``.
    """
    await _wait_for_dialects(call.upstreams, call.deadline)
    v1_request = make_sub_request(call.request, MODELS_PATH, method="GET")
    v1_request.headers.popall("Content-Type", None)  # that of a body for the index
    sub_responses = await query_servers(
        call,
        lambda upstream: v1_request if _speaks_v1(upstream) else index_request,
        reservation,
        queries_all=lambda upstream: upstream.pool.discovers_models,
    )
    by_name = {upstream.name: upstream for upstream in call.upstreams}
    lists: list[SubResponse] = []
    without_list: list[SubResponse] = []
    for each in sub_responses:
        has_none = _has_no_list(each, by_name[each.upstream], index_request)
        (without_list if has_none else lists).append(each)
    return lists, without_list


def _are_complete(lists: Sequence[SubResponse]) -> bool:
    """Tell whether there is a list, and none failed."""
    return bool(lists) and all(each.success for each in lists)


async def _wait_for_dialects(upstreams: Sequence[Upstream], deadline: Deadline) -> None:
    """Wait until each dialect is known, or its detection failed.

    A server that hangs leaves the others time for their lists.
    """

    async def wait_for(upstream: Upstream, part: Deadline) -> None:
        with contextlib.suppress(GatewayError), part:
            await wait_for_dialects([upstream], part)

    unknown = [upstream for upstream in upstreams if upstream.dialect_state.dialect is None]
    if unknown:
        with deadline.suspended_for_parts():
            async with asyncio.TaskGroup() as group:
                for upstream in unknown:
                    group.create_task(wait_for(upstream, deadline.part(_DETECTION_SHARE)))


def _speaks_v1(upstream: Upstream) -> bool:
    return upstream.dialect_state.dialect is not None and upstream.dialect.speaks_v1


def _has_no_list(
    sub_response: SubResponse, upstream: Upstream, index_request: UpstreamRequest
) -> bool:
    """Tell whether a server says that it has no list, and never will."""
    if not isinstance(sub_response.result, BufferedResponse):
        return False
    dialect, status = upstream.dialect_state.dialect, sub_response.result.status
    if dialect is not None and not dialect.has_model_list:
        return status == 400 or status in _NO_LIST_STATUSES
    # Servers with an index refuse GET as well: the specification has POST.
    return status in _NO_LIST_STATUSES and (index_request.method == "POST" or _speaks_v1(upstream))


async def repository_index(call: Call) -> None:
    """List the models of all upstreams, each with the name of its upstream.

    Under model discovery every endpoint is queried, and its upstream has the models of all. Entries
    of KServe have neither version nor state, as its list has none. A header names the servers
    without a list. Raises GatewayError (502) that names the servers that fail: an index without
    their models would say that there are none.
    """
    with call.reserve() as reservation:
        body = await buffer_body(call, reservation)
        if call.request.method == "POST" and not any(body or ()):
            body = (_FULL_INDEX,)
        index_request = make_sub_request(call.request, call.request.target, body)
        lists, without_list = await _query_model_lists(call, index_request, reservation)
        if not _are_complete(lists):
            await send_merged(call, lists or without_list)
            return
        seen: dict[str, set[tuple[str, str]]] = defaultdict(set)

        def new_models(source: SubResponse, document: Any) -> bytes:
            # Endpoints of an upstream may list the same.
            models = unseen_models(document, seen[source.upstream])
            return write_entries(models, upstream=source.upstream)

        entries = await _merge_entries(call, lists, new_models)
        headers = server_names(FAILED_ENDPOINTS, without_list, Audience.CLIENTS)
        await send_json(call, b"[%b]" % entries, headers)


async def statistics(call: Call) -> None:
    """Send the statistics of all endpoints, each with the names of upstream and endpoint.

    A header names the endpoints that fail: the counts of the others are true without them.
    """
    request = make_sub_request(call.request, call.request.target)
    with call.reserve() as reservation:
        sub_responses = await query_servers(call, lambda _: request, reservation)
        failed = [each for each in sub_responses if not each.success]
        if len(failed) == len(sub_responses):
            await send_merged(call, sub_responses)
            return

        def statistics_of(source: SubResponse, document: Any) -> bytes:
            models = document["model_stats"]
            return write_entries(models, upstream=source.upstream, endpoint=source.server.url)

        entries = await _merge_entries(call, sub_responses, statistics_of)
        headers = server_names(FAILED_ENDPOINTS, failed, Audience.OPERATORS)
        await send_json(call, b'{"model_stats":[%b]}' % entries, headers)


async def _merge_entries(
    call: Call,
    sub_responses: Iterable[SubResponse],
    entries_of: Callable[[SubResponse, Any], bytes],
) -> bytes:
    """Join what ``entries_of`` writes of the documents of all successful responses."""
    parts = []
    for each in sub_responses:
        if each.success:
            parts.append(each.parse(partial(entries_of, each), "list of models"))
            await call.destination.scheduler.next_slice()
    return b",".join(filter(None, parts))


async def v1_models(call: Call) -> None:
    """List the models that are ready at any upstream, or tell whether one model is ready.

    A header names servers without a list. A server's own error passes to the client. Raises
    GatewayError: 502 that names servers that fail, as a list without their models would say that
    there are none; 503 for a model that is not ready; as ``prepare_dialect`` for one model.
    """
    if call.operation.model is not None:
        await _model_readiness(call, call.operation.model)
    else:
        await _model_list(call)


async def _model_readiness(call: Call, model: str) -> None:
    upstream = call.destination.upstream
    await prepare_dialect(call)
    await wait_for_dialects([upstream], call.deadline)
    if upstream.dialect.speaks_v1:
        await passthrough(call)
        return
    path = model_path(model, call.operation.version)
    with call.reserve() as reservation:
        response = await _query(call, path + "/ready", reservation)
        if response.status == 200 and reports_ready(response.body):
            await send_json(call, ready_document(model))
            return
        # Servers respond alike for models that are not ready and models that they do not have.
        response = await _query(call, path, reservation)
        if response.status == 200:
            raise GatewayError(ErrorKind.NOT_READY, f"model '{model}' is not ready")
        await _send_error(call, response)


async def _model_list(call: Call) -> None:
    index_request = make_sub_request(call.request, _INDEX, (b'{"ready":true}',), "POST")
    index_request.headers["Content-Type"] = "application/json"
    with call.reserve() as reservation:
        lists, without_list = await _query_model_lists(call, index_request, reservation)
        if _are_complete(lists):
            names: list[str] = []
            for each in lists:
                names += each.parse(ready_model_names, "list of models")
                await call.destination.scheduler.next_slice()
            headers = server_names(FAILED_ENDPOINTS, without_list, Audience.CLIENTS)
            await send_json(call, models_document(names), headers)
            return
        if len(call.upstreams) > 1 or not all(map(_has_no_index, lists + without_list)):
            await _send_error(call, merge_responses(call.request, lists or without_list))
            return
    # The server speaks no V2, or its index is closed. It may have another list under the same path,
    # as servers of OpenAI's API do.
    await passthrough(call)


def _has_no_index(sub_response: SubResponse) -> bool:
    result = sub_response.result
    return isinstance(result, BufferedResponse) and result.status in _NO_INDEX_STATUSES


async def _query(call: Call, target: str, reservation: Reservation) -> BufferedResponse:
    upstream_call = send_call(call, make_sub_request(call.request, target))
    return await read_response(upstream_call, call.deadline, reservation)


async def _send_error(call: Call, response: BufferedResponse) -> None:
    """Send a server's error in the format of V1."""
    status, reason = response.status, response.reason
    await send_json(call, error_document(response.body, reason), None, status, reason)
