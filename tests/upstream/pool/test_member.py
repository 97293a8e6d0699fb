"""What is counted of the calls at each endpoint."""

import gc
import weakref
from contextlib import suppress

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.member import MemberState, Outcome
from gateway.upstream.pool.pool import Pool
from tests.upstream.pools import failing, pool_of

UNREACHABLE = GatewayError(ErrorKind.UNREACHABLE, "cannot connect to http://0: Connection refused")


def _state(pool: Pool) -> MemberState:
    return pool.snapshot()[0]


def _counts(pool: Pool) -> tuple[int, int, int]:
    state = _state(pool)
    return state.failures, state.failures_total, state.responses_5xx


def _answers(pool: Pool, status: int) -> None:
    """Have the first endpoint answer with a status."""
    loan = pool.lease(pool.endpoints[1:])
    loan.acquire()
    loan.release(*loan.classify_status(status))


@pytest.mark.parametrize("count", [1, 2])
def test_an_endpoints_failed_calls_are_counted_even_where_it_is_alone(count: int) -> None:
    pool = pool_of(count)
    failing(pool, 0, UNREACHABLE, times=2)
    assert _counts(pool) == (2, 2, 0)
    assert _state(pool).last_error == str(UNREACHABLE)
    assert (_state(pool).last_error_at or "").endswith("+00:00")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("status", [500, 503])
def test_responses_of_5xx_are_failed_calls_whether_they_eject_or_not(
    count: int, status: int
) -> None:
    pool = pool_of(count)
    for _ in range(3):
        _answers(pool, status)
    assert _counts(pool) == (3, 3, 3)
    assert _state(pool).last_error == f"it answered {status}"


@pytest.mark.parametrize("count", [1, 2])
def test_a_500_does_not_eject(count: int) -> None:
    pool = pool_of(count)
    for _ in range(20):
        _answers(pool, 500)
    assert _state(pool).ejections == 0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("status", [200, 404])
def test_a_good_response_ends_the_row_of_failed_calls(count: int, status: int) -> None:
    pool = pool_of(count)
    failing(pool, 0, UNREACHABLE)
    _answers(pool, 500)
    _answers(pool, status)
    assert _counts(pool) == (0, 2, 1)
    assert _state(pool).last_error == "it answered 500"


def test_an_endpoint_that_never_failed_has_no_last_error() -> None:
    pool = pool_of(1)
    _answers(pool, 200)
    failing(pool, 0, ConnectionError("the client left"))
    assert _counts(pool) == (0, 0, 0)
    assert (_state(pool).last_error, _state(pool).last_error_at) == (None, None)


@pytest.mark.parametrize("count", [1, 2])
def test_a_client_that_leaves_within_a_response_of_5xx_does_not_hide_it(count: int) -> None:
    pool = pool_of(count)
    loan = pool.lease(pool.endpoints[1:])
    loan.acquire()
    loan.classify_status(500)
    loan.release(Outcome.UNKNOWN, "the client left")
    assert _counts(pool) == (1, 1, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_response_that_breaks_off_is_one_failed_call_whatever_its_status(count: int) -> None:
    pool = pool_of(count)
    loan = pool.lease(pool.endpoints[1:])
    loan.acquire()
    loan.classify_status(500)
    loan.finish(GatewayError(ErrorKind.BAD_RESPONSE, "it closed the connection"))
    assert _counts(pool) == (1, 1, 1)
    assert _state(pool).last_error == "it closed the connection"


def test_a_response_for_which_another_endpoint_is_asked_is_counted() -> None:
    pool = pool_of(2)
    loan = pool.lease(pool.endpoints[1:])
    loan.acquire()
    loan.release(*loan.classify_retried(500))
    assert _counts(pool) == (1, 1, 1)
    assert pool.members[0].ejection.failures == 1


@pytest.mark.parametrize(("status", "counts"), [(500, (1, 1, 1)), (404, (0, 0, 0))])
def test_a_refusal_of_metadata_is_counted_by_its_status(
    status: int, counts: tuple[int, int, int]
) -> None:
    pool = pool_of(1)
    loan = pool.lease()
    loan.acquire()
    loan.finish(UpstreamResponseError(status, "application/json", b"{}"))
    assert _counts(pool) == counts


def test_a_long_error_is_stored_in_part() -> None:
    pool = pool_of(1)
    failing(pool, 0, GatewayError(ErrorKind.BAD_RESPONSE, "x" * 10_000))
    assert _state(pool).last_error == "x" * 300


class _Body:
    """A request's body, in a frame that an error passes."""


def test_no_error_is_stored_with_the_frames_that_it_passed() -> None:
    pool = pool_of(1)

    def call() -> "weakref.ref[_Body]":
        body = _Body()
        with suppress(GatewayError), pool.lease():
            raise GatewayError(ErrorKind.BAD_RESPONSE, f"{body!r} was not answered")
        return weakref.ref(body)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
    assert "was not answered" in (_state(pool).last_error or "")


def test_a_pool_that_replaces_another_goes_on_counting() -> None:
    before, after = pool_of(2), pool_of(2)
    failing(before, 0, UNREACHABLE, times=2)
    after.adopt_state(before)
    assert _counts(after) == (2, 2, 0)
