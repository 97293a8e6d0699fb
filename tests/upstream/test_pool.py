import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.model_name import ModelName
from gateway.routing.health import HEALTHY, EjectionPolicy, Health, Probed, ProbePolicy
from gateway.upstream.discovery import Discovery
from gateway.upstream.keeper import Keeper
from gateway.upstream.loan import Outcome
from gateway.upstream.member import MemberState
from gateway.upstream.pool import Pool
from gateway.upstream.probe import Prober
from gateway.upstream.ready_models import EVERY_MODEL
from tests.servers.doubles import Log, ScriptedEndpoint, ready
from tests.servers.running_gateway import nothing_left


def _pool(count: int) -> Pool:
    return Pool([ScriptedEndpoint(Log(), url=f"http://{number}") for number in range(count)])


def test_one_endpoint_takes_all() -> None:
    pool = _pool(1)
    with pool.endpoint() as first, pool.endpoint() as second:
        assert first is second
        assert pool.outstanding == [2]
    assert pool.outstanding == [0]


def test_idle_endpoints_take_turns() -> None:
    pool = _pool(3)
    urls = []
    for _ in range(6):
        with pool.endpoint() as endpoint:
            urls.append(endpoint.url[-1])
    assert "".join(urls) == "012012"


def test_the_least_busy_goes_first() -> None:
    pool = _pool(2)
    with pool.endpoint() as busy, pool.endpoint() as other:
        assert other is not busy
        with pool.endpoint():
            assert sorted(pool.outstanding) == [1, 2]
    with pool.endpoint() as busy:
        for _ in range(4):
            with pool.endpoint() as endpoint:
                assert endpoint is not busy


def test_it_is_given_back_whatever_happens() -> None:
    pool = _pool(1)
    with pytest.raises(KeyError), pool.endpoint():
        raise KeyError
    assert pool.outstanding == [0]


def test_a_loan_lasts_until_it_is_given_back() -> None:
    pool = _pool(1)
    loans = [pool.endpoint() for _ in range(2)]
    assert pool.outstanding == [0]
    assert loans[0].take() is loans[1].take()
    assert pool.outstanding == [2]
    for left, loan in ((1, loans[0]), (0, loans[1])):
        loan.give_back(Outcome.ANSWERED)
        assert pool.outstanding == [left]


class _Times:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _failing(pool: Pool, number: int, error: Exception | None, times: int = 1) -> None:
    """Have an endpoint used, and fail with an error or not."""
    others = [each for each in pool.endpoints if each is not pool.endpoints[number]]
    for _ in range(times):
        with suppress(GatewayError, ConnectionError), pool.endpoint(others):
            if error is not None:
                raise error


@pytest.mark.parametrize(
    ("error", "used"),
    [
        (GatewayError(ErrorKind.UNREACHABLE, ""), "12"),
        (GatewayError(ErrorKind.BAD_ANSWER, ""), "12"),
        (GatewayError(ErrorKind.SERVER_TIMEOUT, ""), "12"),
        (GatewayError(ErrorKind.BAD_REQUEST, ""), "012"),
        (GatewayError(ErrorKind.CLIENT_TIMEOUT, ""), "012"),
        (ConnectionError(), "012"),
        (None, "012"),
    ],
)
def test_who_fails_is_left_out(error: Exception | None, used: str) -> None:
    pool = _pool(3)
    _failing(pool, 0, error, times=5)
    assert set(_used(pool)) == set(used)


def test_four_failures_are_not_enough_nor_five_with_an_answer_between() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    pool = _pool(3)
    _failing(pool, 0, error, times=4)
    _failing(pool, 0, None)
    _failing(pool, 0, error, times=4)
    assert set(_used(pool)) == set("012")


