"""A call of the fast path, from its request to the server until the client has the response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from multidict import CIMultiDictProxy

from gateway.errors import GatewayError, ServerName, name_server_in_errors, strip_tracebacks
from gateway.http1.head import RequestHead, ResponseHead
from gateway.observe.call_record import NO_LABELS, CallLabels, CallRecord
from gateway.observe.call_trace import TRACE_HEADERS, TRACEPARENT, CallTrace
from gateway.protocol.dialects import Dialect
from gateway.protocol.operations import ModelName
from gateway.proxy.admission.concurrency_limit import release_all
from gateway.proxy.admission.deadline import (
    Deadline,
    client_deadline_error,
    idle_timeout_text,
    request_timeout_text,
    server_timeout,
)
from gateway.proxy.attempts.attempt import Attempt
from gateway.proxy.attempts.retry import RetryState, UpstreamCall
from gateway.proxy.attempts.shared_memory import STALE, SharedMemoryAttempt, finish_response
from gateway.proxy.calls.handler import BufferedHandler, ServerRequest, ServerResponse
from gateway.proxy.destination import Destination
from gateway.proxy.errors import INTERNAL_ERROR, error_response, run_with_deadline
from gateway.proxy.headers import SERVER_TIMING, ResponseHeaderPolicy, server_timing
from gateway.proxy.interfaces import ClientResponse, FastPathClient, ResponseTemplate
from gateway.routing.balancer import WeightedChoice
from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.content_decoding import quoted_response
from gateway.upstream.http.connection import StaleConnectionError
from gateway.upstream.pool.member import Outcome
from gateway.upstream.pool.pool import Lease
from gateway.upstream.transport import (
    FIRST_ERROR_STATUS,
    FieldLines,
    RequestTemplate,
    ReservedConnection,
    UpstreamEndpoint,
    UpstreamResponse,
)

BODY_COPIES: Final = 2
"""Copies of a request's body during the call: as received, and as sent."""

_log = logging.getLogger("tensorgate.proxy")


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How requests with the same head are served."""

    handler: BufferedHandler
    headers: CIMultiDictProxy[str]
    """The client's keyed headers that go to the server."""
    choice: WeightedChoice[Destination]
    timeouts: TimeoutQueue
    max_size: int
    """Bytes of the largest body; larger ones take the streaming path."""
    converts: bool
    """Whether the form of the requests depends on the server's dialect."""
    model: ModelName | None = None
    """The model that the requests name."""
    mirror: Callable[[RequestHead, bytes, FastPathClient], None] | None = None
    """Takes requests and their clients, if they are mirrored."""
    header_policy: ResponseHeaderPolicy | None = None
    """What the route changes in the headers of responses."""
    has_version: bool = False
    """Whether the requests name a version of the model."""
    is_untyped: bool = False
    """Whether bodies pass untouched, and have no Content-Type."""
    passed_noted: frozenset[str] = frozenset()
    """Noted headers, in lower case, that pass to the server."""
    labels: CallLabels = NO_LABELS
    """What observers learn of the requests."""
    adds_server_timing: bool = False
    """Whether responses say where the call's time went."""

    def fits(self, dialect: Dialect | None, *, has_body: bool) -> bool:
        """Tell whether requests may go to servers of a dialect, None if it is unknown."""
        needs_type = self.is_untyped and has_body
        if dialect is None:
            return not (self.converts or self.has_version or needs_type)
        return not (
            (self.has_version and not dialect.versioned_paths)
            or (needs_type and dialect.requires_json_type)
        )

    def passed_lines(self, head: RequestHead, trace: CallTrace | None = None) -> bytes:
        """Return the lines of a head that pass to the server as they came.

        Each attempt of a traced call has a ``traceparent`` of its own.
        """
        if not self.passed_noted:
            return head.passed
        passed = self.passed_noted
        if trace is not None:
            passed -= {TRACEPARENT} if trace.state else TRACE_HEADERS
        noted = [field.line for field in head.noted if field.lower in passed]
        return b"".join((head.passed, *noted))


