"""Attempts of a call, which hold leases, are recorded, repeated and captured."""

import asyncio
import base64
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_capture import CallCapture
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.protocol.operations import ModelName
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.attempts.attempt import Attempt
from gateway.proxy.attempts.retry import RetryState, UpstreamCall, send_captured
from gateway.proxy.destination import Destination, Upstream
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryPolicy
from gateway.upstream.pool.checks import ModelDiscovery, PoolSupervisor
from gateway.upstream.pool.member import Outcome
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import Body, UpstreamEndpoint, UpstreamRequest, UpstreamResponse
from tests.support.compiled import needs_source
from tests.support.doubles.streaming import (
    URL,
    EventLog,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    make_destination,
    ready,
)
from tests.support.gateway import until
from tests.upstream.endpoints import endpoint_at as endpoint_at

UNREACHABLE = GatewayError(ErrorKind.UNREACHABLE, "refused")
TIMED_OUT = GatewayError(ErrorKind.SERVER_TIMEOUT, "late")


def _attempt() -> tuple[Attempt, Pool]:
    endpoint = ScriptedEndpoint(EventLog(), ScriptedUpstreamResponse(), url="http://1")
    pool = make_destination(endpoint).upstream.pool
    record = CallRecord("POST", "/x")
    record.trace = CallTrace(lambda _: None)
    return Attempt("servers", pool.lease(), record), pool


def test_lease_is_given_back_once() -> None:
    attempt, pool = _attempt()
    attempt.end(Outcome.SUCCEEDED)  # of a call that never got its lease
    assert pool.outstanding == [0]
    attempt.hold()
    assert pool.outstanding == [1]
    for _ in range(2):
        attempt.end(Outcome.SUCCEEDED)
        assert pool.outstanding == [0]


@needs_source  # a double of a compiled class
def test_lease_is_given_back_if_the_record_cannot_be_filled() -> None:
    class _BrokenTrace(CallTrace):
        def fail_attempt(self, error: BaseException | None) -> None:
            raise ZeroDivisionError

    attempt, pool = _attempt()
    attempt.record.trace = _BrokenTrace(lambda _: None)
    attempt.hold()
    with pytest.raises(ZeroDivisionError):
        attempt.end_with(TIMED_OUT)
    assert pool.outstanding == [0]


def test_attempt_that_responds_is_measured_and_has_a_span() -> None:
    attempt, _ = _attempt()
    record, trace = attempt.record, attempt.record.trace
    attempt.hold()
    parent = attempt.begin("POST", "/x", is_grpc=False)
    attempt.record_head(503, 0.0)
    assert trace is not None
    (span,) = trace.attempts
    assert parent.endswith(f"-{span.span_id}-01")
    assert (span.endpoint, span.status) == ("http://1", 503)
    assert record.first_byte_seconds == record.server_seconds > 0
    attempt.repeat(Outcome.FAILED, "it returned 503")
    attempt.end(Outcome.FAILED, "it returned 503")
    assert (record.attempts, record.retries, record.received_bytes) == (1, 1, 0)
    assert (span.error_type, span.error) == ("status", "it returned 503")


@pytest.mark.parametrize(
    ("error", "outcome", "is_sent"),
    [
        (UNREACHABLE, Outcome.UNREACHABLE, False),
        (TIMED_OUT, Outcome.TIMED_OUT, True),
        (ZeroDivisionError(), Outcome.UNKNOWN, True),
        (None, Outcome.SUCCEEDED, True),
    ],
)
def test_nothing_counts_as_sent_without_a_connection(
    error: BaseException | None, outcome: Outcome, is_sent: bool
) -> None:
    attempt, _ = _attempt()
    attempt.hold()
    attempt.begin("POST", "/x", is_grpc=False)
    assert attempt.fail(error)[0] is outcome
    attempt.end(outcome)
    record = attempt.record
    assert bool(record.sent_at) is bool(record.server_seconds) is is_sent


def test_part_of_a_call_is_an_attempt_while_its_context_is_open() -> None:
    attempt, pool = _attempt()

    def run() -> None:
        with attempt:
            assert pool.outstanding == [1]
            attempt.begin("POST", "/x", is_grpc=False)
            raise UNREACHABLE

    with pytest.raises(GatewayError):
        run()
    assert pool.outstanding == [0]
    assert not attempt.record.sent_at


