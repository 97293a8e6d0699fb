"""Models for V1 clients in KServe's format: the list of models, and the readiness of one."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.operations import model_name_of, model_path
from gateway.protocol.v1 import (
    error_document,
    models_document,
    ready_document,
    ready_model_names,
    reports_ready,
)
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.cluster.model_lists import ModelLists, query_model_lists
from gateway.proxy.cluster.scatter_gather import (
    BufferedResponse,
    SubResponse,
    buffer_response,
    json_response,
    make_sub_request,
    send_buffered,
)
from gateway.proxy.interfaces import Call, ClientRequest, Upstream
from gateway.proxy.passthrough import passthrough
from gateway.proxy.retry import UpstreamCall
from gateway.proxy.server_dialect import prepare_dialect, wait_for_dialects
from gateway.upstream.transport import UpstreamRequest

_INDEX = "/v2/repository/index"

_NO_INDEX_STATUSES = frozenset((400, 401, 403, 404, 405, 501))
"""Statuses of a server that has no index, or none for this client.

A single server then gets the request itself, and may have a response of its own.
"""


async def v1_models(call: Call, upstreams: Sequence[Upstream]) -> None:
    """List the models that are ready at any upstream, or tell whether one model is ready.

    A header names servers without a list. A server's own error passes to the client. Raises
    GatewayError: 502 that names servers that fail, as a list without their models would say that
    there are none; 503 for a model that is not ready; as ``prepare_dialect`` for one model.
    """
    if call.operation.model is not None:
        await _model_readiness(call, call.operation.model)
    else:
        await _model_list(call, upstreams)


async def _model_readiness(call: Call, model: str) -> None:
    upstream = call.destination.upstream
    await prepare_dialect(call)
    await wait_for_dialects([upstream], call.deadline)
    if upstream.dialect.speaks_v1:
        await passthrough(call, model=model_name_of(call.operation))
        return
    with call.destination.memory_budget.reserve() as reservation:
        await send_buffered(call, await _query_readiness(call, model, reservation))


async def _query_readiness(call: Call, model: str, reservation: Reservation) -> BufferedResponse:
    path = model_path(model, call.operation.version)
    response = await _query(call, path + "/ready", reservation)
    if response.status == 200 and reports_ready(response.body):
        return json_response(200, ready_document(model))
    # Servers respond alike for models that are not ready and models that they do not have.
    response = await _query(call, path, reservation)
    if response.status == 200:
        raise GatewayError(ErrorKind.NOT_READY, f"model '{model}' is not ready")
    return _in_v1_format(response)


async def _model_list(call: Call, upstreams: Sequence[Upstream]) -> None:
    with call.destination.memory_budget.reserve() as reservation:
        index_request = _index_request(call.request)
        result = await query_model_lists(call, index_request, upstreams, reservation)
        if result.are_complete:
            await send_buffered(call, await _merge_lists(call, result), result.headers)
            return
        sub_responses = (*result.lists, *result.without_list)
        if len(upstreams) > 1 or not all(map(_has_no_index, sub_responses)):
            await send_buffered(call, _in_v1_format(result.error(call.request)))
            return
    # The server speaks no V2, or its index is closed. It may have another list under the same path,
    # as servers of OpenAI's API do.
    await passthrough(call)


def _has_no_index(sub_response: SubResponse) -> bool:
    outcome = sub_response.outcome
    return isinstance(outcome, BufferedResponse) and outcome.status in _NO_INDEX_STATUSES


async def _merge_lists(call: Call, result: ModelLists) -> BufferedResponse:
    names: list[str] = []
    for each in result.lists:
        names += _parse_list(each)
        await call.destination.scheduler.next_slice()
    return json_response(200, models_document(names))


def _index_request(request: ClientRequest) -> UpstreamRequest:
    body = b'{"ready":true}'
    headers = make_sub_request(request, _INDEX).headers
    headers["Content-Type"] = "application/json"
    headers["Content-Length"] = str(len(body))
    return UpstreamRequest("POST", _INDEX, headers, (body,))


async def _query(call: Call, target: str, reservation: Reservation) -> BufferedResponse:
    request = make_sub_request(call.request, target)
    model = model_name_of(call.operation)
    async with UpstreamCall(
        call.destination, request, call.deadline, call.response.record, model=model
    ) as upstream_call:
        return await buffer_response(
            upstream_call.response, upstream_call.url, call.deadline, reservation
        )


def _parse_list(sub_response: SubResponse) -> list[str]:
    try:
        assert sub_response.success is not None
        return ready_model_names(orjson.loads(sub_response.success.body))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise bad_response(f"{sub_response.name} sent no list of models") from None


def _in_v1_format(response: BufferedResponse) -> BufferedResponse:
    """Convert a server's error into the format of V1."""
    document = error_document(response.body, response.reason)
    return json_response(response.status, document, response.reason)
