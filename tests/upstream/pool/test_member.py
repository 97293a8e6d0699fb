"""The statistics of failed calls of an endpoint."""

import gc
import weakref
from contextlib import suppress

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.member import MemberState, Outcome
from gateway.upstream.pool.pool import Pool
from tests.upstream.pools import fail_calls, make_pool, used

UNREACHABLE = GatewayError(ErrorKind.UNREACHABLE, "cannot connect to http://0: Connection refused")


def _state(pool: Pool) -> MemberState:
    return pool.snapshot()[0]


def _counts(pool: Pool) -> tuple[int, int]:
    calls = pool.members[0].calls
    return calls.failures, calls.failures_total


def _answers(pool: Pool, status: int) -> None:
    """Make a call to which the first endpoint responds with a status."""
    lease = pool.lease(pool.endpoints[1:])
    lease.acquire()
    lease.release(*lease.classify_status(status))


@pytest.mark.parametrize("count", [1, 2])
def test_failed_calls_of_a_single_endpoint_are_counted(count: int) -> None:
    pool = make_pool(count)
    fail_calls(pool, 0, UNREACHABLE, times=2)
    assert _counts(pool) == (2, 2)
    assert _state(pool).last_error == str(UNREACHABLE)
    assert (_state(pool).last_error_at or "").endswith("+00:00")


@pytest.mark.parametrize("status", [500, 503])
def test_responses_of_5xx_count_as_failed_calls(status: int) -> None:
    pool = make_pool(1)
    for _ in range(3):
        _answers(pool, status)
    assert _counts(pool) == (3, 3)
    assert _state(pool).last_error == f"it returned {status}"


def test_500_does_not_eject() -> None:
    pool = make_pool(2)
    for _ in range(20):
        _answers(pool, 500)
    assert _state(pool).consecutive_ejections == 0


@pytest.mark.parametrize("status", [200, 404])
def test_success_ends_the_row_of_failed_calls(status: int) -> None:
    pool = make_pool(2)
    fail_calls(pool, 0, UNREACHABLE)
    _answers(pool, 500)
    _answers(pool, status)
    assert _counts(pool) == (0, 2)
    assert _state(pool).last_error == "it returned 500"


def test_endpoint_without_failures_has_no_last_error() -> None:
    pool = make_pool(1)
    _answers(pool, 200)
    fail_calls(pool, 0, ConnectionError("the client left"))
    assert _counts(pool) == (0, 0)
    assert (_state(pool).last_error, _state(pool).last_error_at) == (None, None)


def test_5xx_counts_although_the_client_leaves() -> None:
    pool = make_pool(2)
    lease = pool.lease(pool.endpoints[1:])
    lease.acquire()
    lease.classify_status(500)
    lease.release(Outcome.UNKNOWN, "the client left")
    assert _counts(pool) == (1, 1)


def test_response_that_is_cut_short_is_one_failed_call() -> None:
    pool = make_pool(2)
    lease = pool.lease(pool.endpoints[1:])
    lease.acquire()
    lease.classify_status(500)
    lease.finish(GatewayError(ErrorKind.BAD_RESPONSE, "it closed the connection"))
    assert _counts(pool) == (1, 1)
    assert _state(pool).last_error == "it closed the connection"


def test_retried_response_is_a_failed_call() -> None:
    pool = make_pool(2)
    lease = pool.lease(pool.endpoints[1:])
    lease.acquire()
    lease.release(*lease.classify_retried(500))
    assert _counts(pool) == (1, 1)
    assert pool.members[0].ejection.failures == 1


@pytest.mark.parametrize(("status", "counts"), [(500, (1, 1)), (404, (0, 0))])
def test_error_response_for_metadata_is_counted_by_its_status(
    status: int, counts: tuple[int, int]
) -> None:
    pool = make_pool(1)
    lease = pool.lease()
    lease.acquire()
    lease.finish(UpstreamResponseError(status, "application/json", b"{}"))
    assert _counts(pool) == counts


def test_long_error_is_cut() -> None:
    pool = make_pool(1)
    fail_calls(pool, 0, GatewayError(ErrorKind.BAD_RESPONSE, "x" * 10_000))
    assert _state(pool).last_error == "x" * 300


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


def test_new_pool_goes_on_counting() -> None:
    before, after = make_pool(2), make_pool(2)
    fail_calls(before, 0, UNREACHABLE, times=2)
    after.adopt_state(before)
    assert _counts(after) == (2, 2)
