"""A request of the straight way, from when it was sent until its client has the answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.json.header_length_check import check_header_length
from gateway.errors import GatewayError, strip_tracebacks
from gateway.observe.failure_log import FAILURE_LOG
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.dialects import Dialect
from gateway.protocol.operations import ModelName
from gateway.protocol.request_header import OutputEncoding
from gateway.proxy.admission.concurrency_limit import leave
from gateway.proxy.admission.deadline import Deadline, not_done, nothing_moved, server_timeout
from gateway.proxy.admission.timeout_queue import TimeoutQueue
from gateway.proxy.dispatch import INTERNAL_ERROR, error_body, error_headers, run_with_deadline
from gateway.proxy.filters.compression import CompressedAnswer, varying
from gateway.proxy.headers import end_to_end, with_body
from gateway.proxy.infer.convert_response import (
    answer_header_size,
    naming,
    relay_answer,
    whole_as_json,
    with_empty_data,
)
from gateway.proxy.interfaces import ClientResponse, FastPathClient, Route
from gateway.proxy.passthrough import forward_answer
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

COPIES = 2
"""How often a request's body is there while it is under way: as it is, and as it was sent."""


_ALL_JSON = OutputEncoding(binary_by_default=False, binary_by_output={})

_log = logging.getLogger("tensorgate.exchange")


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What becomes of requests with the same head."""

    start: RequestTemplate
    passed: CIMultiDictProxy[str]
    """The client's headers that go to the server."""
    choice: WeightedChoice
    watch: TimeoutQueue
    converts: bool
    """Whether JSON becomes binary, and the answer JSON; else both pass as they are."""
    model: ModelName | None = None
    """The one that they name."""
    mirror: Callable[[bytes, HeaderLines], None] | None = None
    """Takes the bodies that were sent, and headers added to them, where requests are mirrored."""
    varies: bool = False
    """Whether answers say that they are compressed for clients that accept it; these do not."""
    versioned: bool = False
    """Whether they name a version of the model."""
    untyped: bool = False
    """Whether they have a body, which passes as it is, and do not say of what type."""
    declared: DeclaredModel | None = None
    """What is declared of that model, if anything is."""
    dialect: Dialect | None = None
    """One that it suits, so that this need not be looked at again."""

    def suits(self, dialect: Dialect | None) -> bool:
        """Tell whether servers of a dialect, or of one not known yet, take what it makes."""
        if dialect is None:
            return not (self.converts or self.versioned or self.untyped)
        if self.converts and (dialect.binary_only_if_listed or not dialect.binary):
            return False
        return not (
            (self.versioned and not dialect.versioned_paths)
            or (self.untyped and dialect.requires_json_type)
        )


