import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace
from unittest import mock

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_capture import CallCapture
from gateway.observe.call_record import CallRecord
from gateway.protocol.operations import ModelName
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.attempts.retry import UpstreamCall, use_reachable_endpoint
from gateway.proxy.destination import Destination, Upstream
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryPolicy
from gateway.upstream.pool.checks import ModelDiscovery, PoolSupervisor
from gateway.upstream.transport import Body, UpstreamEndpoint, UpstreamRequest, UpstreamResponse
from tests.support.certificates import authority, server_context
from tests.support.doubles.streaming import (
    EventLog,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    make_destination,
    ready,
)
from tests.support.gateway import until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.support.servers.tls_refusing_server import refusing_server
from tests.upstream.endpoints import EndpointAt
from tests.upstream.endpoints import endpoint_at as endpoint_at

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


async def test_error_of_a_streaming_client_body_is_raised(endpoint_at: EndpointAt) -> None:
    """TLS 1.3 checks client certificates after the request was started."""
    context = server_context(clients=authority())
    with refusing_server(context) as refusing:
        async with ScriptedServer(always_respond(http_response(b"yes"))) as good:
            upstream = make_destination(*map(endpoint_at, (refusing, good.url))).upstream
            with pytest.raises(GatewayError) as caught:
                await _ask(upstream, body=_slow_body())
            assert caught.value.kind is ErrorKind.UNREACHABLE
            why = "it asks for a client certificate"
            assert caught.value.message == f"cannot connect to {refusing}: {why}"
            assert good.connections == []


async def _slow_body() -> AsyncIterator[bytes]:
    """Yield a body whose first piece arrives late."""
    await asyncio.Event().wait()
    yield b"body"


class Rereadable(AsyncIterable[bytes]):
    """A body that can be iterated repeatedly."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"bo"
        yield b"dy"


async def test_repeatable_body_is_sent_again() -> None:
    upstream, endpoints = _servers(EventLog(), _fault(ErrorKind.NO_RESPONSE), OK)
    assert await _ask(upstream, policy=MORE, body=Rereadable()) == "http://1"
    assert [each.bodies for each in endpoints] == [[b"body"]] * 2
    for endpoint in endpoints:
        assert not isinstance(endpoint.requests[0].body, AsyncIterator)


@pytest.mark.parametrize("once", [False, True])
async def test_deadline_expects_the_server_with_each_chunk_that_it_takes(once: bool) -> None:
    upstream, _ = _servers(EventLog(), OK)
    body = aiter(Rereadable()) if once else Rereadable()
    with mock.patch.object(Deadline, "expect_server", autospec=True) as turn:
        assert await _ask(upstream, body=body) == "http://0"
    assert [call.args[1].url for call in turn.mock_calls] == ["http://0"] * 4  # sent, twice, all


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
    async def use(endpoint: UpstreamEndpoint) -> str:
        if endpoint is endpoints[0]:
            raise _fault(ErrorKind.UNREACHABLE)
        return endpoint.url

    upstream, endpoints = _servers(EventLog(), OK, OK)
    record = CallRecord("GET", "/x")
    with Deadline(5, 5) as deadline:
        url = await use_reachable_endpoint(upstream, use, deadline, record)
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
