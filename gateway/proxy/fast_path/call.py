"""A call of the fast path, from its request to the server until the client has the response."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.json.header_length_check import check_header_length
from gateway.errors import GatewayError, strip_tracebacks
from gateway.observe.failure_log import FAILURE_LOG
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.dialects import Dialect
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.operations import ModelName
from gateway.proxy.admission.concurrency_limit import release_all
from gateway.proxy.admission.deadline import (
    Deadline,
    idle_timeout_text,
    request_timeout_text,
    server_timeout,
)
from gateway.proxy.admission.timeout_queue import TimeoutQueue
from gateway.proxy.dispatch import INTERNAL_ERROR, error_body, error_headers, run_with_deadline
from gateway.proxy.headers import end_to_end, with_body
from gateway.proxy.infer.buffered_response import ResponseRelay
from gateway.proxy.infer.convert_response import (
    convert_response,
    convert_to_json,
    name_endpoint,
    response_header_size,
    with_empty_data,
)
from gateway.proxy.interfaces import ClientResponse, Destination, FastPathClient
from gateway.proxy.passthrough import relay_response
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.proxy.retry import RetryState, UpstreamCall
from gateway.proxy.router import WeightedChoice
from gateway.sizes import CACHED_HEADS
from gateway.upstream.pool.lease import Lease, outcome_of
from gateway.upstream.pool.member import Outcome
from gateway.upstream.pool.outlier_detection import FIRST_ERROR_STATUS
from gateway.upstream.transport import (
    HeaderLines,
    PendingRequest,
    RequestTemplate,
    UpstreamRequest,
    UpstreamResponse,
    UpstreamResponseHead,
)

BODY_COPIES = 2
"""Copies of a request's body during the call: as received, and as sent."""

_ALL_JSON = OutputEncoding(binary_by_default=False, binary_by_output={})

_log = logging.getLogger("tensorgate.proxy")


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How requests with the same head are served."""

    template: RequestTemplate
    headers: CIMultiDictProxy[str]
    """The client's headers that go to the server."""
    choice: WeightedChoice
    timeouts: TimeoutQueue
    converts: bool
    """Whether JSON becomes binary, and the response JSON; else both pass untouched."""
    model: ModelName | None = None
    """The model that the requests name."""
    mirror: Callable[[bytes, HeaderLines], None] | None = None
    """Takes the bodies that were sent, and headers added to them, if requests are mirrored."""
    header_policy: ResponseHeaderPolicy | None = None
    """What the route changes in the headers of responses."""
    has_version: bool = False
    """Whether the requests name a version of the model."""
    is_untyped: bool = False
    """Whether the requests have a body that passes untouched, and no Content-Type."""
    declared: DeclaredModel | None = None
    """The declaration of the model, if there is one."""
    dialect: Dialect | None = None
    """A dialect that the plan fits, so that this need not be checked for each call."""

    def fits(self, dialect: Dialect | None) -> bool:
        """Tell whether servers of a dialect, None if unknown, accept the plan's requests."""
        if dialect is None:
            return not (self.converts or self.has_version or self.is_untyped)
        if self.converts and (dialect.binary_only_if_listed or not dialect.binary):
            return False
        return not (
            (self.has_version and not dialect.versioned_paths)
            or (self.is_untyped and dialect.requires_json_type)
        )


