import logging

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.routing.health import NOT_EJECTED, EjectionState, OutlierPolicy
from gateway.upstream.pool.member import Outcome
from gateway.upstream.pool.pool import Pool
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint
from tests.upstream.pools import Times, failing, pool_of, used_by


@pytest.mark.parametrize(
    ("error", "used"),
    [
        (GatewayError(ErrorKind.UNREACHABLE, ""), "12"),
        (GatewayError(ErrorKind.BAD_RESPONSE, ""), "12"),
        (GatewayError(ErrorKind.SERVER_TIMEOUT, ""), "12"),
        (GatewayError(ErrorKind.BAD_REQUEST, ""), "012"),
        (GatewayError(ErrorKind.CLIENT_TIMEOUT, ""), "012"),
        (ConnectionError(), "012"),
        (None, "012"),
    ],
)
def test_who_fails_is_left_out(error: Exception | None, used: str) -> None:
    pool = pool_of(3)
    failing(pool, 0, error, times=5)
    assert set(used_by(pool)) == set(used)


def test_four_failures_are_not_enough_nor_five_with_an_answer_between() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    pool = pool_of(3)
    failing(pool, 0, error, times=4)
    failing(pool, 0, None)
    failing(pool, 0, error, times=4)
    assert set(used_by(pool)) == set("012")


def test_who_was_left_out_is_tried_by_one_exchange(caplog: pytest.LogCaptureFixture) -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "nobody\nthere")
    clock = Times()
    endpoints = [ScriptedEndpoint(EventLog(), url=f"http://{number}") for number in range(3)]
    pool = Pool(endpoints, OutlierPolicy(base_ejection_time=10), clock)
    failing(pool, 0, error, times=5)
    left_out = r"http://0 failed 5 times in a row: ejected for 10 s; last error: nobody\nthere"
    assert left_out in caplog.text
    clock.now = 10
    on_trial = pool.lease(endpoints[1:])
    assert on_trial.acquire() is endpoints[0]
    assert set(used_by(pool)) == set("12")
    on_trial.release(Outcome.UNKNOWN)
    failing(pool, 0, error)
    assert "ejected for 20 s" in caplog.text
    clock.now = 29
    assert set(used_by(pool)) == set("12")
    clock.now = 30
    assert set(used_by(pool)) == set("012")
    assert "http://0 is used again" in caplog.text


def test_an_outage_of_all_leaves_nobody_out_for_longer(caplog: pytest.LogCaptureFixture) -> None:
    """Each exchange fails at one, and then at the one that is left out, as there is no other."""
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock, told = Times(), _Told()
    pool = _telling_pool(2, clock, told)
    for _ in range(50):
        failing(pool, 1, error)
        failing(pool, 0, error)
        clock.now += 0.1
    assert [member.ejection.ejections for member in pool.members] == [0, 1]
    (left_out,) = [each for each in told.all if each[0]]
    assert sum("ejected for" in message for message in caplog.messages) == 1
    clock.now = left_out[2]
    assert set(used_by(pool)) == set("01")


def test_where_all_fail_half_of_them_go_on() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    pool = pool_of(4)
    for number in range(4):
        failing(pool, number, error, times=10)
    assert set(used_by(pool)) == set("23")


def test_one_alone_is_never_left_out() -> None:
    pool = pool_of(1)
    failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=20)
    assert used_by(pool) == "0" * 8


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.SUCCEEDED),
        (302, Outcome.SUCCEEDED),
        (404, Outcome.SUCCEEDED),
        (429, Outcome.FAILED),
        (500, Outcome.SUCCEEDED),
        (503, Outcome.FAILED),
    ],
)
def test_what_a_status_tells(status: int, outcome: Outcome) -> None:
    pool = Pool([], OutlierPolicy(failure_statuses=frozenset((429, 503))))
    reason = f"it answered {status}" if outcome is Outcome.FAILED else ""
    assert pool.outlier_detector.classify_status(status) == (outcome, reason)


