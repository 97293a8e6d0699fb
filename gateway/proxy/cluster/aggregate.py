"""Merges the repository index and the statistics of several servers into one response."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from gateway.errors import Audience
from gateway.protocol.v1 import unseen_models, write_entries
from gateway.proxy.cluster.broadcast import buffer_body
from gateway.proxy.cluster.model_lists import query_model_lists
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    SubResponse,
    make_sub_request,
    query_servers,
    send_json,
    send_merged,
    server_names,
)
from gateway.proxy.interfaces import Call

_FULL_INDEX = b"{}"
"""A request for the whole index; MLServer does not accept an empty body."""


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
