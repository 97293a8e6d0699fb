"""Trace settings: both spellings in, the servers' own out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import Operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.cluster.server_settings import server_settings
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route, Upstream
from gateway.proxy.server_dialect import until_known

_log = logging.getLogger("tensorgate.trace")


async def trace_setting(
    request: ClientRequest,
    answer: ClientResponse,
    asked: Operation,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Pass a trace call on, to the path under which a server keeps what it is about.

    Raises GatewayError (501), before anybody is asked, that names who lacks the extension.
    """
    await until_known(upstreams, deadline)
    lacking = [each for each in upstreams if each.dialect.trace is None]
    if lacking:
        raise _unsupported(lacking)
    query = "".join(request.target.partition("?")[1:])

    def target_at(upstream: Upstream) -> str:
        dialect = upstream.dialect
        if dialect.trace is None:
            raise _unsupported([upstream])  # it has only just shown to be another server
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


def _unsupported(lacking: Sequence[Upstream]) -> GatewayError:
    """Make the error: what changes servers would change only some of them."""
    named = [f"upstream '{each.name}' ({each.dialect.name})" for each in lacking]
    verb = "lacks" if len(named) == 1 else "lack"
    return GatewayError(ErrorKind.UNSUPPORTED, f"{' and '.join(named)} {verb} the trace extension")
