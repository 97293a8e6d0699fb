import asyncio
from collections.abc import Sequence

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import ModelName
from gateway.routing.health import NOT_EJECTED, HealthCheckPolicy, OutlierPolicy, ProbeState
from gateway.upstream.pool.health_check import HealthChecker
from gateway.upstream.pool.member import MemberState, Outcome
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.pool.pool import Pool
from gateway.upstream.pool.ready_models import ANY_MODEL
from gateway.upstream.pool.supervisor import PoolSupervisor
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint, ready
from tests.support.gateway import no_leaks
from tests.upstream.pools import Times, failing, pool_of, used_by


def test_one_endpoint_takes_all() -> None:
    pool = pool_of(1)
    with pool.lease() as first, pool.lease() as second:
        assert first is second
        assert pool.outstanding == [2]
    assert pool.outstanding == [0]


def test_idle_endpoints_take_turns() -> None:
    pool = pool_of(3)
    urls = []
    for _ in range(6):
        with pool.lease() as endpoint:
            urls.append(endpoint.url[-1])
    assert "".join(urls) == "012012"


def test_the_least_busy_goes_first() -> None:
    pool = pool_of(2)
    with pool.lease() as busy, pool.lease() as other:
        assert other is not busy
        with pool.lease():
            assert sorted(pool.outstanding) == [1, 2]
    with pool.lease() as busy:
        for _ in range(4):
            with pool.lease() as endpoint:
                assert endpoint is not busy


def test_it_is_given_back_whatever_happens() -> None:
    pool = pool_of(1)
    with pytest.raises(KeyError), pool.lease():
        raise KeyError
    assert pool.outstanding == [0]


def test_a_loan_lasts_until_it_is_given_back() -> None:
    pool = pool_of(1)
    loans = [pool.lease() for _ in range(2)]
    assert pool.outstanding == [0]
    assert loans[0].acquire() is loans[1].acquire()
    assert pool.outstanding == [2]
    for left, loan in ((1, loans[0]), (0, loans[1])):
        loan.release(Outcome.SUCCEEDED)
        assert pool.outstanding == [left]


def test_what_is_known_of_endpoints_is_taken_over_by_url() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    before, after = pool_of(3), pool_of(4)
    failing(before, 1, error, times=5)
    failing(before, 2, error, times=3)
    after.adopt_state(before)
    assert [member.ejection for member in after.members[:3]] == [
        member.ejection for member in before.members
    ]
    failing(after, 2, error, times=2)
    assert set(used_by(after)) == set("03")
    assert before.members[2].ejection.failures == 3


def test_a_trial_that_is_under_way_tells_the_pool_where_it_began_alone() -> None:
    clock = Times()
    endpoints = [ScriptedEndpoint(EventLog(), url=f"http://{number}") for number in range(3)]
    before, after = Pool(endpoints, clock=clock), Pool(endpoints, clock=clock)
    failing(before, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    clock.now = 1000
    on_trial = before.lease(endpoints[1:])
    on_trial.acquire()
    after.adopt_state(before)
    assert set(used_by(after)) == set("012")  # with a trial of its own
    on_trial.release(Outcome.UNKNOWN)


def test_another_one_is_preferred_to_one_that_does_not_fail() -> None:
    pool = pool_of(2)
    failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    one, two = pool.endpoints
    assert pool.lease([two]).endpoint is one
    assert pool.lease([one]).endpoint is two
    assert pool.lease([one, two]).endpoint in (one, two)


# ---------------------------------------------------------------------------------- probes, models

PROBER = HealthChecker("/", 1, 1, HealthCheckPolicy())


def _probed(states: str) -> Pool:
    """Make a pool whose probes say good (+), bad (-) or nothing yet (?)."""
    endpoints = [ScriptedEndpoint(EventLog(), url=f"http://{i}") for i in range(len(states))]
    pool = Pool(endpoints, supervisor=PoolSupervisor(PROBER))
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
        ("?", "0", False),
        ("+", "0", True),
    ],
)
def test_probes_tell_which_are_used(states: str, used: str, usable: bool) -> None:
    pool = _probed(states)
    assert set(used_by(pool)) == set(used)
    assert pool.any_healthy is usable
    assert len(pool.endpoints) == len(states)


