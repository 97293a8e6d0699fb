"""Leases of endpoints, and what the pool knows of them."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import ModelName
from gateway.routing.endpoint_health import (
    NOT_EJECTED,
    HealthCheckPolicy,
    OutlierPolicy,
    ProbeState,
)
from gateway.routing.endpoint_state import RecentCalls
from gateway.routing.latency_outliers import Latency, ModelLatency
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.checks import HealthChecker, ModelDiscovery, PoolSupervisor
from gateway.upstream.pool.member import ANY_MODEL, MemberState, Outcome
from gateway.upstream.pool.pool import Lease, Pool
from gateway.upstream.shared_memory import SharedMemoryLane, SharedMemoryLanes, SharedMemoryPolicy
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint, ready
from tests.support.gateway import no_leaks, until
from tests.support.servers.scripted_server import ScriptedServer
from tests.support.servers.shared_memory_server import SharedMemoryModel
from tests.upstream.endpoints import EndpointAt
from tests.upstream.pools import (
    ManualClock,
    fail_calls,
    make_pool,
    scripted_endpoints,
    used,
    used_endpoints,
)


def test_least_busy_endpoint_is_chosen() -> None:
    pool = make_pool(2)
    with used(pool.lease()) as busy, used(pool.lease()) as other:
        assert other is not busy
        with used(pool.lease()):
            assert sorted(pool.outstanding) == [1, 2]
    with used(pool.lease()) as busy:
        for _ in range(4):
            with used(pool.lease()) as endpoint:
                assert endpoint is not busy


def test_lease_is_released_though_a_listener_fails(caplog: pytest.LogCaptureFixture) -> None:
    def fail(endpoint: str, event: object) -> None:
        raise ZeroDivisionError("a listener fails")

    endpoints = scripted_endpoints(2)
    policy = OutlierPolicy(consecutive_failures=1)
    for pool in (Pool(endpoints, policy, notify=fail), Pool(endpoints, policy, on_failure=fail)):
        lease = pool.lease()
        lease.acquire()
        lease.release(Outcome.UNREACHABLE, "refused")
        assert pool.outstanding == [0, 0]
        assert "a listener fails" in caplog.text
        caplog.clear()


def test_new_pool_adopts_state_by_url() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    before, after = make_pool(3), make_pool(4)
    fail_calls(before, 1, error, times=5)
    fail_calls(before, 2, error, times=3)
    before.members[0].recovered_at, before.members[0].slow_until = 5.0, 7.0
    after.adopt_state(before)
    assert (after.members[0].recovered_at, after.members[0].slow_until) == (5.0, 7.0)
    assert [member.ejection for member in after.members[:3]] == [
        member.ejection for member in before.members
    ]
    fail_calls(after, 2, error, times=2)
    assert set(used_endpoints(after)) == set("03")
    assert before.members[2].ejection.failures == 3


def test_trial_in_flight_reports_only_to_its_own_pool() -> None:
    clock = ManualClock()
    endpoints = scripted_endpoints(3)
    before, after = Pool(endpoints, clock=clock), Pool(endpoints, clock=clock)
    fail_calls(before, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    clock.now = 1000
    on_trial = before.lease(endpoints[1:])
    on_trial.acquire()
    after.adopt_state(before)
    assert set(used_endpoints(after)) == set("012")  # with a trial request of its own
    on_trial.release(Outcome.UNKNOWN)


def test_retry_prefers_another_endpoint_even_if_it_is_ejected() -> None:
    pool = make_pool(2)
    fail_calls(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    one, two = pool.endpoints
    assert pool.lease([two]).endpoint is one
    assert pool.lease([one]).endpoint is two
    assert pool.lease([one, two]).endpoint in (one, two)


# ---------------------------------------------------------------------- health checks, models

HEALTH_CHECKER = HealthChecker("/", 1, 1, HealthCheckPolicy())


def _probed(states: str) -> Pool:
    """Make a pool of healthy (+), unhealthy (-) and unchecked (?) endpoints."""
    pool = make_pool(len(states), supervisor=PoolSupervisor(HEALTH_CHECKER))
    for member, state in zip(pool.members, states, strict=True):
        if state != "?":
            member.probed = ProbeState(state == "+")
    pool._find_up()
    return pool


@pytest.mark.parametrize(
    ("states", "used", "usable"),
    [
        ("+++", "012", True),
        ("+-?", "02", True),
        ("-?-", "1", False),
        ("---", "012", False),
        ("???", "012", False),
        ("-", "0", False),
    ],
)
def test_health_checks_decide_which_endpoints_are_used(
    states: str, used: str, usable: bool
) -> None:
    pool = _probed(states)
    assert set(used_endpoints(pool)) == set(used)
    assert pool.any_healthy is usable
    assert len(pool.endpoints) == len(states)


@pytest.mark.parametrize(
    ("states", "told"), [("?-?", "---"), ("???", "-+"), ("?", "+"), ("+??", ""), ("--", "")]
)
async def test_first_health_checks_are_waited_for(states: str, told: str) -> None:
    pool = _probed(states)
    waiting = asyncio.create_task(pool.wait_until_probed())
    await asyncio.sleep(0)
    for member, state in zip(pool.members, told, strict=False):
        assert not waiting.done()
        member.probed = ProbeState(state == "+")
        pool._find_up()
        await asyncio.sleep(0)
    await waiting
    assert pool.any_healthy is ("+" in states + told)


def test_new_pool_keeps_its_own_first_checks() -> None:
    before, after = make_pool(2), _probed("+-")
    after.adopt_state(before)
    assert [member.probed.healthy for member in after.members] == [True, False]


def test_ejected_endpoint_is_preferred_to_an_unhealthy_one() -> None:
    pool = _probed("+-+-")
    for number in (0, 2):
        fail_calls(pool, number, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    assert [member.ejection.ejections for member in pool.members] == [1, 0, 1, 0]
    assert pool.lease().endpoint.url[-1] in "02"
    # After all healthy endpoints, even the ejected ones, the unhealthy ones are tried.
    tried = [pool.endpoints[0]]
    assert pool.lease(tried).endpoint is pool.endpoints[2]
    tried.append(pool.endpoints[2])
    assert pool.has_alternative(tried)
    assert pool.lease(tried).endpoint.url[-1] in "13"
    assert not pool.has_alternative(pool.endpoints)


def test_pool_says_that_all_its_endpoints_are_drained() -> None:
    pool = _probed("+-")
    pool.set_drained([pool.endpoints[1].url])
    assert not pool.is_drained
    assert not pool.has_alternative([pool.endpoints[0]])  # it is never tried
    pool.set_drained([endpoint.url for endpoint in pool.endpoints])
    assert pool.is_drained
    with pytest.raises(GatewayError, match="an operator has drained all endpoints"):
        pool.lease()


@pytest.mark.parametrize(
    ("models", "has_other"),
    [(["m", "m"], True), (["m", "?"], True), (["m", "*"], True), (["m", "n"], False)],
)
def test_last_endpoint_to_be_tried_may_have_the_model(models: list[str], has_other: bool) -> None:
    pool = _with_models(*models)
    pool.members[1].probed = ProbeState(healthy=False)
    model = ModelName("m")
    assert pool.lease(model=model).endpoint is pool.endpoints[0]
    assert pool.has_alternative([pool.endpoints[0]], model) is has_other


def _with_models(*models: Sequence[str]) -> Pool:
    """Make a pool of endpoints with these models each; * is any model, ? is unknown."""
    pool = make_pool(len(models), supervisor=PoolSupervisor(model_discovery=ModelDiscovery(1)))
    for member, names in zip(pool.members, models, strict=True):
        if names != "?":
            member.models = ANY_MODEL if names == "*" else ready(*names)
    return pool


@pytest.mark.parametrize(
    ("models", "wanted", "used"),
    [
        (("ab", "b", ""), "b", "01"),
        (("ab", "b", ""), "c", "012"),
        (("a", "?", "b"), "c", "1"),
        (("a", "*", "b"), "c", "1"),
        ((["m/1"], ["m/2"], ["n/2"]), "m/2", "1"),
        ((["m/1"], ["m/2"], ["n/2"]), "m", "01"),
        # Without a list of versions, any version may be there.
        ((["m/1"], ["m"], "*"), "m/2", "12"),
        # For an unknown version, endpoints with the model come before those with unknown models.
        ((["m/1"], ["n/2"], []), "m/2", "0"),
        ((["m/1"], "?", []), "m/2", "1"),
    ],
)
async def test_models_and_versions_decide_which_endpoints_are_used(
    models: tuple[Sequence[str], ...], wanted: str | None, used: str
) -> None:
    assert set(used_endpoints(_with_models(*models), wanted)) == set(used)


async def test_endpoint_with_the_model_is_used_even_if_it_is_ejected_or_unhealthy() -> None:
    """Another endpoint would respond that there is no such model."""
    pool = _with_models("a", "a", "b")
    fail_calls(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    assert set(used_endpoints(pool, "a")) == {"1"}
    pool.members[1].probed = ProbeState(healthy=False)
    pool._find_up()
    assert pool.lease(model=ModelName("a")).endpoint is pool.endpoints[0]
    assert pool.lease().endpoint is pool.endpoints[2]
    pool.members[0].probed = ProbeState(healthy=False)
    pool._find_up()
    assert pool.lease(model=ModelName("a")).endpoint is pool.endpoints[1]


def test_model_is_ignored_without_discovery() -> None:
    pool = make_pool(2)
    pool.members[0].models = ready("a")
    assert set(used_endpoints(pool, "a")) == set("01")
    pool.refresh_models()


# ---------------------------------------------------------------------- changes of members


async def test_endpoints_come_and_go() -> None:
    pool = make_pool(2)
    zero, one = pool.endpoints
    kept = pool.members[1]
    two = ScriptedEndpoint(EventLog(), url="http://2")
    async with no_leaks():
        pool.set_endpoints([one, two])
        assert pool.endpoints == (one, two)
        assert pool.members[0] is kept
        assert set(used_endpoints(pool)) == set("12")
        pool.set_endpoints([two])
        assert pool.has_single_endpoint
        assert used_endpoints(pool) == "2" * 8
        pool.set_endpoints([zero, two])
        assert not pool.has_single_endpoint
        assert set(used_endpoints(pool)) == set("02")
        await pool.close()


async def test_endpoint_that_comes_gets_shared_memory_without_a_call(
    endpoint_at: EndpointAt,
) -> None:
    pool = make_pool(1)
    async with ScriptedServer(SharedMemoryModel(1)) as server, no_leaks():
        endpoint, lanes = endpoint_at(server.url), SharedMemoryLanes(SharedMemoryPolicy(2**20, 1))
        endpoint.shared_memory = SharedMemoryLane(endpoint, lanes)
        pool.set_endpoints([endpoint])
        await until(lambda: lanes.min_bytes == 1)
        await pool.close()


async def test_removed_endpoint_is_closed_and_its_calls_still_count() -> None:
    log = EventLog()
    pool = Pool(
        [ScriptedEndpoint(log, url="http://0"), ScriptedEndpoint(EventLog(), url="http://1")]
    )
    zero, one = pool.endpoints
    lease = pool.lease([one])
    lease.acquire()
    async with no_leaks():
        pool.set_endpoints([one])
    assert log == ["server is left"]
    assert [(state.url, state.draining) for state in pool.snapshot()] == [
        ("http://1", False),
        ("http://0", True),
    ]
    assert pool.outstanding == [0]
    lease.release(Outcome.FAILED, "it is gone")
    assert [state.url for state in pool.snapshot()] == ["http://1"]
    assert zero not in pool.endpoints


async def test_endpoint_on_trial_is_used_again_after_it_was_single() -> None:
    clock = ManualClock()
    endpoints = scripted_endpoints(2)
    pool = Pool(endpoints, clock=clock)
    zero, one = endpoints
    fail_calls(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    clock.now = 10
    on_trial = pool.lease([one])
    on_trial.acquire()
    pool.set_endpoints([zero])
    on_trial.release(Outcome.UNKNOWN)
    pool.set_endpoints([zero, one])
    assert pool.members[0].ejection == NOT_EJECTED
    assert set(used_endpoints(pool)) == set("01")
    await pool.close()


async def test_snapshot_describes_all_endpoints() -> None:
    clock = ManualClock()
    supervisor = PoolSupervisor(HEALTH_CHECKER, ModelDiscovery(1))
    pool = make_pool(2, OutlierPolicy(base_ejection_time=10), clock, supervisor)
    fail_calls(pool, 0, GatewayError(ErrorKind.UNREACHABLE, "nobody there"), times=5)
    clock.now = 4
    pool.members[0].calls.last_error_time = 1.5
    pool.members[0].probed = ProbeState(healthy=False)
    pool.members[0].reason = "GET / returned 503"
    pool.members[1].models = ready("b", "a")
    with used(pool.lease()):
        states = [replace(each, state_since=None) for each in pool.snapshot()]
    assert states == [
        MemberState(
            "http://0",
            0,
            5,
            1,
            6.0,
            False,
            "GET / returned 503",
            None,
            False,
            "nobody there",
            "1970-01-01T00:00:01.500+00:00",
            state="ejected",
            state_text="ejected for 6 s: 5 failures in a row: nobody there",
        ),
        MemberState("http://1", 1, 0, 0, 0.0, None, "", ("a", "b"), False),
    ]
    clock.now = 11
    assert pool.snapshot()[0].ejection_remaining_seconds == 0.0


def test_lease_all_includes_ejected_endpoints() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock = ManualClock()
    endpoints = scripted_endpoints(3)
    pool = Pool(endpoints, OutlierPolicy(base_ejection_time=10), clock)
    fail_calls(pool, 0, error, times=5)
    leases = pool.lease_all()
    assert [lease.acquire() for lease in leases] == endpoints
    assert pool.outstanding == [1, 1, 1]
    for lease in leases:
        lease.finish(error)
    assert pool.outstanding == [0, 0, 0]
    # It was no trial, so the ejection is not extended.
    clock.now = 9
    assert set(used_endpoints(pool)) == set("12")
    clock.now = 10
    assert set(used_endpoints(pool)) == set("012")


REFUSED = GatewayError(ErrorKind.UNREACHABLE, "Connection refused")


def test_endpoint_that_refuses_is_unreachable_until_a_call_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has no health checks, and is never ejected."""
    pool = make_pool(2, OutlierPolicy(consecutive_failures=0), upstream="u")
    fail_calls(pool, 0, REFUSED, times=3)
    state = pool.snapshot()[0]
    assert (state.state, state.state_text) == (
        "unreachable",
        "3 failures in a row: Connection refused",
    )
    for _ in range(2):
        pool.judge({}, {}, leads=True)
    fail_calls(pool, 0, REFUSED)
    assert pool.snapshot()[0].state_since == state.state_since
    fail_calls(pool, 0, None)
    pool.judge({}, {}, leads=True)
    state = pool.snapshot()[0]
    assert (state.state, state.state_text) == ("in_use", "")
    assert [each for each in caplog.messages if "of upstream u" in each] == [
        "http://0 of upstream u is unreachable: 3 failures in a row: Connection refused",
        "http://0 of upstream u is not unreachable any more",
    ]


