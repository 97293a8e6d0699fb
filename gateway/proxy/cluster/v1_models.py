"""The models as V1 clients ask for them, in KServe's form: which there are, and whether ready."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.operations import Operation, model_name_of, model_path
from gateway.protocol.v1 import (
    error_document,
    models_document,
    ready_document,
    ready_model_names,
    reports_ready,
)
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.cluster.model_lists import ModelLists, model_lists
from gateway.proxy.cluster.scatter_gather import (
    BufferedResponse,
    SubResponse,
    pass_on,
    question,
    whole_reply,
)
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route, Upstream
from gateway.proxy.passthrough import forward
from gateway.proxy.retry import UpstreamCall
from gateway.proxy.server_dialect import understand, until_known
from gateway.upstream.transport import UpstreamRequest

_INDEX = "/v2/repository/index"

_NO_INDEX = frozenset((400, 401, 403, 404, 405, 501))
"""Statuses with which a server says that it has no index, or none for this client.

One that is alone has the request then, and may answer it in a way of its own.
"""


async def v1_models(
    request: ClientRequest,
    answer: ClientResponse,
    asked: Operation,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """List the models that are ready at any of the upstreams, or tell whether one is ready.

    A header names those that have no list. A server's own error is passed on. Raises GatewayError:
    502 that names who fails, as a list without its models would say that there are none; 503 for a
    model that is not ready; and as ``understand`` where one model is asked for.
    """
    if asked.model is not None:
        await _tell_of_model(request, answer, asked, asked.model, route, deadline)
    else:
        await _tell_of_all(request, answer, route, upstreams, deadline)


async def _tell_of_model(
    request: ClientRequest,
    answer: ClientResponse,
    asked: Operation,
    model: str,
    route: Route,
    deadline: Deadline,
) -> None:
    await understand(request, asked, route.upstream, deadline)
    await until_known([route.upstream], deadline)
    if route.upstream.dialect.speaks_v1:
        await forward(request, answer, route, deadline, model=model_name_of(asked))
        return
    with route.held.reserve() as holding:
        reply = await _readiness(request, asked, model, route, deadline, holding)
        await pass_on(reply, answer, deadline)


async def _readiness(
    request: ClientRequest,
    asked: Operation,
    model: str,
    route: Route,
    deadline: Deadline,
    holding: Reservation,
) -> BufferedResponse:
    path = model_path(model, asked.version)
    reply = await _ask(request, path + "/ready", asked, route, deadline, holding)
    if reply.status == 200 and reports_ready(reply.body):
        return _reply(200, ready_document(model))
    # Servers answer alike for models that are not ready and those that they do not have.
    reply = await _ask(request, path, asked, route, deadline, holding)
    if reply.status == 200:
        raise GatewayError(ErrorKind.NOT_READY, f"model '{model}' is not ready")
    return _error(reply)


async def _tell_of_all(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    with route.held.reserve() as holding:
        index = _index(request)
        lists = await model_lists(request, index, route, upstreams, deadline, holding)
        asked = (*lists.given, *lists.lacking)
        if lists.are_good:
            await pass_on(await _list(lists, route), answer, deadline, lists.headers)
            return
        if len(upstreams) > 1 or not all(map(_has_no_index, asked)):
            await pass_on(_error(lists.error(request)), answer, deadline)
            return
    # V2 is not what is spoken there, or its index is closed: the list may be another one, as
    # servers that follow OpenAI's API have it under the same path.
    await forward(request, answer, route, deadline)


def _has_no_index(asked: SubResponse) -> bool:
    return isinstance(asked.outcome, BufferedResponse) and asked.outcome.status in _NO_INDEX


async def _list(lists: ModelLists, route: Route) -> BufferedResponse:
    names: list[str] = []
    for each in lists.given:
        names += _models(each)
        await route.scheduler.next()
    return _reply(200, models_document(names))


def _index(request: ClientRequest) -> UpstreamRequest:
    body = b'{"ready":true}'
    headers = question(request, _INDEX).headers
    headers["Content-Type"] = "application/json"
    headers["Content-Length"] = str(len(body))
    return UpstreamRequest("POST", _INDEX, headers, (body,))


async def _ask(
    request: ClientRequest,
    target: str,
    asked: Operation,
    route: Route,
    deadline: Deadline,
    holding: Reservation,
) -> BufferedResponse:
    model = model_name_of(asked)
    async with UpstreamCall(route, question(request, target), deadline, model=model) as attempt:
        return await whole_reply(attempt.response, attempt.url, deadline, holding)


def _models(asked: SubResponse) -> list[str]:
    try:
        assert asked.good is not None
        return ready_model_names(orjson.loads(asked.good.body))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise bad_response(f"{asked.name} did not answer with a list of models") from None


def _error(reply: BufferedResponse) -> BufferedResponse:
    """Say a server's error as V1 clients expect it."""
    return _reply(reply.status, error_document(reply.body, reply.reason), reply.reason)


def _reply(status: int, document: bytes, reason: str = "") -> BufferedResponse:
    headers = CIMultiDict(
        {"Content-Type": "application/json", "Content-Length": str(len(document))}
    )
    return BufferedResponse(status, reason, CIMultiDictProxy(headers), document)
