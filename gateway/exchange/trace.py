"""Trace settings: both spellings in, the servers' own out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gateway.errors import ErrorKind, GatewayError
from gateway.exchange.base import ClientAnswer, ClientRequest, Route, Upstream
from gateway.exchange.deadline import Deadline
from gateway.exchange.server_settings import server_settings
from gateway.protocol.endpoints import Endpoint

_log = logging.getLogger("tensorgate.trace")


async def trace_setting(
    request: ClientRequest,
    answer: ClientAnswer,
    asked: Endpoint,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Pass a trace call on, to the path under which a server keeps what it is about."""
    query = "".join(request.target.partition("?")[1:])

    def target_at(upstream: Upstream) -> str:
        dialect = upstream.dialect
        if dialect.trace is None:
            raise GatewayError(
                ErrorKind.UNSUPPORTED,
                f"upstream '{upstream.name}' ({dialect.name}) lacks the trace extension",
            )
        if asked.version is not None and not dialect.trace.per_version:
            _log.info(
                "trace settings of version %s of model %s: %s keeps them per model, "
                "all versions share",
                asked.version,
                asked.model,
                dialect.name,
            )
        return dialect.trace.path(asked.model, asked.version) + query

    await server_settings(request, answer, route, upstreams, deadline, target_at, asked.model)