def test_who_was_left_out_is_tried_by_one_exchange(caplog: pytest.LogCaptureFixture) -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "nobody there")
    clock = _Times()
    endpoints = [ScriptedEndpoint(Log(), url=f"http://{number}") for number in range(3)]
    pool = Pool(endpoints, EjectionPolicy(time=10), clock)
    _failing(pool, 0, error, times=5)
    left_out = "http://0 failed 5 times in a row: it is left out for 10 s; at last: nobody there"
    assert left_out in caplog.text
    clock.now = 10
    on_trial = pool.endpoint(endpoints[1:])
    assert on_trial.take() is endpoints[0]
    assert set(_used(pool)) == set("12")
    on_trial.give_back(Outcome.UNKNOWN)
    _failing(pool, 0, error)
    assert "it is left out for 20 s" in caplog.text
    clock.now = 29
    assert set(_used(pool)) == set("12")
    clock.now = 30
    assert set(_used(pool)) == set("012")
    assert "http://0 is used again" in caplog.text


def test_an_outage_of_all_leaves_nobody_out_for_longer(caplog: pytest.LogCaptureFixture) -> None:
    """Each exchange fails at one, and then at the one that is left out, as there is no other."""
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock, told = _Times(), _Told()
    pool = _telling_pool(2, clock, told)
    for _ in range(50):
        _failing(pool, 1, error)
        _failing(pool, 0, error)
        clock.now += 0.1
    assert [member.health.ejections for member in pool.members] == [0, 1]
    (left_out,) = told.all
    assert len(caplog.records) == 1
    clock.now = left_out[2]
    assert set(_used(pool)) == set("01")


def test_where_all_fail_half_of_them_go_on() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    pool = _pool(4)
    for number in range(4):
        _failing(pool, number, error, times=10)
    assert set(_used(pool)) == set("23")


def test_one_alone_is_never_left_out() -> None:
    pool = _pool(1)
    _failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=20)
    assert _used(pool) == "0" * 8


def test_what_is_known_of_endpoints_is_taken_over_by_url() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    before, after = _pool(3), _pool(4)
    _failing(before, 1, error, times=5)
    _failing(before, 2, error, times=3)
    after.take_over(before)
    assert [member.health for member in after.members[:3]] == [
        member.health for member in before.members
    ]
    _failing(after, 2, error, times=2)
    assert set(_used(after)) == set("03")
    assert before.members[2].health.failures == 3


def test_a_trial_that_is_under_way_tells_the_pool_where_it_began_alone() -> None:
    clock = _Times()
    endpoints = [ScriptedEndpoint(Log(), url=f"http://{number}") for number in range(3)]
    before, after = Pool(endpoints, clock=clock), Pool(endpoints, clock=clock)
    _failing(before, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    clock.now = 1000
    on_trial = before.endpoint(endpoints[1:])
    on_trial.take()
    after.take_over(before)
    assert set(_used(after)) == set("012")  # with a trial of its own
    on_trial.give_back(Outcome.UNKNOWN)


def test_another_one_is_preferred_to_one_that_does_not_fail() -> None:
    pool = _pool(2)
    _failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    one, two = pool.endpoints
    assert pool.endpoint([two]).endpoint is one
    assert pool.endpoint([one]).endpoint is two
    assert pool.endpoint([one, two]).endpoint in (one, two)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.ANSWERED),
        (302, Outcome.ANSWERED),
        (404, Outcome.ANSWERED),
        (429, Outcome.FAILED),
        (500, Outcome.ANSWERED),
        (503, Outcome.FAILED),
    ],
)
def test_what_a_status_tells(status: int, outcome: Outcome) -> None:
    pool = Pool([], EjectionPolicy(statuses=frozenset((429, 503))))
    reason = f"it answered {status}" if outcome is Outcome.FAILED else ""
    assert pool.judge(status) == (outcome, reason)


def test_the_statuses_that_tell_against_an_endpoint_by_default() -> None:
    pool = _pool(1)
    failures = [status for status in range(600) if pool.judge(status)[0] is Outcome.FAILED]
    assert failures == [502, 503, 504]


