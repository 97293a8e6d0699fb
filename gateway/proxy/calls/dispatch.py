"""Serves a call: finds its route, and runs the handler of its operation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from urllib.parse import unquote

from multidict import CIMultiDict

from gateway.errors import Audience, GatewayError, bad_request, strip_tracebacks
from gateway.protocol.grpc.methods import GrpcMethod, find_method
from gateway.protocol.json_errors import quote_value
from gateway.protocol.operations import OPERATION_KINDS, model_name_of
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.calls.handler import scope_of
from gateway.proxy.calls.kinds import (
    OPERATORS,
    PASSED,
    REFLECTION,
    CallKind,
    kind_of,
    one_server_kind,
)
from gateway.proxy.calls.planner import Planner
from gateway.proxy.destination import Limits
from gateway.proxy.errors import run_with_deadline, send_error
from gateway.proxy.filters.body_filters import filter_call, filter_response
from gateway.proxy.filters.mirror import tee
from gateway.proxy.grpc.idle_streams import IdleStreamCheck
from gateway.proxy.grpc.passthrough import client_timeout
from gateway.proxy.grpc.request import GrpcRequest, ModelRewriter, NamedModel, is_grpc
from gateway.proxy.headers import to_server
from gateway.proxy.interfaces import Call, ClientRequest, ClientResponse
from gateway.proxy.readiness import Readiness
from gateway.proxy.router import RouteMatch
from gateway.proxy.server_dialect import prepare_dialect
from gateway.upstream.metadata_cache import UpstreamResponseError

_ALWAYS_ADMITTED_KINDS = OPERATION_KINDS["health"]
"""Operations that need no memory budget: a probe would take an overloaded gateway for dead."""


async def handle_request(
    request: ClientRequest, response: ClientResponse, planner: Planner
) -> None:
    """Serve one request; an error becomes the response ``{"error": ...}``, or a gRPC status."""
    if is_grpc(request):
        await _handle_grpc(request, response, planner)
        return
    try:
        route_match = planner.route_of(request)
    except GatewayError as error:
        await send_error(response, strip_tracebacks(error))
        return
    head = route_match.filtered_head(request.method, request.headers)
    response.header_policy = route_match.header_policy
    filtered = filter_response(response, head, route_match.choice.next.scheduler)
    deadline = route_match.choice.next.limits.new_deadline()
    await _serve(request, filtered, route_match, planner.router.readiness, deadline)


async def _handle_grpc(request: ClientRequest, response: ClientResponse, planner: Planner) -> None:
    """Serve one gRPC call, whose route depends on the model that its first message names."""
    response.is_grpc = True
    router = planner.router
    rpc = _rpc_of(request)
    limits = _limits_of(rpc, router.widest_limits)
    next_slice = partial(router.message_scheduler.next_slice, response.record.reserved.client)
    grpc_request = GrpcRequest(request, rpc, limits, next_slice)
    route_match: RouteMatch | None = None
    timeout: float | None = None

    async def find_route(deadline: Deadline) -> None:
        nonlocal route_match
        first = await grpc_request.find_model(deadline, reservation)
        found = planner.route_of_rpc(request, rpc, first)
        response.record.labels = found.labels
        response.header_policy = found.header_policy

        def check(named: NamedModel) -> None:
            if planner.route_of_rpc(request, rpc, named).labels.route != found.labels.route:
                raise bad_request(
                    f"model {quote_value(named[0].name)} has another route than the stream, "
                    f"which began with model {quote_value(first[0].name)}"
                )

        route_limits, rewriter = found.choice.next.limits, None
        if (rewrite := found.rewrite) is not None:
            rewriter = ModelRewriter(
                rpc,
                unquote(rewrite.model),
                unquote(rewrite.version or ""),
                request.headers,
                route_limits,
                reservation,
                next_slice,
            )
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
    record = response.record
    record.labels = route_match.labels
    # From here on, the request is the one for the server.
    request.target = route_match.target
    request.headers = to_server(request.headers, route_match.dropped_headers, request.added_headers)
    operation, destination = route_match.operation, route_match.choice.take()
    upstreams = route_match.upstreams
    mirror = None if route_match.sample_mirror is None else route_match.sample_mirror()
    copying = nullcontext(request) if mirror is None else tee(request, operation, mirror, record)
    with copying as read:
        call = Call(read, response, operation, destination, deadline, upstreams, readiness)
        await _serve_call(call, route_match)


async def _serve_call(call: Call, route_match: RouteMatch) -> None:
    operation_kind, record, deadline = call.operation.kind, call.response.record, call.deadline
    is_reflection = is_grpc(call.request) and _rpc_of(call.request).is_reflection
    kind = REFLECTION if is_reflection else kind_of(route_match)
    if not kind.is_own:
        record.upstream = call.destination.upstream.name

    async def run(deadline: Deadline) -> None:
        try:
            if operation_kind not in _ALWAYS_ADMITTED_KINDS:
                call.destination.memory_budget.check_admission(record.reserved.client)
            await _handle(call, kind)
        except UpstreamResponseError as error:
            strip_tracebacks(error)
            deadline.expect_client()
            record.set_passed_error(error.status, error.message)
            headers = CIMultiDict({"Content-Type": error.content_type})
            await call.response.send(error.status, "", headers, error.body)

    audience = Audience.OPERATORS if operation_kind in OPERATORS else Audience.CLIENTS
    await run_with_deadline(run, call.response, deadline, audience)


async def proxy_call(call: Call) -> None:
    """Serve a call from one server: converted or untouched.

    A call for which there is no endpoint, or no room, is refused by its head: its body is not
    read, and its client gets no 100 Continue. Slots are taken when the request goes to a server,
    so that a client that sends slowly holds none. Raises GatewayError, and UpstreamResponseError
    with a server's response to a request of the gateway's own.
    """
    await _handle(call, one_server_kind(call.operation.kind))


async def _handle(call: Call, kind: CallKind) -> None:
    """Run the handler of a call."""
    if not kind.is_own:
        await prepare_dialect(call)
        destination = call.destination
        destination.upstream.pool.lease(model=model_name_of(call.operation))  # raises without one
        for limit in destination.concurrency_limits:
            limit.check_room()  # so that a request that would be refused is not read
    if is_grpc(call.request):
        await kind.grpc(scope_of(call)).serve(call)
        return
    with call.reserve() as reservation:
        call = await filter_call(call, reservation)
        capture = call.response.record.capture
        if capture is not None and capture.skips_conversion and not kind.is_own:
            kind = PASSED
        await kind.http(scope_of(call)).serve(call)


def _rpc_of(request: ClientRequest) -> GrpcMethod:
    return find_method(request.target.partition("?")[0])
