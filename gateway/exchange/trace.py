"""Trace settings: both spellings in, the server's own out."""

from __future__ import annotations

import logging

from gateway.exchange.base import ClientAnswer, ClientRequest, Route
from gateway.exchange.deadline import Deadline
from gateway.exchange.forward import forward
from gateway.protocol.endpoints import Endpoint

_log = logging.getLogger("tensorgate.trace")


async def trace_setting(
    request: ClientRequest,
    answer: ClientAnswer,
    asked: Endpoint,
    route: Route,
    deadline: Deadline,
) -> None:
    """Pass a trace call on, to the path under which the server keeps what it is about."""
    dialect = route.upstream.dialect
    if asked.version is not None and not dialect.trace_per_version:
        _log.info(
            "trace settings of version %s of model %s: %s keeps them per model, all versions share",
            asked.version,
            asked.model,
            dialect.name,
        )
    path = dialect.trace_path(asked.model, asked.version)
    query = request.target.partition("?")[1:]
    target = path + "".join(query)
    await forward(request, answer, route, deadline, target, model=asked.model)