OK = ScriptedUpstreamResponse(200, {}, [b"yes"])
RECORD = CallRecord("POST", "/x")
REQUEST = UpstreamRequest("POST", "/x", CIMultiDict(), (b"body",))
ServerStep = ScriptedUpstreamResponse | BaseException | asyncio.Event


def _fault(kind: ErrorKind, message: str = "") -> GatewayError:
    return GatewayError(kind, message)


def _servers(log: EventLog, *steps: ServerStep) -> tuple[Upstream, list[ScriptedEndpoint]]:
    """Return an upstream whose endpoints have one scripted step each."""
    endpoints = [ScriptedEndpoint(log, turn, url=f"http://{i}") for i, turn in enumerate(steps)]
    return make_destination(*endpoints).upstream, endpoints


def _to(upstream: Upstream, policy: RetryPolicy = SAFE_RETRIES_ONLY) -> Destination:
    return replace(make_destination(), upstream=upstream, retry_policy=policy)


async def _ask(
    upstream: Upstream,
    but: tuple[UpstreamEndpoint, ...] = (),
    policy: RetryPolicy = SAFE_RETRIES_ONLY,
    body: Body = REQUEST.body,
) -> str:
    """Return the URL of the endpoint that responded."""
    request = replace(REQUEST, body=body)
    with Deadline(5, 5) as deadline:
        async with UpstreamCall(_to(upstream, policy), request, deadline, RECORD, but) as attempt:
            assert sum(upstream.pool.outstanding) == 1
            assert await attempt.response.read() == b"yes"
            return attempt.server.url


@pytest.mark.parametrize(
    "error", [_fault(ErrorKind.BAD_RESPONSE), _fault(ErrorKind.NO_RESPONSE), ZeroDivisionError()]
)
async def test_call_that_may_have_had_an_effect_is_not_retried(error: Exception) -> None:
    upstream, endpoints = _servers(EventLog(), error, OK)
    with pytest.raises(type(error)):
        await _ask(upstream)
    assert [len(each.requests) for each in endpoints] == [1, 0]
    assert upstream.pool.outstanding == [0, 0]


MORE = RetryPolicy(no_response=True, statuses=frozenset((503,)))


@pytest.mark.parametrize(
    "turn",
    [
        _fault(ErrorKind.NO_RESPONSE),
        ScriptedUpstreamResponse(503, {}, [b"no"]),
        ScriptedUpstreamResponse(503, {}, [_fault(ErrorKind.BAD_RESPONSE)]),
    ],
    ids=["unanswered", "unavailable", "broken off"],
)
async def test_retry_policy_allows_more_retries(turn: ServerStep) -> None:
    upstream, endpoints = _servers(EventLog(), turn, OK)
    assert await _ask(upstream, policy=MORE) == "http://1"
    assert [each.bodies for each in endpoints] == [[b"body"]] * 2
    assert [member.ejection.failures for member in upstream.pool.members] == [1, 0]
    assert upstream.pool.outstanding == [0] * 2


class _UncapturableEndpoint(ScriptedEndpoint):
    """It responds with what cannot be captured."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        response = await super().send(request)
        response.headers = None  # type: ignore[assignment]
        return response


async def test_response_whose_capture_fails_is_closed() -> None:
    log, record = EventLog(), CallRecord("POST", "/x")
    record.capture = CallCapture()
    upstream = make_destination(_UncapturableEndpoint(log, OK)).upstream
    with Deadline(5, 5) as deadline, pytest.raises((AttributeError, TypeError)):
        await UpstreamCall(_to(upstream), REQUEST, deadline, record).__aenter__()
    assert log[-1] == "server is let go"
    assert upstream.pool.outstanding == [0]


async def test_error_response_passes_if_there_is_no_other_endpoint() -> None:
    upstream, endpoints = _servers(EventLog(), ScriptedUpstreamResponse(503, {}, [b"yes"]))
    assert await _ask(upstream, policy=MORE) == "http://0"
    endpoints[0]._turns.append(ScriptedUpstreamResponse(500, {}, [b"yes"]))
    assert await _ask(upstream, policy=MORE) == "http://0"


async def test_streamed_body_is_not_retried() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"body"

    for kind in (ErrorKind.UNREACHABLE, ErrorKind.NO_RESPONSE):
        upstream, endpoints = _servers(EventLog(), _fault(kind), OK)
        with pytest.raises(GatewayError):
            await _ask(upstream, policy=MORE, body=body())
        assert endpoints[1].requests == []
    upstream, endpoints = _servers(EventLog(), ScriptedUpstreamResponse(503, {}, [b"yes"]), OK)
    assert await _ask(upstream, policy=MORE, body=body()) == "http://0"
    assert endpoints[1].requests == []


class Rereadable(AsyncIterable[bytes]):
    """A body that can be iterated repeatedly."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"bo"
        yield b"dy"


