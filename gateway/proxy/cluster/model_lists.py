"""Lists the models of several servers for V2 and V1 clients, and merges their statistics.

Each server is asked for the list that its dialect has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.errors import Audience, ErrorKind, GatewayError
from gateway.protocol.operations import model_name_of, model_path
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
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    SubResponse,
    make_sub_request,
    merge_responses,
    query_servers,
    query_upstream,
    send_json,
    send_merged,
    server_names,
)
from gateway.proxy.cluster.server_operations import buffer_body
from gateway.proxy.destination import Upstream
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import passthrough
from gateway.proxy.server_dialect import prepare_dialect, wait_for_dialects
from gateway.upstream.transport import UpstreamRequest

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


@dataclass(frozen=True, slots=True)
class ModelLists:
    """The lists of models, errors among them, and the servers that have no list."""

    lists: list[SubResponse]
    without_list: list[SubResponse]

    @property
    def are_complete(self) -> bool:
        """Tell whether there is a list, and none failed."""
        return bool(self.lists) and all(each.success for each in self.lists)

    @property
    def headers(self) -> dict[str, str]:
        """Return the response header that names the servers without a list, if there are any."""
        return server_names(FAILED_ENDPOINTS, self.without_list, Audience.CLIENTS)

    @property
    def without_success(self) -> list[SubResponse]:
        """Return the responses to take the error from, if the lists are not complete."""
        return self.lists or self.without_list


async def query_model_lists(
    call: Call,
    index_request: UpstreamRequest,
    reservation: Reservation,
) -> ModelLists:
    """Query one endpoint of each upstream, or all under model discovery, for its models.

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
    result = ModelLists([], [])
    for each in sub_responses:
        has_none = _has_no_list(each, by_name[each.upstream], index_request)
        (result.without_list if has_none else result.lists).append(each)
    return result


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
        result = await query_model_lists(call, index_request, reservation)
        if not result.are_complete:
            await send_merged(call, result.without_success)
            return
        seen: dict[str, set[tuple[str, str]]] = defaultdict(set)

        def new_models(source: SubResponse, document: Any) -> bytes:
            # Endpoints of an upstream may list the same.
            models = unseen_models(document, seen[source.upstream])
            return write_entries(models, upstream=source.upstream)

        entries = await _merge_entries(call, result.lists, new_models)
        await send_json(call, b"[%b]" % entries, result.headers)


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
        result = await query_model_lists(call, index_request, reservation)
        if result.are_complete:
            await _send_merged_list(call, result)
            return
        sub_responses = (*result.lists, *result.without_list)
        if len(call.upstreams) > 1 or not all(map(_has_no_index, sub_responses)):
            await _send_error(call, merge_responses(call.request, result.without_success))
            return
    # The server speaks no V2, or its index is closed. It may have another list under the same path,
    # as servers of OpenAI's API do.
    await passthrough(call)


def _has_no_index(sub_response: SubResponse) -> bool:
    result = sub_response.result
    return isinstance(result, BufferedResponse) and result.status in _NO_INDEX_STATUSES


async def _send_merged_list(call: Call, result: ModelLists) -> None:
    names: list[str] = []
    for each in result.lists:
        names += each.parse(ready_model_names, "list of models")
        await call.destination.scheduler.next_slice()
    await send_json(call, models_document(names), result.headers)


async def _query(call: Call, target: str, reservation: Reservation) -> BufferedResponse:
    request, record = make_sub_request(call.request, target), call.response.record
    model = model_name_of(call.operation)
    return await query_upstream(
        call.destination, request, reservation, call.deadline, record, model
    )


async def _send_error(call: Call, response: BufferedResponse) -> None:
    """Send a server's error in the format of V1."""
    status, reason = response.status, response.reason
    await send_json(call, error_document(response.body, reason), None, status, reason)
