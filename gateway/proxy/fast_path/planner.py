"""The straight way: a request at hand as a whole, whose answer comes as a whole too.

Most exchanges are such. They take two calls, one when the request is there and one when the answer
is, and no task between them. Whatever is not plain goes the ordinary way (dispatch.py): from the
start, or from where its answer begins. Both give the client the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from multidict import CIMultiDictProxy

from gateway.codec.json.nesting import nests_deeper
from gateway.codec.v2.fast_request import MAX_FAST_REQUEST, FastRequest, fast_convert_request
from gateway.errors import GatewayError
from gateway.protocol.operations import OperationKind, model_name_of
from gateway.proxy.admission.concurrency_limit import leave, try_acquire
from gateway.proxy.admission.conversion_scheduler import MAX_UNSCHEDULED
from gateway.proxy.admission.timeout_queue import TimeoutQueue
from gateway.proxy.fast_path.call import COPIES, CallPlan, FastPathCall, header_lines
from gateway.proxy.filters.content_codings import accepted_coding
from gateway.proxy.filters.mirror import MirroredHead
from gateway.proxy.headers import HEADER_LENGTH, has_longer_part, to_server, with_body
from gateway.proxy.infer.cloud_content_types import is_cloud_form
from gateway.proxy.interfaces import FastPathClient, Limits, Route
from gateway.proxy.router import RouteMatch, Router
from gateway.upstream.transport import HeaderLines, RequestTemplate

LARGEST = 64 * 1024
"""Bytes of a request that passes as it is."""

_LONG = 4 * 1024
"""Bytes of a part of a head, above which the ordinary way looks whether the server takes it."""


class FastPath:
    """Makes exchanges of requests at hand."""

    def __init__(self, routes: Router) -> None:
        self._routes = routes
        patiences = {_patience(rule.limits) for rule in routes.rules}
        self._watches = {patience: TimeoutQueue(patience) for patience in patiences}

    def plan(
        self, method: str, target: str, headers: CIMultiDictProxy[str], length: int
    ) -> CallPlan | None:
        """Tell what becomes of requests with this head; None if they go the ordinary way."""
        if method == "HEAD" or "Expect" in headers or has_longer_part(target, headers, _LONG):
            return None
        try:
            found = self._routes.find(method, target, headers)
        except GatewayError:
            return None  # the ordinary way says why it is refused
        # The routes of a choice have the same limits: what differs is where they lead.
        limits = found.choice.next.limits
        varies = bool(found.compress)
        if varies and accepted_coding(headers, found.compress):
            return None
        largest = LARGEST if found.is_passthrough else MAX_FAST_REQUEST
        if length > min(largest, limits.request_bytes):
            return None
        watch = self._watches[_patience(limits)]
        target, kind, model = found.target, found.asked.kind, found.asked.model
        versioned = found.asked.version is not None
        passed = to_server(headers, found.dropped_headers)
        mirror = _mirror(found, method, passed, length)
        if "Content-Encoding" in headers and kind is not OperationKind.OTHER:
            return None  # a header that says of none is not passed on either
        if found.is_passthrough:
            if "Content-Length" not in passed and (length or method != "GET"):
                return None  # the transport tells how the body is framed
            sent = header_lines(passed)
        elif kind is OperationKind.INFER and _may_be_json(headers, length, limits):
            # The answer has to be read here: none that is compressed is asked for.
            changed = {"Content-Type": "application/octet-stream", "Accept-Encoding": None}
            sent = header_lines(with_body(passed, changed))
        else:
            return None
        plan = CallPlan(
            RequestTemplate(method, target, sent),
            passed,
            found.choice,
            watch,
            not found.is_passthrough,
            model_name_of(found.asked),
            mirror,
            varies=varies,
            versioned=versioned,
            untyped=found.is_passthrough and length > 0 and "Content-Type" not in passed,
            declared=found.choice.next.models.get(model or ""),
        )
        return _made_for_now(plan)

    def begin(self, plan: CallPlan, body: bytes, client: FastPathClient) -> FastPathCall | None:
        """Send a request to a server; None if it goes the ordinary way."""
        headers = client.added_headers
        received = body
        route = plan.choice.next
        dialect = route.upstream.dialect_state.dialect
        if (dialect is None or dialect is not plan.dialect) and not plan.suits(dialect):
            return None
        if plan.converts:
            request = _converted(plan, body, route)
            if request is None:
                return None
            body = request.body
            headers = (
                *headers,
                ("Content-Length", str(len(body))),
                (HEADER_LENGTH, str(request.header_size)),
            )
        elif body and nests_deeper(body, route.limits.json_depth):
            return None
        if not _admitted(route, COPIES * len(body)):
            return None
        sent = None
        try:
            pool = route.upstream.pool
            loan = pool.lease((), plan.model, pool.hash_key_of(plan.passed, client.added_headers))
            exchange = FastPathCall(plan, route, headers, body, loan, client)
            sent = loan.endpoint.try_send_nowait(plan.start, headers, body, exchange)
        except GatewayError:
            return None  # the ordinary way says that there is none
        finally:
            if sent is None:
                leave(route.concurrency_limits)
        if sent is None:
            return None
        plan.choice.take()
        exchange.in_flight(sent)
        if plan.mirror is not None:
            plan.mirror(received, client.added_headers)
        return exchange

    @property
    def in_flight(self) -> int:
        """Give how many exchanges wait for a server; those that a task ends are not counted."""
        return sum(watch.watched for watch in self._watches.values())

    def close(self) -> None:
        """Let go of what is left, when no exchange is."""
        for watch in self._watches.values():
            watch.close()


def _admitted(route: Route, size: int) -> bool:
    """Tell whether there is room for a request that takes ``size`` bytes, and take its places."""
    if size > route.held.buffers.free:
        return False  # the ordinary way says that too much is held
    return try_acquire(route.concurrency_limits)  # it may wait, as a task


def _may_be_json(headers: CIMultiDictProxy[str], length: int, limits: Limits) -> bool:
    """Tell whether an infer request may be all JSON, of a size that is converted here."""
    if HEADER_LENGTH in headers or is_cloud_form(headers):
        return False
    return 0 < length <= limits.header_bytes


def _converted(plan: CallPlan, body: bytes, route: Route) -> FastRequest | None:
    """Convert a request whose answer is all JSON; None where the ordinary way looks closer."""
    if len(body) > MAX_UNSCHEDULED and not route.scheduler.take():
        return None  # those of many clients may come in the same turn of the event loop
    request = fast_convert_request(body, route.limits.json_depth, route.limits.max_tensors)
    if request is None or not request.output_encoding.all_json or request.output_encoding.as_base64:
        return None
    if plan.declared is not None and not plan.declared.accepts(request.features.inputs):
        return None  # the ordinary way says why not
    return request


def _made_for_now(plan: CallPlan) -> CallPlan:
    """Note a dialect that the plan suits: it is that of most requests, or of all."""
    dialect = plan.choice.next.upstream.dialect_state.dialect
    return replace(plan, dialect=dialect) if plan.suits(dialect) else plan


def _mirror(
    found: RouteMatch, method: str, headers: CIMultiDictProxy[str], length: int
) -> Callable[[bytes, HeaderLines], None] | None:
    """Give what takes the bodies of requests with the same head, where they are mirrored."""
    if found.mirror is None:
        return None
    return partial(
        found.mirror.sample, MirroredHead(method, found.target, headers, length, found.asked)
    )


def _patience(limits: Limits) -> float:
    """Give the seconds after which a server that has not answered is late."""
    return min(limits.idle_timeout, limits.request_timeout)
