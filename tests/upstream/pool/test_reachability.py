"""Upstreams to which no call can connect."""

import asyncio

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.pool import outlier_detection
from gateway.upstream.pool.pool import Pool
from tests.support.addresses import free_port
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint, ScriptedUpstreamResponse
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.upstream.endpoints import EndpointAt
from tests.upstream.pools import ManualClock, fail_calls, make_pool, running

UNREACHABLE = GatewayError(ErrorKind.UNREACHABLE, "cannot connect: Connection refused")
LOST = "upstream u is not ready: 3 calls in a row could not connect; last error: cannot connect"


def test_upstream_is_unreachable_after_three_connect_failures_in_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool(1, upstream="u")
    fail_calls(pool, 0, UNREACHABLE, times=2)
    assert pool.unreachable is None
    fail_calls(pool, 0, UNREACHABLE, times=10)
    assert pool.unreachable == str(UNREACHABLE)
    fail_calls(pool, 0, None, times=2)
    assert pool.unreachable is None
    first, second = caplog.messages
    assert first.startswith(LOST)
    assert second == "upstream u is ready again: http://0 responds"


@pytest.mark.parametrize(
    "error",
    [
        GatewayError(ErrorKind.BAD_RESPONSE, "nonsense"),
        GatewayError(ErrorKind.SERVER_TIMEOUT, "no answer"),
        None,
    ],
)
def test_call_that_connects_ends_the_row(error: Exception | None) -> None:
    pool = make_pool(1, upstream="u")
    for _ in range(5):
        fail_calls(pool, 0, UNREACHABLE, times=2)
        fail_calls(pool, 0, error)
    assert pool.unreachable is None


def test_client_that_leaves_does_not_count_as_connected() -> None:
    pool = make_pool(1, upstream="u")
    for _ in range(3):
        fail_calls(pool, 0, UNREACHABLE)
        fail_calls(pool, 0, ConnectionError("the client left"))
    assert pool.unreachable is not None


def test_upstream_is_reachable_while_one_endpoint_is() -> None:
    pool = make_pool(2, upstream="u")
    fail_calls(pool, 0, UNREACHABLE, times=10)
    assert pool.unreachable is None  # no call went to the other one
    fail_calls(pool, 1, None)
    fail_calls(pool, 0, UNREACHABLE, times=10)
    assert pool.unreachable is None
    fail_calls(pool, 1, UNREACHABLE)
    assert pool.unreachable is not None


async def test_probes_find_that_an_upstream_is_back(
    endpoint_at: EndpointAt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.01)
    port = free_port()
    async with (
        no_leaks(),
        running(Pool([endpoint_at(f"http://127.0.0.1:{port}")], upstream="u")) as pool,
    ):
        fail_calls(pool, 0, UNREACHABLE, times=3)
        await asyncio.sleep(0.05)
        assert pool.unreachable is not None
        script = always_respond(http_response(b"", status="404 Not Found"))
        async with ScriptedServer(script, host="127.0.0.1", port=port) as server:
            await until(lambda: pool.unreachable is None)
            assert [each.state for each in pool.snapshot()] == ["in_use"]
            tried = len(server.requests)
            await asyncio.sleep(0.05)
            assert len(server.requests) == tried  # the probes have ended
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "upstream u is not ready",
        "upstream u is ready again",
    ]


async def test_upstream_is_not_unreachable_because_the_gateway_cannot_probe_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.01)
    lack = GatewayError(ErrorKind.EXHAUSTED, "the gateway is out of local resources")
    async with (
        no_leaks(),
        running(Pool([ScriptedEndpoint(EventLog(), lack, url="http://0")], upstream="u")) as pool,
    ):
        fail_calls(pool, 0, UNREACHABLE, times=3)
        await until(lambda: pool.unreachable is None)
    assert caplog.messages[1] == (
        "upstream u is ready again: it cannot be asked: the gateway is out of local resources"
    )


async def test_internal_error_does_not_end_the_probes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.01)
    answers = (ZeroDivisionError(), UNREACHABLE, ScriptedUpstreamResponse(200))
    endpoint = ScriptedEndpoint(EventLog(), *answers, url="http://0")
    async with no_leaks(), running(Pool([endpoint], upstream="u")) as pool:
        fail_calls(pool, 0, UNREACHABLE, times=3)
        await until(lambda: pool.unreachable is None)
    assert len(endpoint.requests) == 3
    assert caplog.messages[1] == "an endpoint could not be probed"


async def test_remote_report_counts_once_and_starts_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.01)
    clock = ManualClock()
    endpoint = ScriptedEndpoint(
        EventLog(), UNREACHABLE, ScriptedUpstreamResponse(200), url="http://0"
    )
    async with no_leaks(), running(Pool([endpoint], clock=clock, upstream="u")) as pool:
        clock.now = 10
        pool.outlier_detector.record_remote_unreachable(9)
        assert pool.unreachable is None  # the report has expired
        for _ in range(2):
            pool.outlier_detector.record_remote_unreachable(11)
        assert pool.unreachable == "another worker cannot connect to upstream u"
        await until(lambda: pool.unreachable is None)
        pool.outlier_detector.record_remote_unreachable(11)
        assert pool.unreachable is None
    assert len(endpoint.requests) == 2


async def test_probes_run_only_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.05)
    endpoint = ScriptedEndpoint(EventLog(), ScriptedUpstreamResponse(200), url="http://0")
    async with no_leaks(), running(Pool([endpoint], upstream="u")) as pool:
        for _ in range(5):
            fail_calls(pool, 0, UNREACHABLE, times=3)
            await asyncio.sleep(0)
            fail_calls(pool, 0, None)
        fail_calls(pool, 0, UNREACHABLE, times=3)
        await until(lambda: pool.unreachable is None)
    assert len(endpoint.requests) == 1


async def test_closed_pool_does_not_probe() -> None:
    async with no_leaks(), running(make_pool(1, upstream="u")) as pool:
        await pool.close()
        fail_calls(pool, 0, UNREACHABLE, times=3)
        assert pool.unreachable is not None
