"""One answer out of those of many servers: the repository index, and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson
from multidict import CIMultiDict

from gateway.errors import bad_answer
from gateway.exchange.asking import (
    FAILED,
    Asked,
    Reply,
    agreed,
    ask_every_endpoint,
    ask_one_of_each,
    pass_on,
    question,
)
from gateway.exchange.base import ClientAnswer, ClientRequest, Route, Upstream
from gateway.exchange.deadline import Deadline
from gateway.exchange.fanout import whole_body
from gateway.exchange.turns import Turns


async def repository_index(
    request: ClientRequest,
    answer: ClientAnswer,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Answer with the models of all upstreams, each with the name of its upstream.

    Raises GatewayError (502) that names an upstream that fails: an index without its models would
    say that there are none.
    """
    with route.held.holding() as holding:
        body = await whole_body(request, route.limits, deadline, holding)
        asked_for = question(request, request.target, body)
        asked = await ask_one_of_each(route, upstreams, asked_for, deadline, holding)
        if not all(each.good for each in asked):
            await pass_on(agreed(request, asked), answer, deadline)
            return
        entries = await _gathered(asked, _models, _upstream, route.turns)
        deadline.wait_for_client()
        await answer.send(200, "", _json(), b"[%b]" % entries)


async def statistics(
    request: ClientRequest,
    answer: ClientAnswer,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Answer with the statistics of all endpoints, each with the names of upstream and endpoint.

    A header names those that fail: what the others have counted is no less true.
    """
    asked_for = question(request, request.target)
    with route.held.holding() as holding:
        asked = await ask_every_endpoint(route, upstreams, lambda _: asked_for, deadline, holding)
        failed = [each.name for each in asked if not each.good]
        if len(failed) == len(asked):
            await pass_on(agreed(request, asked), answer, deadline)
            return
        entries = await _gathered(asked, _statistics, _endpoint, route.turns)
        headers = _json()
        if failed:
            headers[FAILED] = ", ".join(failed)
        deadline.wait_for_client()
        await answer.send(200, "", headers, b'{"model_stats":[%b]}' % entries)


def _models(document: Any) -> Any:
    return document


def _upstream(asked: Asked) -> dict[str, str]:
    return {"upstream": asked.upstream}


def _statistics(document: Any) -> Any:
    return document["model_stats"]


def _endpoint(asked: Asked) -> dict[str, str]:
    return {"upstream": asked.upstream, "endpoint": asked.name}


async def _gathered(
    asked: Iterable[Asked],
    entries_of: Callable[[Any], Any],
    names_of: Callable[[Asked], Mapping[str, str]],
    turns: Turns,
) -> bytes:
    """Write the entries of all good answers as the inside of one list, with names in each."""
    parts = []
    for each in asked:
        if each.good:
            parts.append(_entries(each.good, each.name, entries_of, names_of(each)))
            await turns.next()
    return b",".join(filter(None, parts))


def _entries(
    reply: Reply, who: str, entries_of: Callable[[Any], Any], names: Mapping[str, str]
) -> bytes:
    try:
        entries = entries_of(orjson.loads(reply.body))
        if not isinstance(entries, list):
            raise TypeError
        return orjson.dumps([{**entry, **names} for entry in entries])[1:-1]
    except (ValueError, TypeError, KeyError):
        raise bad_answer(f"{who} did not answer with a list of models") from None


def _json() -> CIMultiDict[str]:
    return CIMultiDict({"Content-Type": "application/json"})
