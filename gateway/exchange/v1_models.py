"""The models as V1 clients ask for them, in KServe's form: which there are, and whether ready."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, bad_answer
from gateway.exchange.asking import (
    Asked,
    Reply,
    agreed,
    ask_every_endpoint,
    ask_one_of_each,
    pass_on,
    question,
    whole_reply,
)
from gateway.exchange.attempts import Attempts
from gateway.exchange.base import ClientAnswer, ClientRequest, Route, Upstream
from gateway.exchange.deadline import Deadline
from gateway.exchange.dialect import until_known
from gateway.exchange.forward import forward
from gateway.exchange.held import Holding
from gateway.protocol.endpoints import Endpoint, model_path
from gateway.protocol.v1 import (
    error_document,
    listed_models,
    models_document,
    ready_document,
    says_ready,
)
from gateway.upstream.base import UpstreamRequest

_INDEX = "/v2/repository/index"
_LIST = "/v1/models"

_NO_INDEX = frozenset((400, 401, 403, 404, 405, 501))
"""Statuses with which servers say that they have no index, or none for this client."""


async def v1_models(
    request: ClientRequest,
    answer: ClientAnswer,
    asked: Endpoint,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """List the models that are ready at any of the upstreams, or tell whether one is ready.

    A server's own error is passed on. Raises GatewayError: 502 that names who fails, as a list
    without its models would say that there are none; 503 for a model that is not ready; and as
    ``until_known``.
    """
    if asked.model is not None:
        await _tell_of_model(request, answer, asked, asked.model, route, deadline)
    else:
        await _tell_of_all(request, answer, route, upstreams, deadline)


async def _tell_of_model(
    request: ClientRequest,
    answer: ClientAnswer,
    asked: Endpoint,
    model: str,
    route: Route,
    deadline: Deadline,
) -> None:
    await until_known([route.upstream], deadline)
    if route.upstream.dialect.speaks_v1:
        await forward(request, answer, route, deadline, model=model)
        return
    with route.held.holding() as holding:
        reply = await _readiness(request, asked, model, route, deadline, holding)
        await pass_on(reply, answer, deadline)


async def _readiness(
    request: ClientRequest,
    asked: Endpoint,
    model: str,
    route: Route,
    deadline: Deadline,
    holding: Holding,
) -> Reply:
    path = model_path(model, asked.version)
    reply = await _ask(request, path + "/ready", model, route, deadline, holding)
    if reply.status == 200 and says_ready(reply.body):
        return _reply(200, ready_document(model))
    # Servers answer alike for models that are not ready and those that they do not have.
    reply = await _ask(request, path, model, route, deadline, holding)
    if reply.status == 200:
        raise GatewayError(ErrorKind.NOT_READY, f"model '{model}' is not ready")
    return _error(reply)


async def _tell_of_all(
    request: ClientRequest,
    answer: ClientAnswer,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    await until_known(upstreams, deadline)
    with route.held.holding() as holding:
        asked = await _ask_all(request, route, upstreams, deadline, holding)
        if len(upstreams) > 1 or not all(map(_has_no_index, asked)):
            await pass_on(await _list(request, asked, route), answer, deadline)
            return
    # V2 is not what is spoken there, or its index is closed: the list may be another one, as
    # servers that follow OpenAI's API have it under the same path.
    await forward(request, answer, route, deadline)


def _has_no_index(asked: Asked) -> bool:
    return isinstance(asked.outcome, Reply) and asked.outcome.status in _NO_INDEX


async def _list(request: ClientRequest, asked: Sequence[Asked], route: Route) -> Reply:
    if not all(each.good for each in asked):
        return _error(agreed(request, asked))
    names: list[str] = []
    for each in asked:
        names += _models(each)
        await route.turns.next()
    return _reply(200, models_document(names))


async def _ask_all(
    request: ClientRequest,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
    holding: Holding,
) -> list[Asked]:
    """Ask one endpoint of each upstream, or all where those differ, as it lists its models."""
    questions = {True: question(request, _LIST), False: _index(request)}

    def question_to(upstream: Upstream) -> UpstreamRequest:
        return questions[upstream.dialect.speaks_v1]

    asked: list[Asked] = []
    for natively, listing in questions.items():
        alike = [
            each
            for each in upstreams
            if each.dialect.speaks_v1 is natively and not each.pool.differs
        ]
        asked += await ask_one_of_each(route, alike, listing, deadline, holding)
    differing = [each for each in upstreams if each.pool.differs]
    asked += await ask_every_endpoint(route, differing, question_to, deadline, holding)
    return asked


def _index(request: ClientRequest) -> UpstreamRequest:
    body = b'{"ready":true}'
    headers = question(request, _INDEX).headers
    headers["Content-Type"] = "application/json"
    headers["Content-Length"] = str(len(body))
    return UpstreamRequest("POST", _INDEX, headers, (body,))


async def _ask(
    request: ClientRequest,
    target: str,
    model: str,
    route: Route,
    deadline: Deadline,
    holding: Holding,
) -> Reply:
    async with Attempts(route, question(request, target), deadline, model=model) as attempt:
        return await whole_reply(attempt.response, attempt.url, deadline, holding)


def _models(asked: Asked) -> list[str]:
    try:
        assert asked.good is not None
        return listed_models(orjson.loads(asked.good.body))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise bad_answer(f"{asked.name} did not answer with a list of models") from None


def _error(reply: Reply) -> Reply:
    """Say a server's error as V1 clients expect it."""
    return _reply(reply.status, error_document(reply.body, reply.reason), reply.reason)


def _reply(status: int, document: bytes, reason: str = "") -> Reply:
    headers = CIMultiDict(
        {"Content-Type": "application/json", "Content-Length": str(len(document))}
    )
    return Reply(status, reason, CIMultiDictProxy(headers), document)
