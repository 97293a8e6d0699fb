"""What serves a call, by the kind of its operation: a row for each, over HTTP and over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple

from gateway.protocol.operations import OperationKind
from gateway.proxy.calls.grpc import OwnRpcHandler, RpcHandler, make_grpc_infer_handler
from gateway.proxy.calls.handler import GenerateHandler, MakeHandler, OwnHandler, PassthroughHandler
from gateway.proxy.calls.infer import PredictHandler, make_infer_handler
from gateway.proxy.calls.shared_memory import SharedMemoryHandler
from gateway.proxy.cluster.server_operations import (
    live,
    load,
    log_settings,
    ready,
    repository_index,
    server_metadata,
    statistics,
    trace_settings,
    v1_models,
)
from gateway.proxy.interfaces import Call
from gateway.proxy.router import RouteMatch


class CallKind(NamedTuple):
    """How calls of a kind are served; those of a BufferedHandler without a task if they can be."""

    http: MakeHandler
    grpc: MakeHandler
    is_own: bool = False
    """Whether the gateway answers them itself, or over the servers of several upstreams."""


def from_one(http: MakeHandler, grpc: MakeHandler | None = None) -> CallKind:
    """Return the row of calls that one server serves."""
    return CallKind(http, grpc or partial(RpcHandler, http))


def _own(serve: Callable[[Call], Awaitable[None]]) -> CallKind:
    http = partial(OwnHandler, serve)
    return CallKind(http, partial(OwnRpcHandler, http), is_own=True)


PASSED: Final = from_one(PassthroughHandler)
"""Calls that pass untouched to one server."""
REFLECTION: Final = CallKind(PassthroughHandler, partial(OwnRpcHandler, PassthroughHandler), True)

KINDS: Final[dict[OperationKind, CallKind]] = {
    OperationKind.INFER: from_one(make_infer_handler, make_grpc_infer_handler),
    OperationKind.PREDICT: from_one(PredictHandler),
    OperationKind.GENERATE: from_one(GenerateHandler),
    OperationKind.LIVENESS: _own(live),
    OperationKind.READINESS: _own(ready),
    OperationKind.SERVER_METADATA: _own(server_metadata),
    OperationKind.TRACE_SETTING: _own(trace_settings),
    OperationKind.LOGGING: _own(log_settings),
    OperationKind.LOAD: _own(load),
    OperationKind.INDEX: _own(repository_index),
    OperationKind.V1_MODEL: _own(v1_models),
    OperationKind.V1_MODELS: _own(v1_models),
    OperationKind.ALL_STATISTICS: _own(statistics),
    OperationKind.SHARED_MEMORY: from_one(SharedMemoryHandler),
}
"""Calls of all other kinds pass untouched."""

OPERATORS: Final = frozenset(
    (
        OperationKind.LOAD,
        OperationKind.TRACE_SETTING,
        OperationKind.LOGGING,
        OperationKind.ALL_STATISTICS,
    )
)
"""Kinds of calls of operators, who have to learn which endpoint failed. They are rare."""


def one_server_kind(kind: OperationKind) -> CallKind:
    """Return how one server serves calls of a kind."""
    row = KINDS.get(kind, PASSED)
    return PASSED if row.is_own else row


def kind_of(route_match: RouteMatch) -> CallKind:
    """Return how the calls of a route's match are served."""
    kind = route_match.operation.kind
    return one_server_kind(kind) if route_match.is_passthrough else KINDS[kind]