async def test_repeatable_body_is_sent_again() -> None:
    upstream, endpoints = _servers(EventLog(), _fault(ErrorKind.NO_RESPONSE), OK)
    assert await _ask(upstream, policy=MORE, body=Rereadable()) == "http://1"
    assert [each.bodies for each in endpoints] == [[b"body"]] * 2


@pytest.mark.parametrize("once", [False, True])
async def test_deadline_expects_the_server_with_each_chunk_that_it_takes(once: bool) -> None:
    expected: list[ErrorKind] = []

    class Watching(AsyncIterable[bytes]):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in (b"bo", b"dy", b""):
                expected.append(deadline.timeout_error("").kind)
                deadline.expect_client()
                if piece:
                    yield piece

    upstream, _ = _servers(EventLog(), OK)
    request = replace(REQUEST, body=aiter(Watching()) if once else Watching())
    with Deadline(5, 5) as deadline:
        async with UpstreamCall(_to(upstream), request, deadline, RECORD):
            expected.append(deadline.timeout_error("").kind)
    assert expected == [ErrorKind.SERVER_TIMEOUT] * 4  # sent, twice, all


async def test_retry_budget_caps_the_retries() -> None:
    upstream, endpoints = _servers(EventLog(), *[_fault(ErrorKind.REFUSED)] * 5)
    for _ in range(18):
        assert upstream.retry_budget.try_spend(0, 0)
    with pytest.raises(GatewayError):
        await _ask(upstream)
    assert sum(len(each.requests) for each in endpoints) == 3
    assert not upstream.retry_budget.try_spend(upstream.pool.leases_total, 0)


async def test_failed_connects_need_no_retry_budget() -> None:
    upstream, endpoints = _servers(EventLog(), *[_fault(ErrorKind.UNREACHABLE)] * 5)
    while upstream.retry_budget.try_spend(0, 0):
        pass
    with pytest.raises(GatewayError):
        await _ask(upstream)
    assert sum(len(each.requests) for each in endpoints) == 5


@pytest.mark.parametrize(("status", "ejections"), [(500, 0), (503, 1)])
async def test_response_status_is_recorded_for_its_endpoint(status: int, ejections: int) -> None:
    upstream, endpoints = _servers(EventLog(), *[ScriptedUpstreamResponse(status)] * 2)
    endpoints[0]._turns *= 5
    for _ in range(5):
        with Deadline(5, 5) as deadline:
            async with UpstreamCall(
                _to(upstream), REQUEST, deadline, RECORD, (endpoints[1],)
            ) as attempt:
                assert attempt.response.status == status
    assert upstream.pool.members[0].ejection.ejections == ejections


async def test_call_goes_to_an_endpoint_that_has_the_model() -> None:
    """The other server would respond that there is no such model."""
    error = _fault(ErrorKind.UNREACHABLE, "nobody there")
    endpoints = [ScriptedEndpoint(EventLog(), turn, url="http://x") for turn in (error, error, OK)]
    upstream = make_destination(
        *endpoints, supervisor=PoolSupervisor(model_discovery=ModelDiscovery(60))
    ).upstream
    for member, models in zip(upstream.pool.members, ("m", "m", "n"), strict=True):
        member.models = ready(*models)
    with pytest.raises(GatewayError, match="nobody there"), Deadline(5, 5) as deadline:
        async with UpstreamCall(_to(upstream), REQUEST, deadline, RECORD, model=ModelName("m")):
            pass
    assert [len(each.requests) for each in endpoints] == [1, 1, 0]