def test_new_worker_does_not_log_the_failures_of_an_unreachable_upstream_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has made no call itself, and knows the calls of the others."""
    clock = ManualClock()
    pool = Pool([ScriptedEndpoint(EventLog(), url="http://0")], clock=clock, upstream="u")
    pool.outlier_detector.record_remote_unreachable(10)
    pool.judge({"http://0": RecentCalls(83, 83, 10)}, {}, leads=True)
    assert pool.snapshot()[0].state == "failing"
    assert not [message for message in caplog.messages if "failing" in message]


def test_endpoint_that_gets_the_load_of_one_that_fails_is_not_slow_beside_it() -> None:
    pool = make_pool(2)
    failing = {"http://0": RecentCalls(calls=50, failures=50, seconds=10)}
    latencies = {
        "http://0": {"m": ModelLatency([Latency(50, 0.001)])},
        "http://1": {"m": ModelLatency([Latency(50, 2.0)])},
    }
    pool.judge(failing, latencies, leads=True)
    assert [each.state for each in pool.snapshot()] == ["failing", "in_use"]
    pool.judge({}, latencies, leads=True)
    states = pool.snapshot()
    assert [each.state for each in states] == ["in_use", "slow"]
    assert states[1].latency_outlier == states[1].state_text


CONNECT_ERROR = GatewayError(
    ErrorKind.UNREACHABLE, "cannot connect to http://0: Connection refused"
)


def _state(pool: Pool) -> MemberState:
    return pool.snapshot()[0]


def _counts(pool: Pool) -> tuple[int, int]:
    calls = pool.members[0].calls
    return calls.failures, calls.failures_total


def _responds(status: int) -> Callable[[Lease], None]:
    """End a call by a response with a status."""
    return lambda lease: lease.release(*lease.classify_status(status))


def _client_leaves(lease: Lease) -> None:
    lease.classify_status(500)
    lease.release(Outcome.UNKNOWN, "the client left")


def _metadata(status: int) -> Callable[[Lease], None]:
    error = UpstreamResponseError(status, "application/json", b"{}")
    return lambda lease: lease.finish(error)


_LATE, _LATE_CLIENT = ErrorKind.SERVER_TIMEOUT, ErrorKind.CLIENT_TIMEOUT
ENDS: dict[str, tuple[Callable[[Lease], None], int, int]] = {
    "no connection": (lambda lease: lease.finish(CONNECT_ERROR), 1, 1),
    "no response in time": (lambda it: it.finish(GatewayError(_LATE, "late")), 1, 1),
    "a client that is late": (lambda it: it.finish(GatewayError(_LATE_CLIENT, "late")), 0, 0),
    "500": (_responds(500), 1, 0),
    # With it, and with an unknown RPC, the client asks for what the server never does.
    "501": (_responds(501), 0, 0),
    "503, for which the policy ejects": (_responds(503), 1, 1),
    "404": (_responds(404), 0, 0),
    "a client that leaves during a response of 500": (_client_leaves, 1, 0),
    "a response of 500 that is retried": (lambda it: it.release(*it.classify_retried(500)), 1, 1),
    "500 for metadata": (_metadata(500), 1, 0),
    "404 for metadata": (_metadata(404), 0, 0),
    "a client that leaves": (lambda lease: lease.finish(ConnectionError("the client left")), 0, 0),
}
"""How calls end, whether they have failed then, and whether the endpoint has."""


@pytest.mark.parametrize(("end", "failures", "counts_for_ejection"), ENDS.values(), ids=ENDS)
def test_failed_calls_are_counted_until_one_succeeds(
    end: Callable[[Lease], None], failures: int, counts_for_ejection: int
) -> None:
    for endpoints in (1, 2):
        pool = make_pool(endpoints)
        for _ in range(2):
            lease = pool.lease(pool.endpoints[1:])
            lease.acquire()
            end(lease)
        assert _counts(pool) == (2 * failures, 2 * failures)
        connects = pool.members[0].calls.connect_failures
        assert connects == (2 if end is ENDS["no connection"][0] else 0)
        if endpoints == 2:
            assert pool.members[0].ejection.failures == 2 * counts_for_ejection
        told = _state(pool).last_error, _state(pool).last_error_at or ""
        assert bool(told[0]) == bool(failures)
        assert told[1].endswith("+00:00" if failures else "")
        fail_calls(pool, 0, None)
        assert _counts(pool) == (0, 2 * failures)
        assert _state(pool).last_error == told[0]


class _Body:
    """A request's body, referred to by a frame of a traceback."""


def test_stored_error_keeps_no_frames_alive() -> None:
    pool = make_pool(1)

    def call() -> "weakref.ref[_Body]":
        body = _Body()
        with suppress(GatewayError), used(pool.lease()):
            raise GatewayError(ErrorKind.BAD_RESPONSE, f"{body!r} was not answered")
        return weakref.ref(body)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
    assert "was not answered" in (_state(pool).last_error or "")
