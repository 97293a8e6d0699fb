"""The fast path: calls whose request and response are fully buffered, served without a task.

Most calls are such. They take two function calls, one when the request is there and one when the
response is. Every other call takes the streaming path (dispatch.py), from the start or from where
its response begins. Clients get the same on both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from multidict import CIMultiDictProxy

from gateway.codec.json.nesting import nests_deeper
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.fast_request import MAX_FAST_REQUEST, read_buffered_request
from gateway.errors import GatewayError
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import OperationKind, model_name_of
from gateway.proxy.admission.concurrency_limit import release_all, try_acquire_all
from gateway.proxy.admission.conversion_scheduler import MAX_UNSCHEDULED
from gateway.proxy.admission.timeout_queue import TimeoutQueue
from gateway.proxy.fast_path.call import BODY_COPIES, CallPlan, FastPathCall, header_lines
from gateway.proxy.filters.content_codings import accepted_coding
from gateway.proxy.filters.mirror import MirroredHead
from gateway.proxy.headers import HEADER_LENGTH, has_longer_part, to_server, with_body
from gateway.proxy.infer.cloud_content_types import may_have_cloud_type
from gateway.proxy.interfaces import Destination, FastPathClient, Limits
from gateway.proxy.router import RouteMatch, Router
from gateway.proxy.server_dialect import has_content_type
from gateway.upstream.transport import HeaderLines, RequestTemplate

MAX_PASSTHROUGH = 64 * 1024
"""Bytes of the largest request that passes untouched."""

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
        max_size = MAX_PASSTHROUGH if route_match.is_passthrough else MAX_FAST_REQUEST
        if length > min(max_size, limits.max_request_bytes):
            return None
        operation = route_match.operation
        passed = to_server(headers, route_match.dropped_headers)
        if "Content-Encoding" in headers and operation.kind is not OperationKind.OTHER:
            return None  # the streaming path decompresses, and drops an empty header
        if route_match.is_passthrough:
            if "Content-Length" not in passed and (length or method != "GET"):
                return None  # the transport must state how the body is framed
            lines = header_lines(passed)
        elif operation.kind is OperationKind.INFER and _may_be_json(headers, length, limits):
            # The gateway reads the response, so that it must not be compressed.
            changed = {"Content-Type": "application/octet-stream", "Accept-Encoding": None}
            lines = header_lines(with_body(passed, changed))
        else:
            return None
        is_passthrough = route_match.is_passthrough
        plan = CallPlan(
            RequestTemplate(method, route_match.target, lines),
            passed,
            route_match.choice,
            self._timeouts[_server_timeout(limits)],
            not is_passthrough,
            model_name_of(operation),
            _mirror_of(route_match, method, passed, length),
            header_policy=route_match.header_policy,
            has_version=operation.version is not None,
            is_untyped=is_passthrough and length > 0 and not has_content_type(target, passed),
            declared=route_match.choice.next.declared_models.get(operation.model or ""),
        )
        return _with_current_dialect(plan)

    def start(self, plan: CallPlan, body: bytes, client: FastPathClient) -> FastPathCall | None:
        """Send a request to a server; None if it takes the streaming path."""
        headers = client.added_headers
        received = body
        destination = plan.choice.next
        dialect = destination.upstream.dialect_state.dialect
        if (dialect is None or dialect is not plan.dialect) and not plan.fits(dialect):
            return None
        if plan.converts:
            request = _read(plan, body, destination)
            if request is None:
                return None
            inference_header = write_binary_header(request)
            body = b"".join((inference_header, *request.chunks))
            headers = (
                *headers,
                ("Content-Length", str(len(body))),
                (HEADER_LENGTH, str(len(inference_header))),
            )
        elif body and nests_deeper(body, destination.limits.max_json_depth):
            return None
        if not _try_admit(destination, BODY_COPIES * len(body)):
            return None
        pending = None
        try:
            pool = destination.upstream.pool
            hash_key = pool.hash_key_of(plan.headers, client.added_headers)
            lease = pool.lease((), plan.model, hash_key)
            call = FastPathCall(plan, destination, headers, body, lease, client)
            pending = lease.endpoint.try_send_nowait(plan.template, headers, body, call)
        except GatewayError:
            return None  # the streaming path sends the error
        finally:
            if pending is None:
                release_all(destination.concurrency_limits)
        if pending is None:
            return None
        plan.choice.take()
        call.start(pending)
        if plan.mirror is not None:
            plan.mirror(received, client.added_headers)
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


def _may_be_json(headers: CIMultiDictProxy[str], length: int, limits: Limits) -> bool:
    """Tell whether an infer request may be all JSON, of a size that is converted here."""
    if HEADER_LENGTH in headers or may_have_cloud_type(headers):
        return False
    return 0 < length <= limits.max_inference_header_bytes


def _read(plan: CallPlan, body: bytes, destination: Destination) -> InferRequest | None:
    """Read a request for JSON outputs; None if the streaming path has to inspect it."""
    if len(body) > MAX_UNSCHEDULED and not destination.scheduler.try_take_slice():
        return None  # requests of many clients may come in the same time slice
    request = read_buffered_request(
        body, destination.limits.max_json_depth, destination.limits.max_tensors
    )
    if request is None:
        return None
    encoding = request.head.output_encoding
    if not encoding.all_json or encoding.as_base64:
        return None
    if plan.declared is not None and not plan.declared.accepts(request.head.inputs):
        return None  # the streaming path sends the error
    return request


def _with_current_dialect(plan: CallPlan) -> CallPlan:
    """Store the current dialect in a plan that fits it: it is that of most calls, or of all."""
    dialect = plan.choice.next.upstream.dialect_state.dialect
    return replace(plan, dialect=dialect) if plan.fits(dialect) else plan


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
