"""One answer out of those of many servers: the repository index, and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson
from multidict import CIMultiDict

from gateway.errors import bad_response
from gateway.protocol.v1 import model_entries
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.cluster.broadcast import whole_body
from gateway.proxy.cluster.model_lists import model_lists
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    SubResponse,
    agreed,
    ask_every_endpoint,
    pass_on,
    question,
)
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route, Upstream
from gateway.upstream.transport import UpstreamRequest

_EVERYTHING = b"{}"
"""A request for the index that leaves nothing out; MLServer takes no empty one."""


async def repository_index(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Answer with the models of all upstreams, each with the name of its upstream.

    Where an upstream's endpoints differ, all are asked: its models are those that any of them has.
    Those of KServe have neither version nor state, as its own list says none. A header names those
    that have no list of their models, as they can never say. Raises GatewayError (502) that names
    who fails: an index without its models would say that there are none.
    """
    with route.held.reserve() as holding:
        index = await _index(request, route, deadline, holding)
        lists = await model_lists(request, index, route, upstreams, deadline, holding)
        if not lists.are_good:
            await pass_on(lists.error(request), answer, deadline)
            return
        entries = await _gathered(lists.given, _Models(), _upstream, route.scheduler)
        headers = _json()
        headers.update(lists.headers)
        deadline.expect_client()
        await answer.send(200, "", headers, b"[%b]" % entries)


async def _index(
    request: ClientRequest, route: Route, deadline: Deadline, holding: Reservation
) -> UpstreamRequest:
    """Ask for the index as the client does; what an empty body means, some want to be told."""
    body = await whole_body(request, route.limits, deadline, holding)
    is_empty = not (isinstance(body, Sequence) and any(body))
    if not is_empty or request.method != "POST":
        return question(request, request.target, body)
    asked = question(request, request.target, (_EVERYTHING,))
    asked.headers["Content-Length"] = str(len(_EVERYTHING))
    return asked


async def statistics(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Answer with the statistics of all endpoints, each with the names of upstream and endpoint.

    A header names those that fail: what the others have counted is no less true.
    """
    asked_for = question(request, request.target)
    with route.held.reserve() as holding:
        asked = await ask_every_endpoint(route, upstreams, lambda _: asked_for, deadline, holding)
        failed = [each.name for each in asked if not each.good]
        if len(failed) == len(asked):
            await pass_on(agreed(request, asked), answer, deadline)
            return
        entries = await _gathered(asked, _statistics, _endpoint, route.scheduler)
        headers = _json()
        if failed:
            headers[FAILED_ENDPOINTS] = ", ".join(failed)
        deadline.expect_client()
        await answer.send(200, "", headers, b'{"model_stats":[%b]}' % entries)


class _Models:
    """Gives the models of an index, but for those that an endpoint of the upstream gave before."""

    def __init__(self) -> None:
        self._given: set[tuple[str, str, str]] = set()

    def __call__(self, document: Any, who: SubResponse) -> Any:
        return [model for model in model_entries(document) if self._is_new(who, model)]

    def _is_new(self, who: SubResponse, model: Mapping[str, Any]) -> bool:
        """Tell it by what tells models apart: their names and versions."""
        what = (who.upstream, str(model.get("name")), str(model.get("version")))
        is_new = what not in self._given
        self._given.add(what)
        return is_new


def _upstream(asked: SubResponse) -> dict[str, str]:
    return {"upstream": asked.upstream}


def _statistics(document: Any, _: SubResponse) -> Any:
    return document["model_stats"]


def _endpoint(asked: SubResponse) -> dict[str, str]:
    return {"upstream": asked.upstream, "endpoint": asked.name}


async def _gathered(
    asked: Iterable[SubResponse],
    entries_of: Callable[[Any, SubResponse], Any],
    names_of: Callable[[SubResponse], Mapping[str, str]],
    turns: ConversionScheduler,
) -> bytes:
    """Write the entries of all good answers as the inside of one list, with names in each."""
    parts = []
    for each in asked:
        if each.good:
            parts.append(_entries(each.good, each, entries_of, names_of(each)))
            await turns.next()
    return b",".join(filter(None, parts))


def _entries(
    reply: BufferedResponse,
    who: SubResponse,
    entries_of: Callable[[Any, SubResponse], Any],
    names: Mapping[str, str],
) -> bytes:
    try:
        entries = entries_of(orjson.loads(reply.body), who)
        if not isinstance(entries, list):
            raise TypeError
        return orjson.dumps([{**entry, **names} for entry in entries])[1:-1]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise bad_response(f"{who.name} did not answer with a list of models") from None


def _json() -> CIMultiDict[str]:
    return CIMultiDict({"Content-Type": "application/json"})
