"""Lists the models of several servers, each by the list that its dialect has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import Audience, GatewayError
from gateway.protocol.v1 import MODELS_PATH
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    SubResponse,
    make_sub_request,
    query_servers,
    server_names,
)
from gateway.proxy.destination import Upstream
from gateway.proxy.interfaces import Call
from gateway.proxy.server_dialect import wait_for_dialects
from gateway.upstream.transport import UpstreamRequest

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
