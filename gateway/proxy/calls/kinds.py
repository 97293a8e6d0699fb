"""What becomes of a call, by the kind of its operation: a row for each, for both paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from gateway.protocol.operations import OperationKind
from gateway.proxy.calls.handler import CallHandler, HandlerScope
from gateway.proxy.calls.infer import make_infer_handler
from gateway.proxy.calls.passthrough import make_generate_handler, make_passthrough_handler
from gateway.proxy.calls.predict import make_predict_handler
from gateway.proxy.cluster.aggregate import repository_index, statistics
from gateway.proxy.cluster.broadcast import load
from gateway.proxy.cluster.health import live, ready
from gateway.proxy.cluster.server_metadata import server_metadata
from gateway.proxy.cluster.server_settings import log_settings, trace_settings
from gateway.proxy.cluster.v1_models import v1_models
from gateway.proxy.infer.generate import generate
from gateway.proxy.infer.handler import infer
from gateway.proxy.infer.v1_predict import predict
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import passthrough
from gateway.proxy.router import RouteMatch

Serve = Callable[[Call], Awaitable[None]]
"""Serves a call in a task: the streaming path."""
MakeHandler = Callable[[HandlerScope], CallHandler | None]
"""Makes what serves small calls without a task; it returns None if the streaming path does."""


class CallKind(NamedTuple):
    """How calls of a kind are served; all of them in a task if there is no ``make_handler``."""

    serve: Serve
    make_handler: MakeHandler | None = None


PASSED: Final = CallKind(passthrough, make_passthrough_handler)
"""Calls that pass untouched to one server."""

ONE_SERVER: Final[dict[OperationKind, CallKind]] = {
    OperationKind.INFER: CallKind(infer, make_infer_handler),
    OperationKind.PREDICT: CallKind(predict, make_predict_handler),
    OperationKind.GENERATE: CallKind(generate, make_generate_handler),
}
"""Calls of one server that it does not get as they come."""

ALL_SERVERS: Final[Mapping[OperationKind, CallKind]] = {
    OperationKind.LIVENESS: CallKind(live),
    OperationKind.READINESS: CallKind(ready),
    OperationKind.SERVER_METADATA: CallKind(server_metadata),
    OperationKind.TRACE_SETTING: CallKind(trace_settings),
    OperationKind.LOGGING: CallKind(log_settings),
    OperationKind.LOAD: CallKind(load),
    OperationKind.INDEX: CallKind(repository_index),
    OperationKind.V1_MODEL: CallKind(v1_models),
    OperationKind.V1_MODELS: CallKind(v1_models),
    OperationKind.ALL_STATISTICS: CallKind(statistics),
}
"""Calls that the gateway answers itself, or over the servers of several upstreams."""

OPERATORS: Final = frozenset(
    (
        OperationKind.LOAD,
        OperationKind.TRACE_SETTING,
        OperationKind.LOGGING,
        OperationKind.ALL_STATISTICS,
    )
)
"""Kinds of calls of operators, who have to learn which endpoint failed. They are rare."""


def is_for_one_server(route_match: RouteMatch) -> bool:
    """Tell whether one server serves the calls of a route's match."""
    return route_match.is_passthrough or route_match.operation.kind in ONE_SERVER


def one_server_kind(kind: OperationKind) -> CallKind:
    """Return how one server serves calls of a kind."""
    return ONE_SERVER.get(kind, PASSED)


def kind_of(route_match: RouteMatch) -> CallKind:
    """Return how the calls of a route's match are served."""
    kind = route_match.operation.kind
    return one_server_kind(kind) if is_for_one_server(route_match) else ALL_SERVERS[kind]
