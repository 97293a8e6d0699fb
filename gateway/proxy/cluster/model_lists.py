"""Which models there are: servers are asked for them, each in the way in which it lists them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.errors import GatewayError
from gateway.protocol.v1 import MODELS_PATH
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.cluster.scatter_gather import (
    FAILED_ENDPOINTS,
    BufferedResponse,
    SubResponse,
    agreed,
    ask_where_they_differ,
    question,
)
from gateway.proxy.interfaces import ClientRequest, Route, Upstream
from gateway.proxy.server_dialect import until_known
from gateway.upstream.transport import UpstreamRequest

_TO_BE_KNOWN = 0.5
"""The share of the time in which servers may tell how they speak; the rest is for their lists."""
_HAS_NONE = frozenset((404, 405, 501))
"""Statuses that say of a list that there is none. Others may mean the client, or the moment."""


@dataclass(frozen=True, slots=True)
class ModelLists:
    """What came of asking for lists of models.

    ``given`` are the answers of who has a list, be they errors; ``lacking`` those of who has none.
    """

    given: list[SubResponse]
    lacking: list[SubResponse]

    @property
    def are_good(self) -> bool:
        """Tell whether all that there is was listed, and there is any."""
        return bool(self.given) and all(each.good for each in self.given)

    @property
    def headers(self) -> dict[str, str]:
        """Give the header of an answer that names whose models it lacks, if it does any's."""
        lacking = ", ".join(each.name for each in self.lacking)
        return {FAILED_ENDPOINTS: lacking} if lacking else {}

    def error(self, request: ClientRequest) -> BufferedResponse:
        """Give the servers' own error, where lists are not good; raises GatewayError as agreed."""
        return agreed(request, self.given or self.lacking)


async def model_lists(
    request: ClientRequest,
    index: UpstreamRequest,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
    holding: Reservation,
) -> ModelLists:
    """Ask one endpoint of each upstream, or all where those differ, for the models there.

    KServe has no repository index and is asked for its V1 list, all others are sent ``index``; so
    is who does not tell what it is, as it is likely to fail, and is named with what it fails with.
    Raises GatewayError as ``ask_where_they_differ``.
    """
    await _wait_until_known(upstreams, deadline)
    v1_list = _v1_list(request)
    asked = await ask_where_they_differ(
        route,
        upstreams,
        lambda upstream: v1_list if _speaks_v1(upstream) else index,
        deadline,
        holding,
    )
    by_name = {upstream.name: upstream for upstream in upstreams}
    lists = ModelLists([], [])
    for each in asked:
        has_none = _has_none(each, by_name[each.upstream], index)
        (lists.lacking if has_none else lists.given).append(each)
    return lists


async def _wait_until_known(upstreams: Sequence[Upstream], deadline: Deadline) -> None:
    """Wait until it is known how servers speak, or that this cannot be found out in time.

    So one that hangs leaves the others time for what they are asked.
    """

    async def wait_for(upstream: Upstream, part: Deadline) -> None:
        with contextlib.suppress(GatewayError), part:
            await until_known([upstream], part)

    unknown = [upstream for upstream in upstreams if upstream.dialect_state.dialect is None]
    if unknown:
        with deadline.suspended_for_parts():
            async with asyncio.TaskGroup() as group:
                for upstream in unknown:
                    group.create_task(wait_for(upstream, deadline.part(_TO_BE_KNOWN)))


def _v1_list(request: ClientRequest) -> UpstreamRequest:
    asked = replace(question(request, MODELS_PATH), method="GET")
    asked.headers.popall("Content-Type", None)  # that of a body for the index
    return asked


def _speaks_v1(upstream: Upstream) -> bool:
    return upstream.dialect_state.dialect is not None and upstream.dialect.speaks_v1


def _has_none(asked: SubResponse, upstream: Upstream, index: UpstreamRequest) -> bool:
    """Tell whether who was asked says that it has no list, and never will."""
    if not isinstance(asked.outcome, BufferedResponse):
        return False
    dialect, status = upstream.dialect_state.dialect, asked.outcome.status
    if dialect is not None and not dialect.has_model_list:
        return status == 400 or status in _HAS_NONE
    # By GET, an index is refused also where there is one: the specification has POST.
    return status in _HAS_NONE and (index.method == "POST" or _speaks_v1(upstream))
