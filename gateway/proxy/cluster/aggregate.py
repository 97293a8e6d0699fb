"""Merges the repository index and the statistics of several servers into one response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson
from multidict import CIMultiDict

from gateway.errors import bad_response
from gateway.protocol.v1 import model_entries
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.cluster.broadcast import buffer_body
from gateway.proxy.cluster.model_lists import query_model_lists
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    SubResponse,
    make_sub_request,
    merge_responses,
    query_every_endpoint,
    send_buffered,
)
from gateway.proxy.interfaces import Call, Upstream
from gateway.upstream.transport import UpstreamRequest

_FULL_INDEX = b"{}"
"""A request for the whole index; MLServer does not accept an empty body."""


async def repository_index(call: Call, upstreams: Sequence[Upstream]) -> None:
    """List the models of all upstreams, each with the name of its upstream.

    Under model discovery every endpoint is queried, and its upstream has the models of all. Entries
    of KServe have neither version nor state, as its list has none. A header names the servers
    without a list. Raises GatewayError (502) that names the servers that fail: an index without
    their models would say that there are none.
    """
    with call.destination.memory_budget.reserve() as reservation:
        index_request = await _index_request(call, reservation)
        result = await query_model_lists(call, index_request, upstreams, reservation)
        if not result.are_complete:
            await send_buffered(call, result.error(call.request))
            return
        entries = await _merge_entries(
            result.lists, _UniqueModels(), _upstream_name, call.destination.scheduler
        )
        headers = _json_headers()
        headers.update(result.headers)
        call.deadline.expect_client()
        await call.response.send(200, "", headers, b"[%b]" % entries)


async def _index_request(call: Call, reservation: Reservation) -> UpstreamRequest:
    """Return the client's request for the index; an empty body becomes an empty JSON object."""
    request = call.request
    body = await buffer_body(call, reservation)
    is_empty = not (isinstance(body, Sequence) and any(body))
    if not is_empty or request.method != "POST":
        return make_sub_request(request, request.target, body)
    index_request = make_sub_request(request, request.target, (_FULL_INDEX,))
    index_request.headers["Content-Length"] = str(len(_FULL_INDEX))
    return index_request


async def statistics(call: Call, upstreams: Sequence[Upstream]) -> None:
    """Send the statistics of all endpoints, each with the names of upstream and endpoint.

    A header names the endpoints that fail: the counts of the others are true without them.
    """
    request = make_sub_request(call.request, call.request.target)
    with call.destination.memory_budget.reserve() as reservation:
        sub_responses = await query_every_endpoint(call, upstreams, lambda _: request, reservation)
        failed = [each.name for each in sub_responses if not each.success]
        if len(failed) == len(sub_responses):
            await send_buffered(call, merge_responses(call.request, sub_responses))
            return
        entries = await _merge_entries(
            sub_responses, _model_statistics, _upstream_and_endpoint, call.destination.scheduler
        )
        headers = _json_headers()
        if failed:
            headers[FAILED_ENDPOINTS] = ", ".join(failed)
        call.deadline.expect_client()
        await call.response.send(200, "", headers, b'{"model_stats":[%b]}' % entries)


class _UniqueModels:
    """Returns the models of an index that no endpoint of the same upstream has listed before."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str]] = set()

    def __call__(self, document: Any, source: SubResponse) -> Any:
        return [model for model in model_entries(document) if self._is_new(source, model)]

    def _is_new(self, source: SubResponse, model: Mapping[str, Any]) -> bool:
        """Compare by upstream, name and version."""
        key = (source.upstream, str(model.get("name")), str(model.get("version")))
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def _upstream_name(source: SubResponse) -> dict[str, str]:
    return {"upstream": source.upstream}


def _model_statistics(document: Any, _: SubResponse) -> Any:
    return document["model_stats"]


def _upstream_and_endpoint(source: SubResponse) -> dict[str, str]:
    return {"upstream": source.upstream, "endpoint": source.name}


async def _merge_entries(
    sub_responses: Iterable[SubResponse],
    entries_of: Callable[[Any, SubResponse], Any],
    labels_of: Callable[[SubResponse], Mapping[str, str]],
    scheduler: ConversionScheduler,
) -> bytes:
    """Write the entries of all successful responses as the inside of a list, with labels."""
    parts = []
    for each in sub_responses:
        if each.success:
            parts.append(_label_entries(each.success, each, entries_of, labels_of(each)))
            await scheduler.next_slice()
    return b",".join(filter(None, parts))


def _label_entries(
    response: BufferedResponse,
    source: SubResponse,
    entries_of: Callable[[Any, SubResponse], Any],
    labels: Mapping[str, str],
) -> bytes:
    try:
        entries = entries_of(orjson.loads(response.body), source)
        if not isinstance(entries, list):
            raise TypeError
        return orjson.dumps([{**entry, **labels} for entry in entries])[1:-1]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise bad_response(f"{source.name} sent no list of models") from None


def _json_headers() -> CIMultiDict[str]:
    return CIMultiDict({"Content-Type": "application/json"})