async def test_without_probes_nothing_is_said_of_the_whole() -> None:
    pool = pool_of(2)
    assert pool.any_healthy is None
    await pool.wait_until_probed()


@pytest.mark.parametrize(
    ("states", "told"), [("?-?", "---"), ("???", "-+"), ("?", "+"), ("+??", ""), ("--", "")]
)
async def test_first_probes_are_waited_for_as_long_as_they_can_tell_more(
    states: str, told: str
) -> None:
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


def test_a_probe_of_its_own_counts_where_no_other_is_known() -> None:
    before, after = pool_of(2), _probed("+-")
    after.adopt_state(before)
    assert [member.probed.healthy for member in after.members] == [True, False]


def test_who_fails_is_preferred_to_who_is_unhealthy() -> None:
    pool = _probed("+-+-")
    for number in (0, 2):
        failing(pool, number, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    assert [member.ejection.ejections for member in pool.members] == [1, 0, 1, 0]
    assert pool.lease().endpoint.url[-1] in "02"
    # Once all that are healthy were tried, there is no other.
    assert pool.has_alternative([pool.endpoints[0]])
    assert not pool.has_alternative([pool.endpoints[0], pool.endpoints[2]])


def _with_models(*models: Sequence[str]) -> Pool:
    """Make a pool of endpoints that have these models each; any for *, unknown for ?."""
    endpoints = [ScriptedEndpoint(EventLog(), url=f"http://{i}") for i in range(len(models))]
    pool = Pool(endpoints, supervisor=PoolSupervisor(model_discovery=ModelDiscovery(1)))
    for member, names in zip(pool.members, models, strict=True):
        if names != "?":
            member.models = ANY_MODEL if names == "*" else ready(*names)
    return pool


@pytest.mark.parametrize(
    ("models", "wanted", "used"),
    [
        (("ab", "b", ""), "a", "0"),
        (("ab", "b", ""), "b", "01"),
        (("ab", "b", ""), "c", "012"),
        (("ab", "b", ""), None, "012"),
        (("a", "?", "b"), "a", "0"),
        (("a", "?", "b"), "c", "1"),
        (("a", "*", "b"), "a", "01"),
        (("a", "*", "b"), "c", "1"),
        (("?", "?", "?"), "a", "012"),
        (("",), "a", "0"),
    ],
)
async def test_models_tell_which_are_used(
    models: tuple[str, ...], wanted: str | None, used: str
) -> None:
    assert set(used_by(_with_models(*models), wanted)) == set(used)


@pytest.mark.parametrize(
    ("models", "wanted", "used"),
    [
        ((["m/1"], ["m/2"], ["n/2"]), "m/2", "1"),
        ((["m/1"], ["m/2"], ["n/2"]), "m", "01"),
        ((["m/1", "m/2"], ["m/2"], []), "m/2", "01"),
        # Where no version is named, each may be there.
        ((["m/1"], ["m"], "*"), "m/2", "12"),
        # A version that none has is not where the model is unknown.
        ((["m/1"], ["n/2"], []), "m/2", "0"),
        ((["m/1"], "?", []), "m/2", "1"),
        ((["n"], ["n"], []), "m/2", "012"),
    ],
)
async def test_versions_tell_which_are_used(
    models: tuple[Sequence[str], ...], wanted: str, used: str
) -> None:
    assert set(used_by(_with_models(*models), wanted)) == set(used)


async def test_a_model_is_asked_where_it_is_even_if_that_fails_or_is_unhealthy() -> None:
    """From elsewhere, the client would be told that there is no such model."""
    pool = _with_models("a", "a", "b")
    failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    assert set(used_by(pool, "a")) == {"1"}
    pool.members[1].probed = ProbeState(healthy=False)
    pool._find_up()
    assert pool.lease(model=ModelName("a")).endpoint is pool.endpoints[0]
    assert pool.lease().endpoint is pool.endpoints[2]
    pool.members[0].probed = ProbeState(healthy=False)
    pool._find_up()
    assert pool.lease(model=ModelName("a")).endpoint is pool.endpoints[1]


def test_without_discovery_a_model_makes_no_difference() -> None:
    pool = pool_of(2)
    pool.members[0].models = ready("a")
    assert set(used_by(pool, "a")) == set("01")
    pool.refresh_models()


# ---------------------------------------------------------------------------------- other members


async def test_endpoints_come_and_go() -> None:
    pool = pool_of(2)
    zero, one = pool.endpoints
    kept = pool.members[1]
    two = ScriptedEndpoint(EventLog(), url="http://2")
    async with no_leaks():
        pool.set_endpoints([one, two])
        assert pool.endpoints == (one, two)
        assert pool.members[0] is kept
        assert set(used_by(pool)) == set("12")
        pool.set_endpoints([two])
        assert pool.has_single_endpoint
        assert used_by(pool) == "2" * 8
        pool.set_endpoints([zero, two])
        assert not pool.has_single_endpoint
        assert set(used_by(pool)) == set("02")
        await pool.close()


async def test_who_leaves_is_closed_but_what_is_under_way_still_counts() -> None:
    log = EventLog()
    pool = Pool(
        [ScriptedEndpoint(log, url="http://0"), ScriptedEndpoint(EventLog(), url="http://1")]
    )
    zero, one = pool.endpoints
    loan = pool.lease([one])
    loan.acquire()
    async with no_leaks():
        pool.set_endpoints([one])
    assert log == ["server is left"]
    assert [(state.url, state.leaving) for state in pool.snapshot()] == [
        ("http://1", False),
        ("http://0", True),
    ]
    assert pool.outstanding == [0]
    loan.release(Outcome.FAILED, "it is gone")
    assert [state.url for state in pool.snapshot()] == ["http://1"]
    assert zero not in pool.endpoints


async def test_one_that_was_on_trial_as_it_was_left_alone_is_used_again() -> None:
    clock = Times()
    endpoints = [ScriptedEndpoint(EventLog(), url=f"http://{number}") for number in range(2)]
    pool = Pool(endpoints, clock=clock)
    zero, one = endpoints
    failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    clock.now = 10
    on_trial = pool.lease([one])
    on_trial.acquire()
    pool.set_endpoints([zero])
    on_trial.release(Outcome.UNKNOWN)
    pool.set_endpoints([zero, one])
    assert pool.members[0].ejection == NOT_EJECTED
    assert set(used_by(pool)) == set("01")
    await pool.close()


async def test_where_there_is_no_endpoint() -> None:
    pool = pool_of(2)
    pool.set_endpoints([])
    with pytest.raises(GatewayError) as caught:
        pool.lease()
    assert caught.value.kind is ErrorKind.UNREACHABLE
    assert not pool.has_alternative([])
    await pool.close()


async def test_a_snapshot_tells_how_all_do() -> None:
    clock = Times()
    endpoints = [ScriptedEndpoint(EventLog(), url=f"http://{number}") for number in range(2)]
    supervisor = PoolSupervisor(PROBER, ModelDiscovery(1))
    pool = Pool(endpoints, OutlierPolicy(base_ejection_time=10), clock, supervisor)
    failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, "nobody there"), times=5)
    clock.now = 4
    pool.members[0].calls.last_error_time = 1.5
    pool.members[0].probed = ProbeState(healthy=False)
    pool.members[0].reason = "GET / answered 503"
    pool.members[1].models = ready("b", "a")
    with pool.lease():
        states = pool.snapshot()
    assert states == (
        MemberState(
            "http://0",
            0,
            5,
            1,
            6.0,
            False,
            "GET / answered 503",
            None,
            False,
            5,
            0,
            "nobody there",
            "1970-01-01T00:00:01.500+00:00",
        ),
        MemberState("http://1", 1, 0, 0, 0.0, None, "", ("a", "b"), False),
    )
    clock.now = 11
    assert pool.snapshot()[0].ejected_for == 0.0


def test_every_endpoint_is_lent_whether_it_fails_or_not() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock = Times()
    endpoints = [ScriptedEndpoint(EventLog(), url=f"http://{number}") for number in range(3)]
    pool = Pool(endpoints, OutlierPolicy(base_ejection_time=10), clock)
    failing(pool, 0, error, times=5)
    loans = pool.lease_all()
    assert [loan.acquire() for loan in loans] == endpoints
    assert pool.outstanding == [1, 1, 1]
    for loan in loans:
        loan.finish(error)
    assert pool.outstanding == [0, 0, 0]
    # That was no trial, so that the time for which it is left out stays the same.
    clock.now = 9
    assert set(used_by(pool)) == set("12")
    clock.now = 10
    assert set(used_by(pool)) == set("012")
