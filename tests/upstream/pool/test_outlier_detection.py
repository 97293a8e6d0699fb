"""Endpoints whose calls fail, and upstreams to which no call can connect."""

import asyncio
import logging

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.routing.endpoint_health import NOT_EJECTED, EjectionState, OutlierPolicy
from gateway.routing.latency_outliers import Latency, ModelLatency
from gateway.upstream.pool import outlier_detection
from gateway.upstream.pool.member import Member, Outcome
from gateway.upstream.pool.pool import Pool
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint, ScriptedUpstreamResponse
from tests.support.gateway import no_leaks, until
from tests.upstream.pools import (
    ManualClock,
    fail_calls,
    make_pool,
    running,
    scripted_endpoints,
    used_endpoints,
)


def test_ejected_endpoint_gets_one_trial_request(caplog: pytest.LogCaptureFixture) -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "nobody\nthere")
    clock, told = ManualClock(), _Told()
    pool = _telling_pool(3, clock, told)
    fail_calls(pool, 0, error, times=4)
    fail_calls(pool, 1, None)
    assert told.all == []
    fail_calls(pool, 0, error)
    left_out = r"http://0 failed 5 times in a row: ejected for 10 s; last error: nobody\nthere"
    assert left_out in caplog.text
    clock.now = 10
    on_trial = pool.lease(pool.endpoints[1:])
    assert on_trial.acquire() is pool.endpoints[0]
    assert set(used_endpoints(pool)) == set("12")
    on_trial.release(Outcome.UNKNOWN)
    fail_calls(pool, 0, error)
    assert r"http://0 failed again: ejected for 20 s; last error: nobody\nthere" in caplog.text
    clock.now = 29
    assert set(used_endpoints(pool)) == set("12")
    clock.now = 30
    assert set(used_endpoints(pool)) == set("012")
    assert "http://0: ejection ended" in caplog.text
    assert told.all == [("http://0", 1, 10), ("http://0", 2, 30), ("http://0", 0, 0)]


def test_outage_of_all_endpoints_does_not_extend_ejections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each call fails at one endpoint, and then at the ejected one, as there is no other."""
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock, told = ManualClock(), _Told()
    pool = _telling_pool(2, clock, told)
    for _ in range(50):
        fail_calls(pool, 1, error)
        fail_calls(pool, 0, error)
        clock.now += 0.1
    assert [member.ejection.ejections for member in pool.members] == [0, 1]
    (left_out,) = [each for each in told.all if each[0]]
    assert sum("ejected for" in message for message in caplog.messages) == 1
    clock.now = left_out[2]
    assert set(used_endpoints(pool)) == set("01")


class _Told:
    """The notifications of a pool."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int, float]] = []

    def __call__(self, url: str, health: EjectionState) -> None:
        self.all.append((url, health.ejections, health.until))


def _telling_pool(count: int, clock: ManualClock, told: _Told) -> Pool:
    return make_pool(count, OutlierPolicy(base_ejection_time=10), clock, notify=told)


def test_return_to_use_after_a_failure_is_no_recovery() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock, told = ManualClock(), _Told()
    pool = _telling_pool(2, clock, told)
    fail_calls(pool, 0, error, times=5)
    pool.members[1].ejection = EjectionState(5, 1, 99)
    clock.now = 10
    fail_calls(pool, 0, error)
    assert pool.members[0].ejection == EjectionState(6)
    assert told.all == [("http://0", 1, 10)]


def test_remote_ejection_counts_and_is_not_shared_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "tensorgate")
    clock, told = ManualClock(), _Told()
    pool = _telling_pool(3, clock, told)
    rechecked: list[Member] = []
    monkeypatch.setattr(pool.outlier_detector.supervisor, "recheck", rechecked.append)
    ejected, well = EjectionState(ejections=1, until=10), EjectionState(until=3)
    for _ in range(2):
        pool.outlier_detector.record_remote(pool.members[0], ejected)
    assert set(used_endpoints(pool)) == set("12")
    # Not more than half of them, whoever ejects.
    pool.outlier_detector.record_remote(pool.members[1], ejected)
    assert set(used_endpoints(pool)) == set("12")
    for _ in range(2):
        pool.outlier_detector.record_remote(pool.members[0], well)
    assert set(used_endpoints(pool)) == set("012")
    assert told.all == []
    assert rechecked == [pool.members[0]]  # by now it may be another server
    assert caplog.messages == [
        "http://0: ejected, as another worker reports",
        "http://0: ejection ended, as another worker reports",
    ]


def test_single_endpoint_ignores_remote_ejections() -> None:
    pool = make_pool(1)
    pool.outlier_detector.record_remote(pool.members[0], EjectionState(ejections=1, until=1e9))
    assert pool.members[0].ejection == NOT_EJECTED
    assert set(used_endpoints(pool)) == {"0"}


SLOW = {
    "http://0": {"m": ModelLatency([Latency(50, 2.0)])},
    "http://1": {"m": ModelLatency([Latency(50, 0.002)])},
}


def _judged(factor: float, clock: ManualClock, told: _Told, is_first: bool = True) -> Pool:
    policy = OutlierPolicy(base_ejection_time=10, latency_factor=factor)
    pool = make_pool(2, policy, clock, notify=told)
    pool.judge({}, SLOW, is_first)
    return pool


