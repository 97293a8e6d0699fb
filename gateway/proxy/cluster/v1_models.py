"""Models for V1 clients in KServe's format: the list of models, and the readiness of one."""

from __future__ import annotations

from gateway.errors import ErrorKind, GatewayError
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
    make_sub_request,
    merge_responses,
    query_upstream,
    send_json,
)
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import passthrough
from gateway.proxy.server_dialect import prepare_dialect, wait_for_dialects

_INDEX = "/v2/repository/index"

_NO_INDEX_STATUSES = frozenset((400, 401, 403, 404, 405, 501))
"""Statuses of a server that has no index, or none for this client.

A single server then gets the request itself, and may have a response of its own.
"""


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
