"""Sends a request to an endpoint, and to another one if that fails and a retry is allowed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, TypeVar

from gateway.errors import ErrorKind, GatewayError, ServerName, strip_tracebacks
from gateway.observe.call_capture import CallCapture, CapturedAttempt, CapturedMessage
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import TRACEPARENT, TRACESTATE
from gateway.protocol.operations import ModelName, model_name_of
from gateway.proxy.admission.concurrency_limit import acquire_all, release_all
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.request_slice import RequestSlice
from gateway.proxy.attempts.attempt import Attempt
from gateway.proxy.attempts.shared_memory import SharedMemoryCall
from gateway.proxy.attempts.shared_memory_forms import SharedMemoryForm
from gateway.proxy.body_chunks import WatchedBody
from gateway.proxy.destination import Destination, Upstream
from gateway.proxy.interfaces import Call
from gateway.routing.retry import RetryPolicy
from gateway.system.shared_memory import Slice
from gateway.upstream.content_decoding import quoted_response
from gateway.upstream.pool.member import Outcome
from gateway.upstream.pool.pool import outcome_of
from gateway.upstream.transport import (
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
    WrappedResponse,
    check_lengths,
    closed_on_error,
)

_T = TypeVar("_T")

_QUOTE_TIMEOUT = 0.2
"""Seconds in which the body of a refused response must begin to be quoted."""
_CANCELLED = "cancelled: a timeout, or the client has closed the connection"


class UpstreamCall:
    """Sends a request to an endpoint; holds the response while its context is open.

    If an endpoint is unreachable, no server has seen the request: another endpoint is tried. After
    other failures that depends on the retry policy of the destination, and on the upstream's retry
    budget. A retry needs a body that is buffered, or of which nothing was read. Each endpoint is
    tried once: unhealthy and ejected ones last.

    ``record`` gets the endpoint and the attempts. ``tried`` are endpoints that have failed before;
    ``model`` is the one that the request names. Its tensors may go through shared memory in
    a ``form``; the request was received there if it is ``placed``. See also ``lends_memory``.
    Raises GatewayError: that of the last endpoint, 503 for overload, 400 for a head that no server
    of the upstream accepts.
    """

    response: UpstreamResponse
    server: ServerName

    def __init__(
        self,
        destination: Destination,
        request: UpstreamRequest,
        deadline: Deadline,
        record: CallRecord,
        tried: tuple[UpstreamEndpoint, ...] = (),
        model: ModelName | None = None,
        form: SharedMemoryForm | None = None,
        placed: RequestSlice | None = None,
        lends_memory: bool = False,
    ) -> None:
        self._limits = destination.concurrency_limits
        self._request = request
        self._deadline = deadline
        self._record = record
        self._shared: SharedMemoryCall | None = None
        if form is not None and record.capture is None:
            name = "" if model is None else model.name
            self._shared = SharedMemoryCall(
                request, form, name, destination.scheduler, placed, lends_memory
            )
        hash_key = destination.upstream.pool.hash_key_of(request.headers)
        self._retry = RetryState(
            destination.upstream, destination.retry_policy, list(tried), model, hash_key
        )

    async def __aenter__(self) -> Self:
        """Send the request; return once the head of a response is there."""
        check_lengths(self._request, self._retry.upstream.dialect_state.dialect)
        await self._acquire_slots()
        try:
            await self._send_with_retries()
        except BaseException:
            self._release()
            raise
        self.server = self._attempt.endpoint.server_for(is_grpc=self._request.is_grpc)
        return self

    async def _acquire_slots(self) -> None:
        record = self._record
        is_first = not record.attempts
        if is_first:
            record.prepare_seconds = self._deadline.busy_seconds
        queued_at = time.perf_counter()
        if is_first and record.trace is not None:
            record.trace.set_prepared(record.started, queued_at)
        try:
            await acquire_all(self._limits, self._deadline)
        finally:
            if is_first:
                record.queue_seconds = time.perf_counter() - queued_at
            if record.trace is not None and self._limits:
                record.trace.set_queued(queued_at, time.perf_counter())

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Release the slots, the connection and the endpoint."""
        try:
            self._release_endpoint(error)
        finally:
            self._release()

    def _release(self) -> None:
        release_all(self._limits)
        if self._shared is not None:
            self._shared.release()

    def _release_endpoint(self, error: BaseException | None, is_retried: bool = False) -> None:
        """Release the connection and the endpoint of the last attempt, whatever it says of it."""
        outcome, why = Outcome.UNKNOWN, ""
        attempt, response = self._attempt, self.response
        try:
            attempt.close(response)
            if error is not None:
                outcome, why = attempt.fail(self._deadline.translate(error))
            elif is_retried:
                outcome, why = attempt.lease.classify_retried(response.final_status, response.error)
                attempt.repeat(outcome, why)
            else:
                outcome, why = attempt.lease.classify_status(response.final_status, response.error)
        finally:
            attempt.end(outcome, why)

    async def _send_with_retries(self) -> None:
        """Send the request until there is a response for the client."""
        reach = partial(self._retry.reach, self._send, self._deadline, self._record)
        while True:
            self._attempt, self.response = await reach()
            try:
                status, endpoint = self.response.final_status, self._attempt.endpoint
                is_retried = self._retry.should_retry_status(status, endpoint)
                if is_retried:
                    await read_start(self.response)  # it says why it is retried
            except BaseException as error:
                self._release_endpoint(error)
                raise
            if not is_retried:
                return
            self._release_endpoint(None, is_retried=True)

    async def _send(self, attempt: Attempt) -> UpstreamResponse:
        # The body may outlive its reading, with the response: it must not refer to this call.
        request, record, deadline, retry = self._request, self._record, self._deadline, self._retry
        server = attempt.endpoint.server_for(is_grpc=request.is_grpc)
        deadline.expect_server(server)
        is_read_once = isinstance(request.body, AsyncIterator)

        def begin() -> None:
            # Not even the wait for a first piece: it is cancelled with the attempt.
            retry.is_repeatable = not is_read_once

        def count(piece: bytes | memoryview) -> None:
            deadline.expect_server(server)
            record.sent_bytes += len(piece)

        lane, shared = attempt.endpoint.shared_memory, self._shared
        if lane is not None and shared is not None:

            def send(part: UpstreamRequest, slices: Sequence[Slice]) -> Awaitable[UpstreamResponse]:
                return send_attempt(attempt, part, partial(lane.send, slices=slices))

            try:
                response = await shared.try_send(attempt, lane, send, begin, count)
            finally:
                if request is not shared.request:  # its body is in memory now
                    request = self._request = shared.request
                    retry.is_repeatable = True
            if response is not None:
                return response
        if isinstance(request.body, AsyncIterable):
            request = _watched(request, begin, count)
        return await send_attempt(attempt, request)