# ---------------------------------------------------------------------------------- probes, models

PROBER = Prober("/", 1, 1, ProbePolicy())


def _probed(states: str) -> Pool:
    """Make a pool whose probes say good (+), bad (-) or nothing yet (?)."""
    endpoints = [ScriptedEndpoint(Log(), url=f"http://{i}") for i in range(len(states))]
    pool = Pool(endpoints, keeper=Keeper(PROBER))
    for member, state in zip(pool.members, states, strict=True):
        if state != "?":
            member.probed = Probed(state == "+")
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
    assert set(_used(pool)) == set(used)
    assert pool.is_usable is usable
    assert len(pool.endpoints) == len(states)


async def test_without_probes_nothing_is_said_of_the_whole() -> None:
    pool = _pool(2)
    assert pool.is_usable is None
    await pool.probed()


@pytest.mark.parametrize(
    ("states", "told"), [("?-?", "---"), ("???", "-+"), ("?", "+"), ("+??", ""), ("--", "")]
)
async def test_first_probes_are_waited_for_as_long_as_they_can_tell_more(
    states: str, told: str
) -> None:
    pool = _probed(states)
    waiting = asyncio.create_task(pool.probed())
    await asyncio.sleep(0)
    for member, state in zip(pool.members, told, strict=False):
        assert not waiting.done()
        member.probed = Probed(state == "+")
        pool._find_up()
        await asyncio.sleep(0)
    await waiting
    assert pool.is_usable is ("+" in states + told)


def test_a_probe_of_its_own_counts_where_no_other_is_known() -> None:
    before, after = _pool(2), _probed("+-")
    after.take_over(before)
    assert [member.probed.healthy for member in after.members] == [True, False]


