"""The fast path: calls whose request and response are fully buffered, served without a task.

Most calls are such. They take two function calls, one when the request is there and one when the
response is. Every other call takes the streaming path (dispatch.py), from the start or from where
its response begins. Clients get the same on both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from multidict import CIMultiDictProxy

from gateway.codec.v2.fast_request import MAX_FAST_REQUEST
from gateway.errors import GatewayError
from gateway.protocol.operations import OperationKind, model_name_of
from gateway.proxy.admission.concurrency_limit import release_all, try_acquire_all
from gateway.proxy.admission.timeout_queue import TimeoutQueue
from gateway.proxy.fast_path.call import BODY_COPIES, CallPlan, FastPathCall
from gateway.proxy.fast_path.handlers import (
    FastPathHandler,
    InferHandler,
    PassthroughHandler,
    PredictHandler,
)
from gateway.proxy.filters.content_codings import accepted_coding
from gateway.proxy.filters.mirror import MirroredHead
from gateway.proxy.headers import has_longer_part, header_length, to_server
from gateway.proxy.infer.cloud_content_types import may_have_cloud_type
from gateway.proxy.interfaces import Destination, FastPathClient, Limits
from gateway.proxy.router import RouteMatch, Router
from gateway.proxy.server_dialect import has_content_type
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.transport import HeaderLines, RequestTemplate

LONG_HEAD_PART = 4 * 1024
"""Bytes of a part of a head above which the streaming path checks whether the server takes it."""


class FastPath:
    """Plans and starts calls of the fast path."""

    def __init__(self, router: Router) -> None:
        self._router = router
        timeouts = {_server_timeout(route.limits) for route in router.routes}
        self._timeouts = {timeout: TimeoutQueue(timeout) for timeout in timeouts}

    def plan(
        self, method: str, target: str, headers: CIMultiDictProxy[str], length: int
    ) -> CallPlan | None:
        """Return the plan for requests with this head; None if they take the streaming path."""
        if (
            method == "HEAD"
            or "Expect" in headers
            or has_longer_part(target, headers, LONG_HEAD_PART)
        ):
            return None
        try:
            route_match = self._router.find(method, target, headers)
        except GatewayError:
            return None  # the streaming path sends the error
        # The destinations of a choice have the same limits: they differ in their upstreams alone.
        limits = route_match.choice.next.limits
        if route_match.codings and accepted_coding(headers, route_match.codings):
            return None
        operation = route_match.operation
        if "Content-Encoding" in headers and operation.kind is not OperationKind.OTHER:
            return None  # the streaming path decompresses, and drops an empty header
        passed = to_server(headers, route_match.dropped_headers)
        handler = _make_handler(route_match, method, passed, length, limits)
        if handler is None or length > min(handler.max_size, limits.max_request_bytes):
            return None
        converts = isinstance(handler, InferHandler)
        return CallPlan(
            handler,
            passed,
            route_match.choice,
            self._timeouts[_server_timeout(limits)],
            converts,
            model_name_of(operation),
            _mirror_of(route_match, method, passed, length),
            header_policy=route_match.header_policy,
            has_version=operation.version is not None,
            is_untyped=not converts and length > 0 and not has_content_type(target, passed),
        )

    def start(self, plan: CallPlan, body: bytes, client: FastPathClient) -> FastPathCall | None:
        """Send a request to a server; None if it takes the streaming path.

        Nothing is converted before there are slots, memory, and a connection to an endpoint.
        """
        destination = plan.choice.next
        if not plan.fits(destination.upstream.dialect_state.dialect):
            return None
        if not _try_admit(destination, BODY_COPIES * len(body)):
            return None
        connection, call = None, None
        try:
            pool = destination.upstream.pool
            hash_key = pool.hash_key_of(plan.headers, client.added_headers)
            lease = pool.lease((), plan.model, hash_key)
            connection = lease.endpoint.try_reserve()
            if connection is None:
                return None
            request = plan.handler.to_server(body, destination, client.record.request_id)
            if request is None:
                return None
            if plan.mirror is not None:
                plan.mirror(body, client.added_headers)
            call = FastPathCall(plan, destination, request, lease, client)
        except GatewayError:
            return None  # the streaming path sends the error
        finally:
            if call is None:
                if connection is not None:
                    connection.close()
                release_all(destination.concurrency_limits)
        plan.choice.take()
        call.start(connection)
        return call

    @property
    def in_flight(self) -> int:
        """Return the number of calls that wait for a server, but for those in a task."""
        return sum(timeouts.size for timeouts in self._timeouts.values())

    def close(self) -> None:
        """Drop the timers, when no call is left."""
        for timeouts in self._timeouts.values():
            timeouts.close()


def _try_admit(destination: Destination, size: int) -> bool:
    """Take the destination's slots if they and ``size`` bytes of memory are free."""
    if size > destination.memory_budget.buffers.free:
        return False  # the streaming path sends the error
    return try_acquire_all(
        destination.concurrency_limits
    )  # the streaming path may wait in the queue


def _make_handler(
    route_match: RouteMatch,
    method: str,
    headers: CIMultiDictProxy[str],
    length: int,
    limits: Limits,
) -> FastPathHandler | None:
    """Return the handler of requests with these headers; None if they take the streaming path."""
    operation, target = route_match.operation, route_match.target
    if route_match.is_passthrough:
        if "Content-Length" not in headers and (length or method != "GET"):
            return None  # the transport must state how the body is framed
        return PassthroughHandler(RequestTemplate(method, target, tuple(headers.items())))
    if not length or may_have_cloud_type(headers):
        return None
    if operation.kind is OperationKind.PREDICT:
        return PredictHandler(target, headers, operation)
    if operation.kind is not OperationKind.INFER:
        return None
    try:
        header_size = header_length(headers)
    except GatewayError:
        return None  # the streaming path sends the error
    max_size = CONVERT_CHUNK
    if header_size is None:
        max_size = min(MAX_FAST_REQUEST, limits.max_inference_header_bytes)
    return InferHandler(method, target, headers, operation, header_size, max_size)


def _mirror_of(
    route_match: RouteMatch, method: str, headers: CIMultiDictProxy[str], length: int
) -> Callable[[bytes, HeaderLines], None] | None:
    """Return what mirrors requests with the same head; None without a mirror."""
    if route_match.mirror is None:
        return None
    head = MirroredHead(method, route_match.target, headers, length, route_match.operation)
    return partial(route_match.mirror.sample, head)


def _server_timeout(limits: Limits) -> float:
    """Return the seconds after which a server without a response is late."""
    return min(limits.idle_timeout, limits.request_timeout)
