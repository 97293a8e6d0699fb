"""Plans all calls, once for all requests with the same head, and starts those of the fast path.

On the fast path request and response are fully buffered, and no task serves the call. Most calls
are such. Every other call takes the streaming path (dispatch.py), from the start or from where its
response begins. Clients get the same on both.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.v2.request import InferRequestReader
from gateway.errors import GatewayError, strip_tracebacks
from gateway.http1.head import HeadParser, RequestHead
from gateway.observe.call_record import NO_LABELS
from gateway.protocol.grpc.headers import (
    ACCEPT_ENCODING,
    ENCODING,
    TIMEOUT,
    WANTS_STATUS,
    is_grpc_type,
)
from gateway.protocol.grpc.methods import GrpcMethod, find_method, operation_of
from gateway.protocol.operations import Operation, OperationKind, model_name_of
from gateway.proxy.admission.concurrency_limit import release_all, try_acquire_all
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.admission.request_slice import RequestSlice
from gateway.proxy.calls.buffered import BODY_COPIES, BufferedCall, CallPlan
from gateway.proxy.calls.grpc import MAX_REQUEST, scan_message
from gateway.proxy.calls.handler import BufferedHandler, HandlerScope, ServerRequest
from gateway.proxy.calls.infer import InferHandler
from gateway.proxy.calls.kinds import OPERATORS, kind_of
from gateway.proxy.destination import Destination, Limits
from gateway.proxy.filters.body_filters import FILTERED_HEADERS, any_filter_applies
from gateway.proxy.filters.forwarded_headers import NOTED_HEADERS
from gateway.proxy.filters.mirror import MirroredRequest
from gateway.proxy.grpc.request import NamedModel
from gateway.proxy.headers import connection_options, to_server
from gateway.proxy.interfaces import ClientRequest, FastPathClient
from gateway.proxy.router import RouteMatch, Router
from gateway.proxy.server_dialect import has_content_type
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import BoundedCache
from gateway.system.buffers import ReservedBytes
from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.transport import HOP_BY_HOP, UpstreamEndpoint

_KEYED_HEADERS: Final = (
    HOP_BY_HOP
    | FILTERED_HEADERS
    | {"accept-encoding", "content-type", "host", "inference-header-content-length"}
    | {ACCEPT_ENCODING, ENCODING, WANTS_STATUS}
)
"""Headers that the gateway itself looks at; a router adds those that its routes look at."""

_CONNECTION_OPTIONS: Final = frozenset(("", "close", "keep-alive"))
"""Options that are no names of headers, and an empty one."""


class GrpcPlan:
    """How gRPC calls with the same head are served: by the model that their message names."""

    max_size = MAX_REQUEST
    labels = NO_LABELS

    def __init__(self, rpc: GrpcMethod, target: str) -> None:
        self.rpc: Final = rpc
        self.target: Final = target

    @property
    def buffered(self) -> GrpcPlan | None:
        """Return the plan itself, None for calls whose requests or responses are streams."""
        return None if self.rpc.request_streams or self.rpc.response_streams else self


class RoutePlan:
    """Where requests with the same head go, or why nowhere, and how without a task if they can."""

    def __init__(self, route_match: RouteMatch | GatewayError) -> None:
        self._route_match: Final = route_match
        self.buffered: CallPlan | None = None
        self.is_planned = isinstance(route_match, GatewayError)
        """Whether it is known how they are served without a task, and if."""

    @property
    def route_match(self) -> RouteMatch:
        """Return where they go; raises GatewayError as ``Router.find``."""
        if isinstance(self._route_match, GatewayError):
            raise self._route_match
        return self._route_match


BufferedPlan = CallPlan | GrpcPlan


class Planner:
    """Plans all calls, and starts those of the fast path."""

    def __init__(self, router: Router) -> None:
        self.router: Final = router
        self.head_parser: Final = HeadParser(_KEYED_HEADERS | router.header_names, NOTED_HEADERS)
        """Its heads have the same key if their requests are served in the same way."""
        timeouts = {_server_timeout(route.limits) for route in router.routes}
        self._timeouts = {timeout: TimeoutQueue(timeout) for timeout in timeouts}
        self._plans: BoundedCache[tuple[bytes, ...], RoutePlan | GrpcPlan] = BoundedCache(
            CACHED_HEADS
        )
        self._grpc_plans: BoundedCache[tuple[object, ...], RoutePlan] = BoundedCache(CACHED_HEADS)

    def plan(self, head: RequestHead, target: str) -> BufferedPlan | None:
        """Return the plan for requests with this key; None if they take the streaming path.

        ``target`` is the request target in origin form.
        """
        if head.parser is not self.head_parser:
            return None  # the settings have changed while the call waited for its body
        plan = self._plan_of(head, target)
        return self._buffered(head, plan) if isinstance(plan, RoutePlan) else plan.buffered

    def route_of(self, request: ClientRequest) -> RouteMatch:
        """Return where a request over HTTP goes; raises GatewayError as ``Router.find``."""
        head, target = request.head, request.target
        if head.parser is self.head_parser:
            plan = self._plan_of(head, target)
            if isinstance(plan, RoutePlan):
                return plan.route_match
        return self.router.find(request.method, target, request.headers)

    def route_of_rpc(
        self, request: ClientRequest, rpc: GrpcMethod, named: NamedModel
    ) -> RouteMatch:
        """Return where a gRPC call goes, or a message of one; raises GatewayError as above."""
        head, target = request.head, request.target
        if head.parser is self.head_parser:
            return self._plan_rpc(rpc, target, head, named).route_match
        return self.router.find(request.method, target, request.headers, _rpcs_of(rpc, named))

    def _plan_of(self, head: RequestHead, target: str) -> RoutePlan | GrpcPlan:
        plan = self._plans.get(head.key)
        if plan is None:
            if head.method == "POST" and is_grpc_type(head.headers.get("Content-Type", "")):
                plan = GrpcPlan(find_method(target), target)
            else:
                plan = self._plan_route(head, target)
            self._plans.put(head.key, plan)
        return plan

    def _plan_route(
        self, head: RequestHead, target: str, rpcs: tuple[Operation, ...] = ()
    ) -> RoutePlan:
        try:
            return RoutePlan(self.router.find(head.method, target, head.headers, rpcs))
        except GatewayError as error:
            return RoutePlan(strip_tracebacks(error))

    def _buffered(
        self, head: RequestHead, plan: RoutePlan, *, is_grpc: bool = False
    ) -> CallPlan | None:
        if not plan.is_planned:
            plan.buffered = self._plan_buffered(head, plan.route_match, is_grpc)
            plan.is_planned = True
        return plan.buffered

    def _plan_buffered(
        self, head: RequestHead, route_match: RouteMatch, is_grpc: bool
    ) -> CallPlan | None:
        """Return the plan for calls with this key and this route; None if they are streamed."""
        kind = route_match.operation.kind
        if head.method == "HEAD" or "Expect" in head.headers or kind in OPERATORS:
            return None
        if not connection_options(head.headers) <= _CONNECTION_OPTIONS:
            return None  # the streaming path drops the headers that they name
        keyed = CIMultiDictProxy(CIMultiDict(head.keyed_headers))
        if is_grpc:
            is_rare = kind is not OperationKind.INFER or route_match.sample_mirror is not None
            if is_rare or route_match.rewrite is not None:
                return None
            make_handler = kind_of(route_match).grpc
        else:
            if any_filter_applies(route_match.filtered_head(head.method, keyed)):
                return None
            make_handler = kind_of(route_match).http
        operation, limits = route_match.operation, route_match.choice.next.limits
        dropped, policy = route_match.dropped_headers, route_match.header_policy
        passed = to_server(keyed, dropped)
        # Noted headers come with the lines of each request: see CallPlan.passed_lines.
        sent = to_server(passed, NOTED_HEADERS)
        try:
            handler = make_handler(
                HandlerScope(head.method, route_match.target, sent, operation, limits)
            )
        except GatewayError:
            return None  # the streaming path sends the error
        if not isinstance(handler, BufferedHandler):
            return None
        converts = isinstance(handler, InferHandler) and not is_grpc
        is_typed = is_grpc or converts or has_content_type(route_match.target, passed)
        kept = {"content-length", TIMEOUT} if is_grpc else {"content-length"}
        return CallPlan(
            handler,
            passed,
            route_match.choice,
            self._timeouts[_server_timeout(limits)],
            min(handler.max_size, limits.max_request_bytes),
            converts,
            model_name_of(operation),
            None if route_match.sample_mirror is None else partial(_mirror, route_match),
            header_policy=policy,
            has_version=operation.version is not None and not is_grpc,
            is_untyped=not is_typed,
            passed_noted=NOTED_HEADERS - dropped - kept,
            labels=route_match.labels,
            adds_server_timing=policy is not None and policy.adds_server_timing,
        )

    def _plan_grpc(self, plan: GrpcPlan, head: RequestHead, body: bytes) -> CallPlan | None:
        """Return the plan for gRPC calls with this key and the same model."""
        named = scan_message(plan.rpc, body)
        if named is None:
            return None
        found = self._plan_rpc(plan.rpc, plan.target, head, named)
        buffered = self._buffered(head, found, is_grpc=True)
        return None if buffered is None or len(body) > buffered.max_size else buffered

    def _plan_rpc(
        self, rpc: GrpcMethod, target: str, head: RequestHead, named: NamedModel
    ) -> RoutePlan:
        key = head.key, *named
        plan = self._grpc_plans.get(key)
        if plan is None:
            rpcs = _rpcs_of(rpc, named)
            plan = self._grpc_plans.put(key, self._plan_route(head, target, rpcs))
        return plan

    def place(self, plan: CallPlan, size: int, reserved: ReservedBytes) -> RequestSlice | None:
        """Return shared memory for a body of ``size`` bytes; None if it may not be received there.

        Only tensors in binary form may, if it is certain which server gets them.
        """
        destination, start = plan.choice.next, plan.handler.tensors_start
        if start is None or size - start < destination.upstream.min_shared_bytes:
            return None
        endpoints = destination.upstream.pool.endpoints
        if len(endpoints) != 1 or not plan.choice.is_fixed or plan.mirror is not None:
            return None
        lane, dialect = endpoints[0].shared_memory, destination.upstream.dialect_state.dialect
        if lane is None or dialect is None or not plan.handler.sends_binary(destination.upstream):
            return None
        if size > destination.limits.max_request_bytes:
            return None
        if size > destination.memory_budget.buffers.free:
            return None  # the streaming path asks others to make room
        return RequestSlice.take(lane, size, start, destination.memory_budget.reserve(reserved))

    def reader(
        self, plan: CallPlan, size: int, reserved: ReservedBytes
    ) -> tuple[InferRequestReader, Reservation, Reservation] | None:
        """Return what reads a body while it arrives, with reservations for its own and the body's.

        None if nothing does, or if others read the body, too.
        """
        destination = plan.choice.next
        if size > destination.limits.max_request_bytes or plan.mirror is not None:
            return None
        found = plan.handler.reader(size, destination)
        reserve = destination.memory_budget.reserve
        return None if found is None else (found, reserve(reserved), reserve(reserved))

    def prepare(
        self,
        plan: BufferedPlan,
        head: RequestHead,
        body: bytes | memoryview,
        client: FastPathClient,
    ) -> BufferedCall | None:
        """Make a call that is ready to start; None if the request takes the streaming path.

        Nothing is converted before there are slots, memory and an endpoint, unless the body was
        read while it arrived. The call holds them until it has ended, or is cancelled. Nothing
        is sent before it starts.
        """
        if isinstance(plan, GrpcPlan):
            body = bytes(body)
            found = self._plan_grpc(plan, head, body) if client.carries_trailers else None
            if found is None:
                return None
            plan = found
        destination = plan.choice.next
        if not plan.fits(destination.upstream.dialect_state.dialect, has_body=bool(body)):
            return None
        # Without room or slots the streaming path sends the error, or waits in the queue.
        needed = 0 if client.placed is not None else BODY_COPIES * len(body)
        if needed > destination.memory_budget.buffers.free:
            return None
        if not try_acquire_all(destination.concurrency_limits):
            return None
        try:
            call = _make_call(plan, destination, head, body, client)
        except GatewayError:
            call = None  # the streaming path sends the error
        except BaseException:
            release_all(destination.concurrency_limits)
            raise
        if call is None:
            release_all(destination.concurrency_limits)
        return call

    def clear_plans(self) -> None:
        """Forget the cached plans, because API keys have changed."""
        self._plans.clear()
        self._grpc_plans.clear()

    @property
    def in_flight(self) -> int:
        """Return the number of calls that wait for a server, but for those in a task."""
        return sum(timeouts.size for timeouts in self._timeouts.values())

    def close(self) -> None:
        """Drop the timers, when no call is left."""
        for timeouts in self._timeouts.values():
            timeouts.close()


def _rpcs_of(rpc: GrpcMethod, named: NamedModel) -> tuple[Operation, ...]:
    """Return the operations that servers may take a message for."""
    model, names = named
    return tuple(operation_of(rpc, name, model.version) for name in names or ("",))


def _make_call(
    plan: CallPlan,
    destination: Destination,
    head: RequestHead,
    body: bytes | memoryview,
    client: FastPathClient,
) -> BufferedCall | None:
    """Choose an endpoint, and convert the request; None for the streaming path."""
    record = client.record
    is_timed = plan.adds_server_timing or record.trace is not None
    began = time.perf_counter() if is_timed else 0.0
    pool = destination.upstream.pool
    hash_key = pool.hash_key_of(plan.headers, client.added_headers)
    lease = pool.lease((), plan.model, hash_key)
    endpoint = lease.endpoint
    is_grpc = plan.handler.sends_grpc(destination.upstream)
    connection = endpoint.try_reserve_stream() if is_grpc else endpoint.try_reserve()
    if connection is None:
        return None
    try:
        read = client.infer_request
        if read is None:
            request = plan.handler.to_server(head, body, destination, record.request_id)
        else:
            request = plan.handler.as_read(head, read, destination)
        if request is not None and _may_be_sent(request, endpoint, client.placed):
            call = BufferedCall(plan, destination, request, head, lease, connection, client, began)
            plan.choice.take()
            if plan.mirror is not None:
                # Last: the streaming path would mirror it again.
                plan.mirror(head, bytes(body), client)
            return call
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


def _may_be_sent(
    request: ServerRequest, endpoint: UpstreamEndpoint, placed: RequestSlice | None
) -> bool:
    """Tell whether the fast path may send a request.

    It sends a placed body only if the server has it already: one may be too large for a time slice,
    and what a connection with other calls has yet to send may be in memory of another call later.
    """
    if placed is None:
        return True
    if request.shared is None or endpoint.shared_memory is not placed.lane:
        return False
    tensors = request.shared.tensors
    return tensors.input_size > 0 and tensors.start_in(placed.view) is not None


def _mirror(
    route_match: RouteMatch, head: RequestHead, body: bytes, client: FastPathClient
) -> None:
    """Mirror a request if it is chosen."""
    mirror = None if route_match.sample_mirror is None else route_match.sample_mirror()
    if mirror is not None:
        headers = to_server(head.headers, route_match.dropped_headers, client.added_headers)
        target, operation = route_match.target, route_match.operation
        copy = MirroredRequest(
            mirror, head.method, target, headers, len(body), operation, client.record
        )
        copy.add(body)


def _server_timeout(limits: Limits) -> float:
    """Return the seconds after which a server without a response is late."""
    return min(limits.idle_timeout, limits.request_timeout)