def test_slow_endpoint_is_ejected_only_if_the_policy_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, told = ManualClock(), _Told()
    assert set(used_endpoints(_judged(0.0, clock, told))) == set("01")
    assert set(used_endpoints(_judged(1001.0, clock, told))) == set("01")
    # The first worker ejects, and tells the others.
    assert set(used_endpoints(_judged(3.0, clock, told, is_first=False))) == set("01")
    assert told.all == []
    pool = _judged(3.0, clock, told)
    assert set(used_endpoints(pool)) == set("1")
    assert told.all == [("http://0", 1, 10.0)]
    assert "http://0 is slow: ejected for 10 s; its calls of m take 2 s" in caplog.text
    state = pool.snapshot()[0]
    assert (state.state, state.state_text) == (
        "ejected",
        "ejected for 10 s: its calls of m take 2 s (median of the last 6 s),"
        " and 2 ms at the other endpoints",
    )


def test_slow_endpoint_gets_a_trial_and_is_judged_by_calls_after_it() -> None:
    clock, told = ManualClock(), _Told()
    pool = _judged(3.0, clock, told)
    clock.now = 10
    fail_calls(pool, 0, None)
    pool.judge({}, SLOW, leads=True)
    assert pool.members[0].ejection == NOT_EJECTED
    clock.now = 17
    pool.judge({}, SLOW, leads=True)
    assert pool.members[0].ejection.ejections == 1


@pytest.mark.parametrize("ejects_by_failures", [True, False])
def test_calls_from_before_an_ejection_do_not_end_it(ejects_by_failures: bool) -> None:
    """An endpoint that is slow has calls in progress when it is ejected, and they succeed."""
    clock, told = ManualClock(), _Told()
    endpoints = scripted_endpoints(2)
    failures = 5 if ejects_by_failures else 0
    pool = Pool(endpoints, OutlierPolicy(failures, latency_factor=3), clock, notify=told)
    here = pool.lease(endpoints[1:])
    here.acquire()
    pool.judge({}, SLOW, leads=True)
    here.release(Outcome.SUCCEEDED)
    assert set(used_endpoints(pool)) == set("1")

    # Nor do they in a worker that another one has told of it.
    other = Pool(endpoints, OutlierPolicy(failures, latency_factor=3), clock)
    there = other.lease(endpoints[1:])
    there.acquire()
    other.outlier_detector.record_remote(other.members[0], pool.members[0].ejection)
    there.release(Outcome.SUCCEEDED)
    assert set(used_endpoints(other)) == set("1")

    clock.now = 10
    for each in (pool, other):
        fail_calls(each, 0, None)
        assert set(used_endpoints(each)) == set("01")
    assert [ejections for _, ejections, _ in told.all] == [1, 0]


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
    pool.judge({}, {}, leads=True)
    assert pool.snapshot()[0].state == "unreachable"
    fail_calls(pool, 0, None, times=2)
    assert pool.unreachable is None
    first, second = caplog.messages
    assert first.startswith(LOST)
    assert second == "upstream u is ready again: http://0 responds"


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (GatewayError(ErrorKind.BAD_RESPONSE, "nonsense"), True),
        (None, True),
        (ConnectionError("the client left"), False),
    ],
)
def test_only_a_call_that_connects_ends_the_row(error: Exception | None, ends: bool) -> None:
    pool = make_pool(1, upstream="u")
    for _ in range(5):
        fail_calls(pool, 0, UNREACHABLE, times=2)
        fail_calls(pool, 0, error)
    assert (pool.unreachable is None) is ends


def test_upstream_is_reachable_while_one_endpoint_is() -> None:
    pool = make_pool(2, upstream="u")
    fail_calls(pool, 0, UNREACHABLE, times=10)
    assert pool.unreachable is None  # no call went to the other one
    fail_calls(pool, 1, None)
    fail_calls(pool, 0, UNREACHABLE, times=10)
    assert pool.unreachable is None
    fail_calls(pool, 1, UNREACHABLE)
    assert pool.unreachable is not None


LACK = GatewayError(ErrorKind.EXHAUSTED, "out of local resources")
FOUND: dict[str, tuple[tuple[ScriptedUpstreamResponse | Exception, ...], str]] = {
    "it is back": (
        (ZeroDivisionError(), UNREACHABLE, ScriptedUpstreamResponse(404)),
        "http://0 responds",
    ),
    "the gateway cannot ask": (
        (LACK,),
        "it cannot be asked: out of local resources",
    ),
}


@pytest.mark.parametrize(("answers", "why"), FOUND.values(), ids=FOUND)
async def test_probes_end_the_unreachable_state_also_after_an_internal_error(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answers: tuple[ScriptedUpstreamResponse | Exception, ...],
    why: str,
) -> None:
    monkeypatch.setattr(outlier_detection, "PROBE_INTERVAL", 0.01)
    endpoint = ScriptedEndpoint(EventLog(), *answers, url="http://0")
    async with no_leaks(), running(Pool([endpoint], upstream="u")) as pool:
        fail_calls(pool, 0, UNREACHABLE, times=3)
        await until(lambda: pool.unreachable is None)
        assert pool.snapshot()[0].state == ("in_use" if why.endswith("responds") else "unreachable")
        await until(lambda: not pool.outlier_detector._is_probing)
    assert len(endpoint.requests) == len(answers)
    said = ["an endpoint could not be probed"] * (len(answers) > 1)
    assert caplog.messages[1:-1] == said
    assert caplog.messages[-1] == f"upstream u is ready again: {why}"


async def test_remote_report_counts_once_and_starts_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlier_detection, "PROBE_INTERVAL", 0.01)
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
    monkeypatch.setattr(outlier_detection, "PROBE_INTERVAL", 0.05)
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