class FastPathCall:
    """A request that was sent, until its client has the answer, or a task sees to that.

    It is the Receiver of that answer, and Watched until then.
    """

    def __init__(
        self,
        plan: CallPlan,
        route: Route,
        headers: HeaderLines,
        body: bytes,
        loan: Lease,
        client: FastPathClient,
    ) -> None:
        self._plan = plan
        self._route = route
        self._headers = headers
        self._body = body
        self._loan = loan
        self._watch = plan.watch
        self._client = client
        self._sent: PendingRequest | None = None

    def in_flight(self, sent: PendingRequest) -> None:
        """Note that the server has been asked."""
        self._sent = sent
        self._loan.acquire()
        self._watch.add(self)
        self._route.held.buffers.reserved += COPIES * len(self._body)

    def on_complete(self, head: UpstreamResponseHead, body: bytes | memoryview) -> None:
        """Answer the client."""
        if self._is_unwanted(head.status):
            return
        try:
            headers, data = self._answer(head, bytes(body))
        except Exception as error:
            outcome, why = outcome_of(error)
            # The server has answered well if it is the client's form that its answer does not fit.
            self._end(Outcome.SUCCEEDED if outcome is Outcome.UNKNOWN else outcome, why)
            self._answer_failure(error)
            return
        if head.status < FIRST_ERROR_STATUS:
            self._end(Outcome.SUCCEEDED)
        else:
            self._end(*self._loan.classify_status(head.status))
        if self._plan.varies:
            headers = varying(headers)
        self._client.answer(head.status, head.reason, headers, data)

    def on_headers(self, response: UpstreamResponse) -> None:
        """Have a task pass the answer on as it comes."""
        if self._is_unwanted(response.status):
            return
        spent = self._watch.remove(self)
        over = partial(self._end, *self._loan.classify_status(response.status))
        self._client.continue_in_task(partial(self._relay, response, spent), over)

    def on_error(self, error: Exception) -> None:
        """Have a task ask another endpoint if this one cannot be reached, or tell the client."""
        outcome, why = outcome_of(error)
        if self._again.should_retry_error(error, self._loan.endpoint):
            strip_tracebacks(error)
            self._go_on_elsewhere(outcome, why)
        else:
            self._end(outcome, why)
            self._answer_failure(error)

    def _is_unwanted(self, status: int) -> bool:
        """Tell whether another endpoint is asked, as this one answered so; have a task do it."""
        statuses = self._route.retry.statuses
        if not statuses or not self._again.should_retry_status(status, self._loan.endpoint):
            return False
        self._go_on_elsewhere(*self._loan.classify_retried(status))
        return True

    def _go_on_elsewhere(self, outcome: Outcome, why: str) -> None:
        """Have a task ask another endpoint: it is one exchange, with its places and its time."""
        spent = self._let_go(outcome, why)
        self._client.continue_in_task(partial(self._ask_another, spent), self._leave)

    @property
    def _again(self) -> RetryState:
        return RetryState(self._route.upstream, self._route.retry, [], self._plan.model)

    def late(self) -> None:
        """Tell the client that the server did not answer in time."""
        limits = self._route.limits
        in_idle_time = limits.idle_timeout < limits.request_timeout
        what = (
            nothing_moved(limits.idle_timeout) if in_idle_time else not_done(limits.request_timeout)
        )
        error = server_timeout(self._loan.endpoint.url, what)
        self._end(Outcome.FAILED, str(error))
        self._answer_failure(error)

    def cancel(self) -> None:
        """End, as the client is gone."""
        self._end(Outcome.UNKNOWN)

    def _end(self, outcome: Outcome, why: str = "") -> None:
        if self._sent is not None:
            self._let_go(outcome, why)
            self._leave()

    def _leave(self) -> None:
        """Give back the places and the memory."""
        leave(self._route.concurrency_limits)
        self._route.held.buffers.reserved -= COPIES * len(self._body)

    def _let_go(self, outcome: Outcome, why: str) -> float:
        """Give the server back; give the seconds that it has taken."""
        assert self._sent is not None
        sent, self._sent = self._sent, None
        spent = self._watch.remove(self)
        sent.close()
        self._loan.release(outcome, why)
        return spent

    def _answer(self, head: UpstreamResponseHead, body: bytes) -> tuple[HeaderLines, bytes]:
        """Give headers and body of the client's answer; raises GatewayError."""
        if not self._plan.converts or head.status != 200:
            return _passed(head), body
        cap = self._route.limits.header_bytes
        try:
            header_size, headers = _as_json(head, cap)
            if header_size is not None:
                return headers, whole_as_json(body, header_size, self._route)
            check_header_length(body)
            if len(body) <= cap:
                body = with_empty_data(body, _ALL_JSON, self._route)
        except GatewayError as error:
            raise naming(self._loan.endpoint.url, error) from error
        return headers, body

    def _answer_failure(self, error: Exception) -> None:
        fault = not isinstance(error, GatewayError)
        request_id = self._client.request_id
        if fault:
            # A fault of our own: never a silent one.
            start = self._plan.start
            where = (request_id or "-", start.method, start.target)
            _log.error("request %s: %s %s failed", *where, exc_info=error)
        strip_tracebacks(error)
        told = error if isinstance(error, GatewayError) else INTERNAL_ERROR
        FAILURE_LOG.write(told, request_id)
        headers = error_headers(request_id)
        if self._plan.varies:
            headers = varying(headers)
        body = error_body(told.message)
        self._client.answer(told.kind.value.status, "", headers, body, last=fault)

    async def _relay(
        self, response: UpstreamResponse, spent: float, answer: ClientResponse
    ) -> None:
        url = self._loan.endpoint.url
        answer = self._varying(answer)

        async def run(deadline: Deadline) -> None:
            deadline.expect_server(url)
            try:
                await self._pass_on(response, url, answer, deadline)
            except BaseException as error:
                self._end(*outcome_of(deadline.cause(error)))
                raise

        try:
            await run_with_deadline(run, answer, self._deadline(spent))
        finally:
            response.close()

    async def _ask_another(self, spent: float, answer: ClientResponse) -> None:
        start = self._plan.start
        headers = CIMultiDict([*start.headers, *self._headers])
        has_body = bool(self._body) or "Content-Length" in headers
        body = (self._body,) if has_body else None
        asked = UpstreamRequest(start.method, start.target, headers, body)
        answer = self._varying(answer)
        inside = replace(self._route, concurrency_limits=())  # it has its places already

        async def run(deadline: Deadline) -> None:
            tried = (self._loan.endpoint,)
            model = self._plan.model
            async with UpstreamCall(inside, asked, deadline, tried, model) as attempt:
                await self._pass_on(attempt.response, attempt.url, answer, deadline)

        await run_with_deadline(run, answer, self._deadline(spent))

    async def _pass_on(
        self, response: UpstreamResponse, url: str, answer: ClientResponse, deadline: Deadline
    ) -> None:
        if self._plan.converts:
            await relay_answer(response, answer, _ALL_JSON, self._route, url, deadline)
        else:
            await forward_answer(response, answer, url, deadline)

    def _varying(self, answer: ClientResponse) -> ClientResponse:
        return (
            CompressedAnswer(answer, None, self._route.scheduler) if self._plan.varies else answer
        )

    def _deadline(self, spent: float) -> Deadline:
        return self._route.limits.deadline(spent)


def header_lines(headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> HeaderLines:
    """Give headers as lines."""
    return tuple(headers.items())


@lru_cache(maxsize=CACHED_HEADS)
def _passed(head: UpstreamResponseHead) -> HeaderLines:
    return header_lines(end_to_end(head.headers))


@lru_cache(maxsize=CACHED_HEADS)
def _as_json(head: UpstreamResponseHead, cap: int) -> tuple[int | None, HeaderLines]:
    """Give the size of the JSON part, None if there are no tensors behind it, and the headers."""
    header_size = answer_header_size(head, cap)
    changed = {} if header_size is None else {"Content-Type": "application/json"}
    return header_size, header_lines(with_body(head.headers, changed))
