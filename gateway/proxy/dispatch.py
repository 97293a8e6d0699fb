"""Serves a call: finds its route, and runs the handler of its operation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from urllib.parse import unquote

from multidict import CIMultiDict

from gateway.errors import (
    Audience,
    GatewayError,
    bad_request,
    strip_tracebacks,
)
from gateway.protocol.grpc.methods import (
    HEALTH_SERVICE,
    GrpcMethod,
    find_method,
    operation_of,
)
from gateway.protocol.grpc.model_scanner import ScannedModel
from gateway.protocol.json_errors import quote_value
from gateway.protocol.operations import OPERATION_KINDS, OperationKind, model_name_of
from gateway.proxy.admission.concurrency_limit import check_room
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.cluster.aggregate import repository_index, statistics
from gateway.proxy.cluster.broadcast import load
from gateway.proxy.cluster.health import Readiness, live, ready
from gateway.proxy.cluster.server_metadata import server_metadata
from gateway.proxy.cluster.server_settings import log_settings, trace_settings
from gateway.proxy.cluster.v1_models import v1_models
from gateway.proxy.destination import Limits, Upstream
from gateway.proxy.errors import run_with_deadline, send_error
from gateway.proxy.filters.chain import filter_call, filter_response
from gateway.proxy.filters.mirror import tee
from gateway.proxy.grpc.health import serve_health
from gateway.proxy.grpc.idle_streams import IdleStreamCheck
from gateway.proxy.grpc.infer import grpc_as_http, grpc_infer, grpc_model_config
from gateway.proxy.grpc.passthrough import client_timeout, grpc_passthrough
from gateway.proxy.grpc.reflection import serve_reflection
from gateway.proxy.grpc.request import GrpcRequest, is_grpc
from gateway.proxy.grpc.rewrite import ModelRewriter
from gateway.proxy.grpc.stream_infer import grpc_stream_infer
from gateway.proxy.headers import to_server
from gateway.proxy.infer.generate import generate
from gateway.proxy.infer.handler import infer
from gateway.proxy.infer.v1_predict import predict
from gateway.proxy.interfaces import Call, ClientRequest, ClientResponse
from gateway.proxy.passthrough import passthrough
from gateway.proxy.router import RouteMatch, Router
from gateway.proxy.server_dialect import prepare_dialect, wait_for_dialects
from gateway.upstream.metadata_cache import UpstreamResponseError

_ONE_SERVER_KINDS = OPERATION_KINDS["infer"]
"""Operations that one server serves although they do not pass through."""

_ALWAYS_ADMITTED_KINDS = OPERATION_KINDS["health"]
"""Operations that need no memory budget: a probe would take an overloaded gateway for dead."""

OPERATOR_KINDS = frozenset(
    (
        OperationKind.LOAD,
        OperationKind.TRACE_SETTING,
        OperationKind.LOGGING,
        OperationKind.ALL_STATISTICS,
    )
)
"""Operations of operators, who have to learn which endpoint failed."""

_CLUSTER_HANDLERS: Mapping[
    OperationKind, Callable[[Call, tuple[Upstream, ...]], Awaitable[None]]
] = {
    OperationKind.SERVER_METADATA: server_metadata,
    OperationKind.TRACE_SETTING: trace_settings,
    OperationKind.LOGGING: log_settings,
    OperationKind.LOAD: load,
    OperationKind.INDEX: repository_index,
    OperationKind.V1_MODEL: v1_models,
    OperationKind.V1_MODELS: v1_models,
    OperationKind.ALL_STATISTICS: statistics,
}
"""Serve operations over the servers of several upstreams."""


async def handle_request(request: ClientRequest, response: ClientResponse, router: Router) -> None:
    """Serve one request; an error becomes the response ``{"error": ...}``, or a gRPC status."""
    if is_grpc(request):
        await _handle_grpc(request, response, router)
        return
    try:
        route_match = router.find(request.method, request.target, request.headers)
    except GatewayError as error:
        await send_error(response, strip_tracebacks(error))
        return
    head = route_match.filtered_head(request.method, request.headers)
    response.header_policy = route_match.header_policy
    filtered = filter_response(response, head, route_match.choice.next.scheduler)
    deadline = route_match.choice.next.limits.new_deadline()
    await _serve(request, filtered, route_match, router.readiness, deadline)


async def _handle_grpc(request: ClientRequest, response: ClientResponse, router: Router) -> None:
    """Serve one gRPC call, whose route depends on the model that its first message names."""
    response.is_grpc = True
    rpc = _rpc_of(request)
    limits = _limits_of(rpc, router.widest_limits)
    caps = (
        limits.max_request_bytes,
        limits.max_buffered_body_bytes,
        limits.max_decompression_ratio,
    )
    next_slice = partial(router.message_scheduler.next_slice, response.record.reserved.client)
    grpc_request = GrpcRequest(request, rpc, *caps, next_slice=next_slice)
    route_match: RouteMatch | None = None
    timeout: float | None = None

    def find(model: ScannedModel, names: tuple[str, ...]) -> RouteMatch:
        rpcs = [operation_of(rpc, name, model.version) for name in names or ("",)]
        return router.find(request.method, request.target, request.headers, tuple(rpcs))

    async def find_route(deadline: Deadline) -> None:
        nonlocal route_match
        first, first_names = await grpc_request.find_model(deadline, reservation)
        found = find(first, first_names)
        response.record.labels = found.labels

        def check(model: ScannedModel, names: tuple[str, ...]) -> None:
            if find(model, names).labels.route != found.labels.route:
                raise bad_request(
                    f"model {quote_value(model.name)} has another route than the stream, which "
                    f"began with model {quote_value(first.name)}"
                )

        route_limits, rewriter = found.choice.next.limits, None
        if (rewrite := found.rewrite) is not None:
            caps = route_limits.max_buffered_body_bytes, route_limits.max_decompression_ratio
            names = unquote(rewrite.model), unquote(rewrite.version or "")
            rewriter = ModelRewriter(rpc, *names, request.headers, *caps, reservation, next_slice)
        await grpc_request.route(route_limits.max_request_bytes, check, rewriter)
        route_match = found

    with router.memory_budget.reserve(response.record.reserved) as reservation:
        try:
            timeout = client_timeout(request.headers)
            deadline = limits.new_deadline(client_timeout=timeout)
        except GatewayError as error:
            await send_error(response, strip_tracebacks(error))
            return
        idle_check: IdleStreamCheck | None = None
        if rpc.request_streams:
            idle_check = IdleStreamCheck(grpc_request, response, router.readiness)
            idle_check.deadline = deadline
        with idle_check or nullcontext():
            await run_with_deadline(find_route, idle_check or response, deadline)
            if route_match is None:
                return
            response.header_policy = route_match.header_policy
            limits = _limits_of(rpc, route_match.choice.next.limits)
            deadline = limits.new_deadline(deadline.busy_seconds, timeout)
            if idle_check is not None:
                idle_check.deadline = deadline
            await _serve(
                grpc_request, idle_check or response, route_match, router.readiness, deadline
            )


def _limits_of(rpc: GrpcMethod, limits: Limits) -> Limits:
    """Return limits for a call: the client of a stream may have nothing to say for a while."""
    return replace(limits, min_body_rate=0) if rpc.request_streams else limits


async def _serve(
    request: ClientRequest,
    response: ClientResponse,
    route_match: RouteMatch,
    readiness: Readiness,
    deadline: Deadline,
) -> None:
    response.record.labels = route_match.labels
    # From here on, the request is the one for the server.
    request.target = route_match.target
    request.headers = to_server(request.headers, route_match.dropped_headers, request.added_headers)
    mirror = None if route_match.mirror is None else route_match.mirror.sample()
    if mirror is None:
        await _serve_from_servers(request, response, route_match, readiness, deadline)
        return
    with tee(request, route_match.operation, mirror, response.record) as teed:
        await _serve_from_servers(teed, response, route_match, readiness, deadline)


async def _serve_from_servers(
    request: ClientRequest,
    response: ClientResponse,
    route_match: RouteMatch,
    readiness: Readiness,
    deadline: Deadline,
) -> None:
    operation, destination = route_match.operation, route_match.choice.take()
    is_for_one_server = not _is_reflection(request) and (
        route_match.is_passthrough or operation.kind in _ONE_SERVER_KINDS
    )
    if is_for_one_server:
        response.record.upstream = destination.upstream.name

    async def run(deadline: Deadline) -> None:
        call = Call(request, response, operation, destination, deadline)
        try:
            if operation.kind not in _ALWAYS_ADMITTED_KINDS:
                destination.memory_budget.check_admission(response.record.reserved.client)
            if is_for_one_server:
                await proxy_call(call)
            elif is_grpc(request):
                await _serve_grpc_from_all(call, route_match.upstreams, readiness)
            else:
                await _serve_from_all(call, route_match.upstreams, readiness)
        except UpstreamResponseError as error:
            strip_tracebacks(error)
            deadline.expect_client()
            response.record.set_passed_error(error.status, error.message)
            headers = CIMultiDict({"Content-Type": error.content_type})
            await response.send(error.status, "", headers, error.body)

    is_for_operator = operation.kind in OPERATOR_KINDS
    audience = Audience.OPERATORS if is_for_operator else Audience.CLIENTS
    await run_with_deadline(run, response, deadline, audience)


async def proxy_call(call: Call) -> None:
    """Serve a call from one server: converted or untouched.

    A call for which there is no endpoint, or no room, is refused by its head: its body is not
    read, and its client gets no 100 Continue. Slots are taken when the request goes to a server,
    so that a client that sends slowly holds none. Raises GatewayError, and UpstreamResponseError
    with a server's response to a request of the gateway's own.
    """
    await prepare_dialect(call)
    destination, model = call.destination, model_name_of(call.operation)
    destination.upstream.pool.lease(model=model)  # raises without an endpoint
    check_room(destination.concurrency_limits)
    with call.reserve() as reservation:
        if is_grpc(call.request):
            await _proxy_grpc(call, reservation)
            return
        call = await filter_call(call, reservation)
        capture = call.response.record.capture
        if capture is not None and capture.skips_conversion:
            await passthrough(call, model=model)
        elif call.operation.kind is OperationKind.INFER:
            await infer(call)
        elif call.operation.kind is OperationKind.PREDICT:
            await predict(call)
        elif call.operation.kind is OperationKind.GENERATE:
            if destination.upstream.speaks_grpc:
                await generate(call)
            else:
                await passthrough(call, model=model, inference=OperationKind.GENERATE)
        else:
            await passthrough(call, model=model)


async def _proxy_grpc(call: Call, reservation: Reservation) -> None:
    """Serve a gRPC call from one server, untouched if that is reached over gRPC."""
    upstream, rpc = call.destination.upstream, _rpc_of(call.request)
    if rpc.kind is OperationKind.CONFIG:
        await wait_for_dialects([upstream], call.deadline)
        if not upstream.dialect.has_config:
            await grpc_model_config(call, reservation, proxy_call)
            return
    is_unary_infer = rpc.kind is OperationKind.INFER and not rpc.request_streams
    is_converted = is_unary_infer and not upstream.dialect.grpc.infer_passes
    # Whoever changes settings has to learn which upstream lacks them.
    if upstream.speaks_grpc and not is_converted and rpc.kind is not OperationKind.LOGGING:
        await grpc_passthrough(call, reservation)
    elif rpc.kind is OperationKind.INFER:
        serve = grpc_stream_infer if rpc.request_streams else grpc_infer
        await serve(call, reservation)
    else:
        await grpc_as_http(call, rpc, reservation, proxy_call)


async def _serve_from_all(
    call: Call, upstreams: tuple[Upstream, ...], readiness: Readiness
) -> None:
    """Serve an operation of the gateway itself, or over several servers."""
    with call.reserve() as reservation:
        call = await filter_call(call, reservation)
        if call.operation.kind is OperationKind.LIVENESS:
            await live(call.response)
        elif call.operation.kind is OperationKind.READINESS:
            await ready(call.response, readiness, call.deadline)
        else:
            await _CLUSTER_HANDLERS[call.operation.kind](call, upstreams)


async def _serve_grpc_from_all(
    call: Call, upstreams: tuple[Upstream, ...], readiness: Readiness
) -> None:
    """Serve a gRPC call of the gateway itself, or over several servers."""
    rpc = _rpc_of(call.request)

    async def serve(as_http: Call) -> None:
        await _serve_from_all(as_http, upstreams, readiness)

    with call.reserve() as reservation:
        if rpc.service == HEALTH_SERVICE:
            await serve_health(call, rpc, readiness, reservation)
        elif rpc.is_reflection:
            await serve_reflection(call, readiness, reservation)
        else:
            await grpc_as_http(call, rpc, reservation, serve)


def _is_reflection(request: ClientRequest) -> bool:
    return is_grpc(request) and _rpc_of(request).is_reflection


def _rpc_of(request: ClientRequest) -> GrpcMethod:
    return find_method(request.target.partition("?")[0])
