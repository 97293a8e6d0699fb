from contextlib import suppress

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.routing.health import EjectionPolicy
from gateway.upstream.pool import Outcome, Pool
from tests.servers.doubles import Log, ScriptedEndpoint


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


def test_another_one_is_preferred_to_one_that_does_not_fail() -> None:
    pool = _pool(2)
    _failing(pool, 0, GatewayError(ErrorKind.UNREACHABLE, ""), times=5)
    one, two = pool.endpoints
    assert pool.endpoint([two]).endpoint is one
    assert pool.endpoint([one]).endpoint is two
    assert pool.endpoint([one, two]).endpoint in (one, two)


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


def _used(pool: Pool) -> str:
    """Give the endpoints that answer the next exchanges."""
    urls = []
    for _ in range(8):
        with pool.endpoint() as endpoint:
            urls.append(endpoint.url[-1])
    return "".join(urls)