def send_call(
    call: Call,
    request: UpstreamRequest,
    *,
    to_any: bool = False,
    form: SharedMemoryForm | None = None,
) -> UpstreamCall:
    """Send the request of a client's call to a server that has its model, or ``to_any`` server."""
    model = None if to_any else model_name_of(call.operation)
    record, placed = call.response.record, call.request.placed
    return UpstreamCall(
        call.destination,
        request,
        call.deadline,
        record,
        model=model,
        form=form,
        placed=placed,
        lends_memory=call.response.can_wait_until_sent,
    )


async def send_attempt(
    attempt: Attempt,
    request: UpstreamRequest,
    send: Callable[[UpstreamRequest], Awaitable[UpstreamResponse]] | None = None,
) -> UpstreamResponse:
    """Send a request to the endpoint of an attempt; return once the head of a response is there.

    ``send`` does it in place of the endpoint's own; such a request is not captured.
    """
    record, endpoint = attempt.record, attempt.endpoint
    parent = attempt.begin(request.method, request.target, request.is_grpc)
    if record.trace is not None:
        headers = request.headers.copy()
        headers[TRACEPARENT] = parent  # each attempt has a span of its own
        if not record.trace.state:
            headers.popall(TRACESTATE, None)  # it is invalid, or that of an invalid traceparent
        request = replace(request, headers=headers)
    if isinstance(request.body, Sequence):
        record.sent_bytes = sum(map(len, request.body))
    if send is not None or record.capture is None:
        response = await (send or endpoint.send)(request)
    else:
        response = await send_captured(endpoint, request, record.capture, record.upstream)
    with closed_on_error(response):
        attempt.record_head(response.status, response.head_delay)
        return quoted_response(response)


async def read_start(response: UpstreamResponse) -> bytes | None:
    """Return the start of a response's body if it arrives soon, else None."""
    try:
        async with asyncio.timeout(_QUOTE_TIMEOUT):
            return bytes(await response.read())
    except (TimeoutError, GatewayError):
        return None