def test_who_fails_is_preferred_to_who_is_unhealthy() -> None:
    pool = _probed("+-+-")
    for number in (0, 2):
        _failing(pool, number, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    assert [member.health.ejections for member in pool.members] == [1, 0, 1, 0]
    assert pool.endpoint().endpoint.url[-1] in "02"
    # Once all that are healthy were tried, there is no other.
    assert pool.has_another([pool.endpoints[0]])
    assert not pool.has_another([pool.endpoints[0], pool.endpoints[2]])


def _with_models(*models: Sequence[str]) -> Pool:
    """Make a pool of endpoints that have these models each; any for *, unknown for ?."""
    endpoints = [ScriptedEndpoint(Log(), url=f"http://{i}") for i in range(len(models))]
    pool = Pool(endpoints, keeper=Keeper(discovery=Discovery(1)))
    for member, names in zip(pool.members, models, strict=True):
        if names != "?":
            member.models = EVERY_MODEL if names == "*" else ready(*names)
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
    assert set(_used(_with_models(*models), wanted)) == set(used)


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
    assert set(_used(_with_models(*models), wanted)) == set(used)


async def test_a_model_is_asked_where_it_is_even_if_that_fails_or_is_unhealthy() -> None:
    """From elsewhere, the client would be told that there is no such model."""
    pool = _with_models("a", "a", "b")
    _failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    assert set(_used(pool, "a")) == {"1"}
    pool.members[1].probed = Probed(healthy=False)
    pool._find_up()
    assert pool.endpoint(model=ModelName("a")).endpoint is pool.endpoints[0]
    assert pool.endpoint().endpoint is pool.endpoints[2]
    pool.members[0].probed = Probed(healthy=False)
    pool._find_up()
    assert pool.endpoint(model=ModelName("a")).endpoint is pool.endpoints[1]


def test_without_discovery_a_model_makes_no_difference() -> None:
    pool = _pool(2)
    pool.members[0].models = ready("a")
    assert set(_used(pool, "a")) == set("01")
    pool.ask_again()


# ---------------------------------------------------------------------------------- other members


async def test_endpoints_come_and_go() -> None:
    pool = _pool(2)
    zero, one = pool.endpoints
    kept = pool.members[1]
    two = ScriptedEndpoint(Log(), url="http://2")
    async with nothing_left():
        pool.use([one, two])
        assert pool.endpoints == (one, two)
        assert pool.members[0] is kept
        assert set(_used(pool)) == set("12")
        pool.use([two])
        assert pool.has_one
        assert _used(pool) == "2" * 8
        pool.use([zero, two])
        assert not pool.has_one
        assert set(_used(pool)) == set("02")
        await pool.close()


async def test_who_leaves_is_closed_but_what_is_under_way_still_counts() -> None:
    log = Log()
    pool = Pool([ScriptedEndpoint(log, url="http://0"), ScriptedEndpoint(Log(), url="http://1")])
    zero, one = pool.endpoints
    loan = pool.endpoint([one])
    loan.take()
    async with nothing_left():
        pool.use([one])
    assert log == ["server is left"]
    assert [(state.url, state.leaving) for state in pool.snapshot()] == [
        ("http://1", False),
        ("http://0", True),
    ]
    assert pool.outstanding == [0]
    loan.give_back(Outcome.FAILED, "it is gone")
    assert [state.url for state in pool.snapshot()] == ["http://1"]
    assert zero not in pool.endpoints


async def test_a_failure_of_one_that_left_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool(3)
    _, one, two = pool.endpoints
    loans = [pool.endpoint([one, two]) for _ in range(5)]
    for loan in loans:
        loan.take()
    pool.use([one, two])
    for loan in loans:
        loan.give_back(Outcome.FAILED, "it is gone")
    assert [state.failures for state in pool.snapshot()] == [0, 0]
    assert not caplog.records
    await pool.close()


async def test_one_that_was_on_trial_as_it_was_left_alone_is_used_again() -> None:
    clock = _Times()
    endpoints = [ScriptedEndpoint(Log(), url=f"http://{number}") for number in range(2)]
    pool = Pool(endpoints, clock=clock)
    zero, one = endpoints
    _failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    clock.now = 10
    on_trial = pool.endpoint([one])
    on_trial.take()
    pool.use([zero])
    on_trial.give_back(Outcome.UNKNOWN)
    pool.use([zero, one])
    assert pool.members[0].health == HEALTHY
    assert set(_used(pool)) == set("01")
    await pool.close()


async def test_where_there_is_no_endpoint() -> None:
    pool = _pool(2)
    pool.use([])
    with pytest.raises(GatewayError) as caught:
        pool.endpoint()
    assert caught.value.kind is ErrorKind.UNREACHABLE
    assert not pool.has_another([])
    await pool.close()


async def test_a_snapshot_tells_how_all_do() -> None:
    clock = _Times()
    endpoints = [ScriptedEndpoint(Log(), url=f"http://{number}") for number in range(2)]
    keeper = Keeper(PROBER, Discovery(1))
    pool = Pool(endpoints, EjectionPolicy(time=10), clock, keeper)
    _failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    clock.now = 4
    pool.members[0].probed = Probed(healthy=False)
    pool.members[0].reason = "GET / answered 503"
    pool.members[1].models = ready("b", "a")
    with pool.endpoint():
        states = pool.snapshot()
    assert states == (
        MemberState("http://0", 0, 5, 1, 6.0, False, "GET / answered 503", None, False),
        MemberState("http://1", 1, 0, 0, 0.0, None, "", ("a", "b"), False),
    )
    clock.now = 11
    assert pool.snapshot()[0].ejected_for == 0.0


def test_every_endpoint_is_lent_whether_it_fails_or_not() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock = _Times()
    endpoints = [ScriptedEndpoint(Log(), url=f"http://{number}") for number in range(3)]
    pool = Pool(endpoints, EjectionPolicy(time=10), clock)
    _failing(pool, 0, error, times=5)
    loans = pool.every_endpoint()
    assert [loan.take() for loan in loans] == endpoints
    assert pool.outstanding == [1, 1, 1]
    for loan in loans:
        loan.end(error)
    assert pool.outstanding == [0, 0, 0]
    # That was no trial, so that the time for which it is left out stays the same.
    clock.now = 9
    assert set(_used(pool)) == set("12")
    clock.now = 10
    assert set(_used(pool)) == set("012")


def test_one_that_is_left_out_and_answers_is_used_again() -> None:
    pool = _pool(3)
    _failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    with pool.every_endpoint()[0]:
        pass
    assert set(_used(pool)) == set("012")


class _Told:
    """What a pool has told."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int, float]] = []

    def __call__(self, url: str, health: Health) -> None:
        self.all.append((url, health.ejections, health.until))


def _telling_pool(count: int, clock: _Times, told: _Told) -> Pool:
    endpoints = [ScriptedEndpoint(Log(), url=f"http://{number}") for number in range(count)]
    return Pool(endpoints, EjectionPolicy(time=10), clock, tell=told)


def test_it_tells_who_is_ejected_and_who_answers_again() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock, told = _Times(), _Told()
    pool = _telling_pool(3, clock, told)
    _failing(pool, 0, error, times=4)
    _failing(pool, 1, None)
    assert told.all == []
    _failing(pool, 0, error)
    assert told.all == [("http://0", 1, 10)]
    clock.now = 10
    _failing(pool, 0, error)
    clock.now = 30
    _failing(pool, 0, None, times=2)
    assert told.all[1:] == [("http://0", 2, 30), ("http://0", 0, 0)]


def test_what_is_used_as_there_is_no_better_one_is_not_told_to_be_well() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock, told = _Times(), _Told()
    pool = _telling_pool(2, clock, told)
    _failing(pool, 0, error, times=5)
    pool.members[1].health = Health(5, 1, 99)
    clock.now = 10
    _failing(pool, 0, error)
    assert pool.members[0].health == Health(6)
    assert told.all == [("http://0", 1, 10)]


def test_what_others_say_counts_and_is_not_told_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    clock, told = _Times(), _Told()
    pool = _telling_pool(3, clock, told)
    ejected, well = Health(ejections=1, until=10), Health(until=3)
    for _ in range(2):
        pool.hear(pool.members[0], ejected)
    assert set(_used(pool)) == set("12")
    # No more than half of them, whoever says so.
    pool.hear(pool.members[1], ejected)
    assert set(_used(pool)) == set("12")
    for _ in range(2):
        pool.hear(pool.members[0], well)
    assert set(_used(pool)) == set("012")
    assert told.all == []
    assert caplog.messages == [
        "http://0: left out, as another worker says",
        "http://0: used again, as another worker says",
    ]


def test_what_others_have_ejected_is_tried_here_when_its_time_is_over() -> None:
    clock, told = _Times(), _Told()
    pool = _telling_pool(3, clock, told)
    pool.hear(pool.members[0], Health(ejections=1, until=10))
    clock.now = 10
    _failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""))
    assert told.all == [("http://0", 2, 30)]
    assert set(_used(pool)) == set("12")


def test_an_endpoint_that_is_alone_is_used_whatever_others_say() -> None:
    pool = _pool(1)
    pool.hear(pool.members[0], Health(ejections=1, until=1e9))
    assert pool.members[0].health == HEALTHY
    assert set(_used(pool)) == {"0"}


def _name(model: str) -> ModelName:
    name, _, version = model.partition("/")
    return ModelName(name, version or None)


def _used(pool: Pool, model: str | None = None) -> str:
    """Give the endpoints that answer the next exchanges."""
    urls = []
    for _ in range(8):
        with pool.endpoint(model=None if model is None else _name(model)) as endpoint:
            urls.append(endpoint.url[-1])
    return "".join(urls)