@pytest.mark.parametrize("begun", [False, True], ids=["before its answer", "within its answer"])
async def test_endpoint_that_times_out_is_recorded_as_failed(begun: bool) -> None:
    upstream, endpoints = _servers(EventLog(), OK if begun else asyncio.Event(), OK)

    async def ask() -> None:
        with Deadline(0.01, 5) as deadline:
            async with UpstreamCall(_to(upstream), REQUEST, deadline, RECORD, (endpoints[1],)):
                await asyncio.Event().wait()

    for _ in range(5):
        assert upstream.pool.members[0].ejection.ejections == 0
        endpoints[0]._turns = [OK if begun else asyncio.Event()]
        with pytest.raises(GatewayError, match="waiting for http://0: nothing moved"):
            await ask()
    assert upstream.pool.members[0].ejection.ejections == 1
    assert upstream.pool.outstanding == [0, 0]


async def test_endpoint_whose_clients_disconnect_has_not_failed() -> None:
    upstream, endpoints = _servers(EventLog(), asyncio.Event(), OK)
    for _ in range(6):
        endpoints[0]._turns = [asyncio.Event()]
        task = asyncio.create_task(_ask(upstream, (endpoints[1],)))
        await until(lambda: sum(upstream.pool.outstanding))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert upstream.pool.members[0].ejection.failures == 0


async def test_any_function_can_use_a_reachable_endpoint() -> None:
    async def use(attempt: Attempt) -> str:
        if attempt.endpoint is endpoints[0]:
            raise _fault(ErrorKind.UNREACHABLE)
        return attempt.endpoint.url

    upstream, endpoints = _servers(EventLog(), OK, OK)
    record = CallRecord("GET", "/x")
    with Deadline(5, 5) as deadline:
        state = RetryState(upstream, SAFE_RETRIES_ONLY, [])
        attempt, url = await state.reach(use, deadline, record)
        attempt.end(Outcome.SUCCEEDED)
    assert url == record.endpoint == "http://1"
    assert record.attempts == 0, "the request itself was not sent"
    assert upstream.pool.outstanding == [0, 0]


class _FailingResponse(ScriptedUpstreamResponse):
    """A response of which, after so many looks, it cannot be told how it went."""

    def __init__(self, looks: int) -> None:
        super().__init__(200, {}, [b"yes"])
        self._looks = looks

    def with_log(self, log: EventLog) -> ScriptedUpstreamResponse:
        self._log = log
        return self

    @property
    def grpc_status(self) -> int | None:
        self._looks -= 1
        if self._looks < 0:
            raise ZeroDivisionError
        return None


@pytest.mark.parametrize("looks", [0, 1])
async def test_response_that_cannot_be_judged_is_given_back(looks: int) -> None:
    log = EventLog()
    upstream, _ = _servers(log, _FailingResponse(looks))
    limit = ConcurrencyLimit("all", 1, 0, 1)
    destination = replace(_to(upstream), concurrency_limits=(limit,))
    with pytest.raises(ZeroDivisionError), Deadline(5, 5) as deadline:
        async with UpstreamCall(destination, REQUEST, deadline, RECORD):
            pass
    assert log[-1] == "server is let go"
    assert upstream.pool.outstanding == [0]
    assert limit.active == 0


YES_NO = ScriptedUpstreamResponse(200, {"X-A": "1"}, [b"yes", b"no"])
PIECES = (b"some", memoryview(b"body"))


def _request(body: Body, is_grpc: bool = False) -> UpstreamRequest:
    return UpstreamRequest("POST", "/x", CIMultiDict(A="b"), body, is_grpc=is_grpc)


async def _send(
    endpoint: UpstreamEndpoint, body: Body = None, is_grpc: bool = False
) -> tuple[UpstreamResponse, CallCapture]:
    capture = CallCapture()
    return await send_captured(endpoint, _request(body, is_grpc), capture, "u"), capture


def _described(capture: CallCapture) -> dict[str, Any]:
    (attempt,) = capture.describe()
    return attempt


def _body(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message["body"])