def test_the_statuses_that_tell_against_an_endpoint_by_default() -> None:
    pool = pool_of(1)
    failures = [
        status
        for status in range(600)
        if pool.outlier_detector.classify_status(status)[0] is Outcome.FAILED
    ]
    assert failures == [502, 503, 504]


async def test_a_failure_of_one_that_left_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(3)
    _, one, two = pool.endpoints
    loans = [pool.lease([one, two]) for _ in range(5)]
    for loan in loans:
        loan.acquire()
    pool.set_endpoints([one, two])
    for loan in loans:
        loan.release(Outcome.FAILED, "it is gone")
    assert [state.failures for state in pool.snapshot()] == [0, 0]
    assert not caplog.records
    await pool.close()


def test_one_that_is_left_out_and_answers_is_used_again() -> None:
    pool = pool_of(3)
    failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    with pool.lease_all()[0]:
        pass
    assert set(used_by(pool)) == set("012")


class _Told:
    """What a pool has told."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int, float]] = []

    def __call__(self, url: str, health: EjectionState) -> None:
        self.all.append((url, health.ejections, health.until))


def _telling_pool(count: int, clock: Times, told: _Told) -> Pool:
    endpoints = [ScriptedEndpoint(EventLog(), url=f"http://{number}") for number in range(count)]
    return Pool(endpoints, OutlierPolicy(base_ejection_time=10), clock, notify=told)


def test_it_tells_who_is_ejected_and_who_answers_again() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock, told = Times(), _Told()
    pool = _telling_pool(3, clock, told)
    failing(pool, 0, error, times=4)
    failing(pool, 1, None)
    assert told.all == []
    failing(pool, 0, error)
    assert told.all == [("http://0", 1, 10)]
    clock.now = 10
    failing(pool, 0, error)
    clock.now = 30
    failing(pool, 0, None, times=2)
    assert told.all[1:] == [("http://0", 2, 30), ("http://0", 0, 0)]


def test_what_is_used_as_there_is_no_better_one_is_not_told_to_be_well() -> None:
    error = GatewayError(ErrorKind.UNREACHABLE, "")
    clock, told = Times(), _Told()
    pool = _telling_pool(2, clock, told)
    failing(pool, 0, error, times=5)
    pool.members[1].ejection = EjectionState(5, 1, 99)
    clock.now = 10
    failing(pool, 0, error)
    assert pool.members[0].ejection == EjectionState(6)
    assert told.all == [("http://0", 1, 10)]


def test_what_others_say_counts_and_is_not_told_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    clock, told = Times(), _Told()
    pool = _telling_pool(3, clock, told)
    ejected, well = EjectionState(ejections=1, until=10), EjectionState(until=3)
    for _ in range(2):
        pool.outlier_detector.record_remote(pool.members[0], ejected)
    assert set(used_by(pool)) == set("12")
    # No more than half of them, whoever says so.
    pool.outlier_detector.record_remote(pool.members[1], ejected)
    assert set(used_by(pool)) == set("12")
    for _ in range(2):
        pool.outlier_detector.record_remote(pool.members[0], well)
    assert set(used_by(pool)) == set("012")
    assert told.all == []
    assert caplog.messages == [
        "http://0: ejected, as another worker reports",
        "http://0: used again, as another worker reports",
    ]


def test_what_others_have_ejected_is_tried_here_when_its_time_is_over() -> None:
    clock, told = Times(), _Told()
    pool = _telling_pool(3, clock, told)
    pool.outlier_detector.record_remote(pool.members[0], EjectionState(ejections=1, until=10))
    clock.now = 10
    failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""))
    assert told.all == [("http://0", 2, 30)]
    assert set(used_by(pool)) == set("12")


def test_an_endpoint_that_is_alone_is_used_whatever_others_say() -> None:
    pool = pool_of(1)
    pool.outlier_detector.record_remote(pool.members[0], EjectionState(ejections=1, until=1e9))
    assert pool.members[0].ejection == NOT_EJECTED
    assert set(used_by(pool)) == {"0"}