class FastPathCall:
    """A call whose request was sent, until its client has the response or a task continues it.

    It is the ResponseReceiver of its response, and Timed until then.
    """

    def __init__(
        self,
        plan: CallPlan,
        destination: Destination,
        headers: HeaderLines,
        body: bytes,
        lease: Lease,
        client: FastPathClient,
    ) -> None:
        self._plan = plan
        self._destination = destination
        self._headers = headers
        self._body = body
        self._lease = lease
        self._timeouts = plan.timeouts
        self._client = client
        self._pending: PendingRequest | None = None

    def start(self, pending: PendingRequest) -> None:
        """Start to count the call: its request was sent."""
        self._pending = pending
        self._lease.acquire()
        self._timeouts.add(self)
        self._destination.memory_budget.buffers.reserved += BODY_COPIES * len(self._body)

    def on_complete(self, head: UpstreamResponseHead, body: bytes | memoryview) -> None:
        """Send a complete response to the client."""
        if self._retry_status(head.status):
            return
        try:
            headers, data = self._convert(head, bytes(body))
        except Exception as error:
            outcome, why = outcome_of(error)
            # If the response does not fit the client's encoding, the server has succeeded.
            self._end(Outcome.SUCCEEDED if outcome is Outcome.UNKNOWN else outcome, why)
            self._send_failure(error)
            return
        if head.status < FIRST_ERROR_STATUS:
            self._end(Outcome.SUCCEEDED)
        else:
            self._end(*self._lease.classify_status(head.status))
        if (policy := self._plan.header_policy) is not None:
            headers = policy.apply_to_lines(headers)
        self._client.respond(head.status, head.reason, headers, data)

    def on_headers(self, response: UpstreamResponse) -> None:
        """Continue in a task that passes a partial response on as it arrives."""
        if self._retry_status(response.status):
            return
        spent = self._timeouts.remove(self)
        on_done = partial(self._end, *self._lease.classify_status(response.status))
        self._client.continue_in_task(partial(self._relay, response, spent), on_done)

    def on_error(self, error: Exception) -> None:
        """Continue in a task at another endpoint if a retry is allowed, else send the error."""
        outcome, why = outcome_of(error)
        if self._retry_state.should_retry_error(error, self._lease.endpoint):
            strip_tracebacks(error)
            self._continue_elsewhere(outcome, why)
        else:
            self._end(outcome, why)
            self._send_failure(error)

    def _retry_status(self, status: int) -> bool:
        """Retry at another endpoint in a task if the status demands it; tell whether it does."""
        statuses = self._destination.retry_policy.statuses
        if not statuses or not self._retry_state.should_retry_status(status, self._lease.endpoint):
            return False
        self._continue_elsewhere(*self._lease.classify_retried(status))
        return True

    def _continue_elsewhere(self, outcome: Outcome, why: str) -> None:
        """Retry in a task: it is the same call, with its slots and its time."""
        spent = self._release_endpoint(outcome, why)
        self._client.continue_in_task(partial(self._retry, spent), self._release)

    @property
    def _retry_state(self) -> RetryState:
        return RetryState(
            self._destination.upstream, self._destination.retry_policy, [], self._plan.model
        )

    def on_timeout(self) -> None:
        """Tell the client that the server did not respond in time."""
        limits = self._destination.limits
        is_idle_timeout = limits.idle_timeout < limits.request_timeout
        expired = (
            idle_timeout_text(limits.idle_timeout)
            if is_idle_timeout
            else request_timeout_text(limits.request_timeout)
        )
        error = server_timeout(self._lease.endpoint.url, expired)
        self._end(Outcome.FAILED, str(error))
        self._send_failure(error)

    def cancel(self) -> None:
        """End the call, as its client has disconnected."""
        self._end(Outcome.UNKNOWN)

    def _end(self, outcome: Outcome, why: str = "") -> None:
        if self._pending is not None:
            self._release_endpoint(outcome, why)
            self._release()

    def _release(self) -> None:
        """Release the slots and the memory."""
        release_all(self._destination.concurrency_limits)
        self._destination.memory_budget.buffers.reserved -= BODY_COPIES * len(self._body)

    def _release_endpoint(self, outcome: Outcome, why: str) -> float:
        """Release the endpoint; return the seconds that it has taken."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        spent = self._timeouts.remove(self)
        pending.close()
        self._lease.release(outcome, why)
        return spent

    def _convert(self, head: UpstreamResponseHead, body: bytes) -> tuple[HeaderLines, bytes]:
        """Return headers and body of the client's response; raises GatewayError."""
        if not self._plan.converts or head.status != 200:
            return _end_to_end_lines(head), body
        cap = self._destination.limits.max_inference_header_bytes
        try:
            header_size, headers = _json_head(head, cap)
            if header_size is not None:
                return headers, convert_to_json(body, header_size, self._destination)
            check_header_length(body)
            if len(body) <= cap:
                body = with_empty_data(body, _ALL_JSON, self._destination)
        except GatewayError as error:
            raise name_endpoint(self._lease.endpoint.url, error) from error
        return headers, body

    def _send_failure(self, error: Exception) -> None:
        is_internal = not isinstance(error, GatewayError)
        request_id = self._client.request_id
        if is_internal:
            # An error in the gateway itself must never be silent.
            template = self._plan.template
            where = (request_id or "-", template.method, template.target)
            _log.error("request %s: %s %s failed", *where, exc_info=error)
        strip_tracebacks(error)
        reported = error if isinstance(error, GatewayError) else INTERNAL_ERROR
        FAILURE_LOG.write(reported, request_id)
        headers = error_headers(request_id)
        if (policy := self._plan.header_policy) is not None:
            headers = policy.apply_to_lines(headers)
        body = error_body(reported.message)
        self._client.respond(reported.kind.value.status, "", headers, body, last=is_internal)

    async def _relay(
        self, upstream_response: UpstreamResponse, spent: float, response: ClientResponse
    ) -> None:
        url = self._lease.endpoint.url

        async def run(deadline: Deadline) -> None:
            deadline.expect_server(url)
            try:
                await self._pass_on(upstream_response, url, response, deadline)
            except BaseException as error:
                self._end(*outcome_of(deadline.translate(error)))
                raise

        try:
            await self._run(run, spent, response)
        finally:
            upstream_response.close()

    async def _retry(self, spent: float, response: ClientResponse) -> None:
        template = self._plan.template
        headers = CIMultiDict([*template.headers, *self._headers])
        has_body = bool(self._body) or "Content-Length" in headers
        body = (self._body,) if has_body else None
        request = UpstreamRequest(template.method, template.target, headers, body)
        destination = replace(
            self._destination, concurrency_limits=()
        )  # the call has its slots already

        async def run(deadline: Deadline) -> None:
            tried = (self._lease.endpoint,)
            model = self._plan.model
            async with UpstreamCall(destination, request, deadline, tried, model) as upstream_call:
                await self._pass_on(upstream_call.response, upstream_call.url, response, deadline)

        await self._run(run, spent, response)

    async def _run(
        self, run: Callable[[Deadline], Awaitable[None]], spent: float, response: ClientResponse
    ) -> None:
        """Run the rest of the call in a task, as the streaming path does."""
        response.header_policy = self._plan.header_policy
        await run_with_deadline(run, response, self._destination.limits.new_deadline(spent))

    async def _pass_on(
        self,
        upstream_response: UpstreamResponse,
        url: str,
        response: ClientResponse,
        deadline: Deadline,
    ) -> None:
        if self._plan.converts:
            await convert_response(
                ResponseRelay(
                    upstream_response, url, response, _ALL_JSON, self._destination, deadline
                )
            )
        else:
            await relay_response(upstream_response, response, url, deadline)


def header_lines(headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> HeaderLines:
    """Return headers as lines."""
    return tuple(headers.items())


@lru_cache(maxsize=CACHED_HEADS)
def _end_to_end_lines(head: UpstreamResponseHead) -> HeaderLines:
    return header_lines(end_to_end(head.headers))


@lru_cache(maxsize=CACHED_HEADS)
def _json_head(head: UpstreamResponseHead, cap: int) -> tuple[int | None, HeaderLines]:
    """Return the size of the JSON part, None without tensors behind it, and the headers."""
    header_size = response_header_size(head, cap)
    changed = {} if header_size is None else {"Content-Type": "application/json"}
    return header_size, header_lines(with_body(head.headers, changed))