@pytest.mark.parametrize(
    ("body", "sent"),
    [(None, b""), ((), b""), (PIECES, b"somebody"), (Rereadable(), b"body")],
    ids=["none", "empty", "buffered", "streamed"],
)
async def test_request_and_response_are_captured(body: Body, sent: bytes) -> None:
    endpoint = ScriptedEndpoint(EventLog(), YES_NO)
    response, capture = await _send(endpoint, body)
    assert await response.read() == b"yes"
    assert _body(_described(capture)["response"]) == b"yes"  # as far as it was read
    assert [await response.read(), await response.read()] == [b"no", b""]
    response.close()
    assert endpoint.bodies == [sent]
    attempt = _described(capture)
    assert (attempt["upstream"], attempt["endpoint"], attempt["error"]) == ("u", URL, None)
    assert attempt["request"]["start"] == "POST /x HTTP/1.1"
    assert attempt["request"]["headers"] == [("A", "b")]
    assert (attempt["request"]["size"], _body(attempt["request"])) == (len(sent), sent)
    assert attempt["response"]["start"] == "HTTP/1.1 200 Scripted"
    assert attempt["response"]["headers"] == [("X-A", "1")]
    assert (attempt["response"]["size"], _body(attempt["response"])) == (5, b"yesno")


class _Twice(ScriptedEndpoint):
    """It reads the body again, as over a new connection instead of one that was stale."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        assert isinstance(request.body, AsyncIterable)
        async for _ in request.body:
            break
        return await super().send(request)


async def test_body_that_is_read_again_is_captured_once() -> None:
    endpoint = _Twice(EventLog(), YES_NO)
    _, capture = await _send(endpoint, Rereadable())
    assert endpoint.bodies == [b"body"]
    assert _body(_described(capture)["request"]) == b"body"


@pytest.mark.parametrize("once", [False, True])
async def test_body_that_is_an_iterator_stays_one(once: bool) -> None:
    """Else it would be taken for one that can be sent again."""
    endpoint = ScriptedEndpoint(EventLog(), YES_NO)
    await _send(endpoint, aiter(Rereadable()) if once else Rereadable())
    assert isinstance(endpoint.requests[0].body, AsyncIterator) is once


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatewayError(ErrorKind.UNREACHABLE, "cannot connect"), "cannot connect"),
        (asyncio.CancelledError(), "cancelled: a timeout, or the client has closed"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
    ids=["error", "cancelled", "unexpected"],
)
async def test_error_is_captured_and_passed_on(error: BaseException, words: str) -> None:
    capture = CallCapture()
    with pytest.raises(type(error)):
        await send_captured(ScriptedEndpoint(EventLog(), error), _request(PIECES), capture, "u")
    attempt = _described(capture)
    assert attempt["response"] is None
    assert attempt["error"].startswith(words)
    assert _body(attempt["request"]) == b"somebody"

    cut = ScriptedUpstreamResponse(200, {}, [b"be", error])
    response, capture = await _send(ScriptedEndpoint(EventLog(), cut))
    assert await response.read() == b"be"
    with pytest.raises(type(error)):
        await response.read()
    attempt = _described(capture)
    assert attempt["error"].startswith(words)
    assert _body(attempt["response"]) == b"be"


class _GrpcResponse(ScriptedUpstreamResponse):
    received_bytes, head_delay = 7, 0.5
    trailers = (("grpc-status", "5"), ("grpc-message", "no%20such"))

    def with_log(self, log: EventLog) -> ScriptedUpstreamResponse:
        return self


async def test_response_is_passed_through_with_its_trailers() -> None:
    endpoint = ScriptedEndpoint(EventLog(), _GrpcResponse(200, {"Content-Length": "3"}, [b"abc"]))
    response, capture = await _send(endpoint, PIECES, is_grpc=True)
    assert (response.status, response.reason, response.content_length) == (200, "Scripted", 3)
    assert (response.received_bytes, response.head_delay) == (7, 0.5)
    assert (response.grpc_status, response.final_status) == (5, 404)
    assert _described(capture)["response"]["trailers"] == []
    while await response.read():
        pass
    attempt = _described(capture)
    assert attempt["request"]["start"] == "POST /x HTTP/2"
    assert attempt["response"]["start"] == "HTTP/2 200 Scripted"
    assert attempt["response"]["trailers"] == list(response.trailers)