class BufferedCall:
    """A call, from its request to the server until its client has the response.

    A task continues it if the response arrives in parts, or another endpoint is tried. It is the
    ResponseReceiver of its response, and has a timeout until then.
    """

    def __init__(
        self,
        plan: CallPlan,
        destination: Destination,
        request: ServerRequest,
        head: RequestHead,
        lease: Lease,
        connection: ReservedConnection,
        client: FastPathClient,
        began: float = 0.0,
    ) -> None:
        self._plan = plan
        self._destination = destination
        self._request = request
        # A pipelined call may follow on the connection before this one has ended.
        record = self._record = client.record
        passed = plan.passed_lines(head, record.trace)
        self._around = client.added_lines, passed
        """Lines beside those that say how the body is written."""
        self._lines = b"".join((client.added_lines, request.lines, passed))
        body = request.body
        assert isinstance(body, (list, tuple))
        self._body: Sequence[bytes | memoryview] = body
        self._size = 0
        for piece in body:
            self._size += len(piece)
        self._began = began
        self._holds_slots = True
        self._reserved = 0
        self._attempt = Attempt(destination.upstream.name, lease, record)
        self._shared: SharedMemoryAttempt | None = None
        """The tensors of the attempt, if they go through shared memory."""
        self._is_client_told = False
        self._timeouts = plan.timeouts
        self._client = client
        self._connection: ReservedConnection | None = connection
        self._client_timer: asyncio.TimerHandle | None = None
        self.waits_for_chunks = request.received is not None

    def start(self) -> None:
        """Send the request: the commit point of the call.

        Until here another path may serve it. From here on nobody else may, and only a retry policy
        may have it sent again. It raises nothing: what fails is the call's own failure, of which
        its client learns.
        """
        try:
            connection = self._connection
            assert connection is not None
            self._hold()
            self._timeouts.add(self)
            request = self._request
            client_timeout = request.client_timeout
            if client_timeout is not None:
                loop = asyncio.get_running_loop()
                self._client_timer = loop.call_later(client_timeout, self._on_client_timeout)
            shared = self._share(connection)
            trace_line = self._record_start(self._record)
            self._lines += trace_line
            if shared is None:
                connection.send(request.template, self._lines, self._body, self)
            else:
                template, lines, body = shared
                assert self._connection is not None
                self._connection.send(template, lines + trace_line, body, self)
        except Exception as error:
            # Not at once: the client may have sent many such requests, each of which would begin
            # within the end of the one before.
            asyncio.get_running_loop().call_soon(self._fail_start, error)

    def _hold(self) -> None:
        """Count what ``_end`` gives back, beside the slots and the connection."""
        self._attempt.hold()
        # The client's call has counted a body that it has placed.
        self._reserved = 0 if self._client.placed is not None else BODY_COPIES * self._size
        self._destination.memory_budget.buffers.reserved += self._reserved

    def _share(
        self, connection: ReservedConnection
    ) -> tuple[RequestTemplate, bytes, Sequence[bytes | memoryview]] | None:
        """Put the tensors into shared memory; return the request, None if it goes as it is."""
        form, lane = self._request.shared, self._attempt.endpoint.shared_memory
        if form is None or lane is None or self._record.capture is not None:
            return None
        model = self._plan.model
        name = "" if model is None else model.name
        shared = SharedMemoryAttempt(lane, form, name, self._client.placed)
        self._shared = shared
        if shared.take_inputs():
            for _ in shared.copy_inputs():
                pass  # all at once: bodies of the fast path fit into a time slice
        shared.take_outputs()
        if not shared.slices:
            return None
        template, lines, body = shared.write()
        self._connection = lane.reserve(connection, shared.slices)
        added, passed = self._around
        return template, b"".join((added, lines, passed)), body

    def _record_start(self, record: CallRecord) -> bytes:
        """Record all that is known before the request is sent; return a line for its trace."""
        request, began = self._request, self._began
        template = request.template
        trace_parent = self._attempt.begin(template.method, template.target, request.is_grpc)
        record.labels = self._plan.labels
        record.server_form = request.form
        record.request_elements = request.elements
        record.sent_bytes = self._size
        if began:
            record.prepare_seconds = record.sent_at - began
        if record.trace is not None:
            record.trace.set_prepared(began, record.sent_at)
            return f"{TRACEPARENT}: {trace_parent}\r\n".encode()
        return b""

    def _fail_start(self, error: Exception) -> None:
        if self._connection is not None:  # else the client is gone
            self._fail(error)

    def _fail(self, error: Exception, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """End the call with an error; ``outcome`` is the endpoint's if the error does not say it.

        The client gets one response, or sees that there is no whole one.
        """
        try:
            from_error, why = self._attempt.fail(error)
            self._end(outcome if from_error is Outcome.UNKNOWN else from_error, why)
        finally:
            if self._is_client_told:
                self._drop_client(error)
            else:
                self._send_failure(error)

    def is_idempotent(self) -> bool:
        """Tell whether a server may execute the request twice; see UpstreamRequest."""
        return self._request.is_idempotent

    def passes_untouched(self, head: ResponseHead) -> bool:
        """Tell whether the client gets the response as it is."""
        return self._plan.handler.passes_untouched(self._request, head, self._destination)

    def on_complete(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines = ()
    ) -> bool:
        """Send a complete response to the client; False if it takes several time slices."""
        try:
            record, connection = self._record, self._connection
            assert connection is not None
            self._attempt.record_head(head.status, connection.head_delay)
            plan, shared = self._plan, self._shared
            if shared is not None and shared.slices:
                status, error = shared.form.read_error(head, body, trailers)
                if shared.returns_much(status):
                    return False
                if shared.goes_over_socket(status, error, record):
                    self._continue_over_socket()
                    return True
                with name_server_in_errors(self._server):
                    head, body = shared.read_response(status, head, body)
            response = ServerResponse(
                self._request,
                head,
                body,
                trailers,
                self._server,
                self._destination,
                plan.header_policy,
                record,
            )
            status = response.final_status
            said = response.error if status >= FIRST_ERROR_STATUS else ""
            if self._retry_status(status, said):
                return True
            record.received_bytes = len(body)
            message = plan.handler.to_client(response)
            if message is None:
                return False
            if status < FIRST_ERROR_STATUS:
                self._end(Outcome.SUCCEEDED)
            else:
                record.server_error = record.server_error or said
                self._end(*self._attempt.lease.classify_status(status, said))
            template, lines, content, ending = message
            if plan.adds_server_timing:
                spent = time.perf_counter() - record.sent_at - record.server_seconds
                lines += self._timing_line(spent)
            self._is_client_told = True
            self._client.respond(template, lines, content, trailers=ending)
        except Exception as error:
            # If the response does not fit the client's encoding, the server has succeeded.
            self._fail(error, Outcome.SUCCEEDED)
        return True

    def on_headers(self, response: UpstreamResponse) -> None:
        """Continue in a task that passes a partial response on as it arrives."""
        try:
            self._attempt.record_head(response.status, response.head_delay)
            if self._retry_status(response.final_status, response.error):
                return
            lease = self._attempt.lease
            on_done = partial(self._end, *lease.classify_status(response.final_status))
            response = quoted_response(response)
            self._continue(partial(self._relay, response, self._stop_timers()), on_done)
        except Exception as error:
            self._fail(error)

    def on_error(self, error: Exception) -> None:
        """Continue in a task at another endpoint if a retry is allowed, else send the error."""
        try:
            outcome, why = self._attempt.fail(error)
            if self._gives_up_slices(error):
                self._continue_over_socket()
            elif self._retry_state.should_retry_error(error, self._attempt.endpoint):
                strip_tracebacks(error)
                self._continue_elsewhere(outcome, why)
            else:
                self._fail(error)
        except Exception as failure:
            self._fail(failure)

    def _gives_up_slices(self, error: Exception) -> bool:
        """Tell whether a request through shared memory is sent again after a close, without it."""
        shared = self._shared
        if shared is None or not shared.slices or not isinstance(error, StaleConnectionError):
            return False
        if not self._request.is_idempotent:
            return False
        # The first one may still run, and write to the slices: they stay in quarantine.
        shared.give_up(STALE, self._record)
        return True

    def _continue_over_socket(self) -> None:
        """Send the request again in a task, without shared memory."""
        spent = self._release_endpoint(Outcome.UNKNOWN, "")
        self._continue(partial(self._retry, spent, ()), self._release)

    def _retry_status(self, status: int, error: str) -> bool:
        """Retry at another endpoint in a task if the status demands it; tell whether it does."""
        statuses = self._destination.retry_policy.statuses
        endpoint = self._attempt.endpoint
        if not statuses or not self._retry_state.should_retry_status(status, endpoint):
            return False
        self._continue_elsewhere(*self._attempt.lease.classify_retried(status, error))
        return True

    def _continue_elsewhere(self, outcome: Outcome, why: str) -> None:
        """Retry in a task: it is the same call, with its slots and its time."""
        self._attempt.repeat(outcome, why)
        spent = self._release_endpoint(outcome, why)
        self._continue(partial(self._retry, spent, (self._attempt.endpoint,)), self._release)

    def _continue(
        self, rest: Callable[[ClientResponse], Awaitable[None]], on_done: Callable[[], None]
    ) -> None:
        """Run the rest of the call in a task; ``on_done`` releases what it still holds."""
        self._is_client_told = True
        try:
            self._client.continue_in_task(rest, on_done)
        except Exception as error:
            on_done()
            self._drop_client(error)

    @property
    def _server(self) -> ServerName:
        """Return how errors name the endpoint."""
        return self._attempt.endpoint.server_for(is_grpc=self._request.is_grpc)

    @property
    def _retry_state(self) -> RetryState:
        return RetryState(
            self._destination.upstream, self._destination.retry_policy, [], self._plan.model
        )

    def on_timeout(self) -> None:
        """Tell the client that the server did not respond in time."""
        try:
            limits = self._destination.limits
            is_idle_timeout = limits.idle_timeout < limits.request_timeout
            expired = (
                idle_timeout_text(limits.idle_timeout)
                if is_idle_timeout
                else request_timeout_text(limits.request_timeout)
            )
            error = server_timeout(self._server, expired)
        except Exception as failure:
            self._fail(failure, Outcome.TIMED_OUT)
        else:
            self._fail(error)

    def _on_client_timeout(self) -> None:
        """Tell the client of a gRPC call that its deadline is over; the server is told, too."""
        self._fail(client_deadline_error(self._request.client_timeout or 0.0, self._server))

    def cancel(self) -> None:
        """End the call, as its client has disconnected."""
        self._end(Outcome.UNKNOWN)

    def _end(self, outcome: Outcome, why: str = "") -> None:
        """Give back all that the call still holds: its slots, its memory and the endpoint."""
        try:
            self._release()
        finally:
            if self._connection is not None:
                self._release_endpoint(outcome, why)

    def _release(self) -> None:
        """Give back the slots and the memory, once."""
        if self._holds_slots:
            self._holds_slots = False
            release_all(self._destination.concurrency_limits)
            self._destination.memory_budget.buffers.reserved -= self._reserved
            if self._shared is not None:
                self._shared.end_call()

    def _release_endpoint(self, outcome: Outcome, why: str) -> float:
        """Release the endpoint; return the seconds that it has taken."""
        assert self._connection is not None
        connection, self._connection = self._connection, None
        try:
            return self._stop_timers()
        finally:
            try:
                # Before the lease: what timed out is known by the calls given up on a connection.
                connection.close()
            except Exception as error:  # of the next request, which is sent over it
                self._log_error(error)
            if self._shared is not None:
                self._shared.tell(self._record)
            self._attempt.end(outcome, why)

    def _stop_timers(self) -> float:
        """Stop the timers until the response; return the seconds that the call has taken."""
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None
        return self._timeouts.remove(self)

    def _send_failure(self, error: Exception) -> None:
        self._is_client_told = True
        try:
            self._respond_with(error)
        except Exception as failure:
            self._drop_client(failure)

    def _drop_client(self, error: Exception) -> None:
        """Let the client see that there is no whole response, after an error of the gateway."""
        self._log_error(error)
        self._client.drop_call()

    def _log_error(self, error: Exception) -> None:
        """Log an error in the gateway itself, which must never be silent."""
        record = self._record
        where = (record.request_id or "-", record.method, record.target)
        _log.error("request %s: %s %s failed", *where, exc_info=error)

    def _respond_with(self, error: Exception) -> None:
        is_internal = not isinstance(error, GatewayError)
        record = self._record
        if is_internal:
            self._log_error(error)
        strip_tracebacks(error)
        reported = error if isinstance(error, GatewayError) else INTERNAL_ERROR
        is_grpc = self._plan.handler.is_grpc
        status, headers, body = error_response(reported, record, is_grpc=is_grpc)
        if (policy := self._plan.header_policy) is not None:
            headers = policy.apply_to_lines(headers)
        template = ResponseTemplate(status, "", headers, states_length=not is_grpc)
        lines = self._timing_line() if self._plan.adds_server_timing else b""
        self._client.respond(template, lines, body, last=is_internal)

    def _timing_line(self, response_seconds: float | None = None) -> bytes:
        timing = server_timing(self._record, response_seconds)
        return f"{SERVER_TIMING}: {timing}\r\n".encode()

    async def _relay(
        self, upstream_response: UpstreamResponse, spent: float, response: ClientResponse
    ) -> None:
        server, shared = self._server, self._shared
        received: UpstreamResponse | None = upstream_response

        async def run(deadline: Deadline) -> None:
            nonlocal received
            deadline.expect_server(server)
            try:
                if shared is not None and shared.slices:
                    lends = response.can_wait_until_sent
                    received = await finish_response(
                        upstream_response, shared, self._attempt, lends
                    )
                if received is not None:
                    await self._pass_on(received, server, response, deadline)
                    # The status of a gRPC call came in its trailers.
                    status, said = upstream_response.final_status, upstream_response.error
                    self._end(*self._attempt.lease.classify_status(status, said))
            except BaseException as error:
                self._end(*self._attempt.fail(deadline.translate(error)))
                raise
            if received is None:
                self._release_endpoint(Outcome.UNKNOWN, "")
                await self._send_again((), response, deadline)

        try:
            await self._run(run, spent, response)
        finally:
            if received is not None:  # else it is closed, and the record is that of another one
                self._attempt.close(upstream_response)

    async def _retry(
        self, spent: float, tried: tuple[UpstreamEndpoint, ...], response: ClientResponse
    ) -> None:
        await self._run(partial(self._send_again, tried, response), spent, response)

    async def _send_again(
        self, tried: tuple[UpstreamEndpoint, ...], response: ClientResponse, deadline: Deadline
    ) -> None:
        """Send the request over the socket, and pass the response on."""
        request = self._request.for_attempts(self._lines, waits_for_chunks=self.waits_for_chunks)
        # The call has its slots already.
        destination = replace(self._destination, concurrency_limits=())
        async with UpstreamCall(
            destination, request, deadline, response.record, tried, self._plan.model
        ) as again:
            await self._pass_on(again.response, again.server, response, deadline)

    async def _run(
        self, run: Callable[[Deadline], Awaitable[None]], spent: float, response: ClientResponse
    ) -> None:
        """Run the rest of the call in a task, as the streaming path does."""
        response.header_policy = self._plan.header_policy
        response.is_grpc = self._plan.handler.is_grpc
        limits, client_timeout = self._destination.limits, self._request.client_timeout
        await run_with_deadline(run, response, limits.new_deadline(spent, client_timeout))

    async def _pass_on(
        self,
        received: UpstreamResponse,
        server: ServerName,
        response: ClientResponse,
        deadline: Deadline,
    ) -> None:
        request, destination = self._request, self._destination
        relay = request.relay_of(received, server, response, destination, deadline)
        await self._plan.handler.relay(request, relay)