@dataclass(slots=True)
class RetryState:
    """Decides whether a request may go to another endpoint, and counts that as a retry.

    ``tried`` are the endpoints that it was sent to; ``model`` is the one that it names; the load
    balancer chooses by ``hash_key``.
    """

    upstream: Upstream
    policy: RetryPolicy
    tried: list[UpstreamEndpoint]
    model: ModelName | None = None
    hash_key: str | None = None
    is_repeatable: bool = True
    """Whether the whole body can be sent again."""

    async def reach(
        self, use: Callable[[Attempt], Awaitable[_T]], deadline: Deadline, record: CallRecord
    ) -> tuple[Attempt, _T]:
        """Call ``use`` with one attempt after another; return the first that has a result."""
        while True:
            lease = self.upstream.pool.lease(self.tried, self.model, self.hash_key)
            attempt = Attempt(self.upstream.name, lease, record)
            try:
                attempt.hold()
                return attempt, await use(attempt)
            except BaseException as error:
                attempt.end_with(deadline.translate(error))
                if not self.should_retry_error(error, attempt.endpoint):
                    raise
                attempt.repeat(*outcome_of(error))
                strip_tracebacks(error)

    def should_retry_error(self, error: BaseException, endpoint: UpstreamEndpoint) -> bool:
        """Record that an endpoint failed; tell whether to try another one."""
        self.tried.append(endpoint)
        if not isinstance(error, GatewayError):
            return False
        if not self.policy.allows(error.kind, self.is_repeatable):
            return False
        # Nothing was sent: to try each endpoint once adds no load to any server.
        return self._has_alternative if error.kind is ErrorKind.UNREACHABLE else self._may_retry()

    def should_retry_status(self, status: int, endpoint: UpstreamEndpoint) -> bool:
        """Record the status of a response; tell whether to try another endpoint for it."""
        if status not in self.policy.statuses or not self.is_repeatable:
            return False
        self.tried.append(endpoint)
        return self._may_retry()

    @property
    def _has_alternative(self) -> bool:
        return self.upstream.pool.has_alternative(self.tried, self.model)

    def _may_retry(self) -> bool:
        """Tell whether there is another endpoint, and room in the retry budget."""
        pool = self.upstream.pool
        return self._has_alternative and self.upstream.retry_budget.try_spend(
            pool.leases_total, sum(pool.outstanding)
        )


def _watched(
    request: UpstreamRequest,
    on_start: Callable[[], None],
    on_piece: Callable[[bytes | memoryview], None],
) -> UpstreamRequest:
    """Return a request with a ``WatchedBody`` in place of its streamed one."""
    body = request.body
    assert isinstance(body, AsyncIterable)
    watched = WatchedBody(body, on_start, on_piece)
    # A body that is an iterator cannot be read again, and must not seem to.
    return replace(request, body=aiter(watched) if isinstance(body, AsyncIterator) else watched)


async def send_captured(
    endpoint: UpstreamEndpoint, request: UpstreamRequest, capture: CallCapture, upstream: str
) -> UpstreamResponse:
    """Send a request as ``UpstreamEndpoint.send`` does; ``upstream`` is the upstream's name."""
    head = (request.method, request.target, request.headers)
    sent = CapturedMessage.of_request(*head, is_grpc=request.is_grpc)
    attempt = capture.begin(upstream, endpoint.server_for(is_grpc=request.is_grpc).url, sent)
    if isinstance(request.body, AsyncIterable):
        request = _watched(request, sent.restart, sent.add)
    else:
        for piece in request.body or ():
            sent.add(piece)
    try:
        response = await endpoint.send(request)
    except BaseException as error:
        attempt.error = _describe(error)
        raise
    with closed_on_error(response):
        attempt.response = CapturedMessage.of_response(
            response.status, response.reason, response.headers, is_grpc=request.is_grpc
        )
        return _CapturedResponse(response, attempt, attempt.response)


def _describe(error: BaseException) -> str:
    """Return why an attempt failed: the gateway cancels what takes too long."""
    if isinstance(error, asyncio.CancelledError):
        return _CANCELLED
    return str(error) or type(error).__name__


class _CapturedResponse(WrappedResponse):
    """A response, captured while it is read."""

    def __init__(
        self, response: UpstreamResponse, attempt: CapturedAttempt, message: CapturedMessage
    ) -> None:
        super().__init__(response)
        self._attempt = attempt
        self._message = message

    async def read(self) -> bytes | memoryview:
        """Return the next chunk of the body."""
        try:
            piece = await self._response.read()
        except BaseException as error:
            self._attempt.error = _describe(error)
            raise
        self._message.add(piece)
        if not piece:
            self._message.trailers = list(self._response.trailers)
        return piece
