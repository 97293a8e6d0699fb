"""What an operator reads of an endpoint: one state, and one sentence."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.routing.endpoint_state import NO_CALLS, Facts, RecentCalls, State, find_state

WELL = Facts(
    drained=False,
    draining=False,
    ejection_seconds=None,
    ejection_reason="",
    health_check_failure=None,
    failures=0,
    connect_failures=0,
    last_error="",
    last_error_at=0.0,
    recovered_at=0.0,
    recent=NO_CALLS,
    slowness="",
)
REFUSED = "cannot connect to http://h:1: Connection refused"
REFUSING: dict[str, Any] = {
    "failures": 3,
    "connect_failures": 3,
    "last_error": REFUSED,
    "last_error_at": 100.0,
}
SLOW = "its calls of m take 2 s (median of the last 6 s), and 2 ms at the other endpoints"
SILENT = "no response for 6 s to calls of m; 99 % of them took at most 2 ms in the 2 min before"
HALF = RecentCalls(calls=20, failures=10, seconds=10, succeeded_at=100)


def _state(before: State = State.IN_USE, **fields: Any) -> tuple[State, str]:
    return find_state(replace(WELL, **fields), before)


@pytest.mark.parametrize(
    ("fields", "state", "sentence"),
    [
        ({}, State.IN_USE, ""),
        ({"failures": 1, "last_error": REFUSED}, State.IN_USE, f"1 failure in a row: {REFUSED}"),
        (REFUSING, State.UNREACHABLE, f"3 failures in a row: {REFUSED}"),
        ({**REFUSING, "connect_failures": 2}, State.FAILING, f"3 failures in a row: {REFUSED}"),
        (
            {"recent": HALF, "last_error": "it returned 500"},
            State.FAILING,
            "10 of its 20 calls of the last 10 s failed; last error: it returned 500",
        ),
        ({"recent": replace(HALF, silence=SILENT), "slowness": SLOW}, State.FAILING, SILENT),
        ({"slowness": SLOW}, State.SLOW, SLOW),
        (
            {"health_check_failure": "GET / returned 503"},
            State.UNHEALTHY,
            "its health check fails: GET / returned 503",
        ),
        (
            {**REFUSING, "ejection_seconds": 29.6},
            State.EJECTED,
            f"ejected for 30 s: 3 failures in a row: {REFUSED}",
        ),
        (
            {"ejection_seconds": 0.0},
            State.EJECTED,
            "ejected until a trial call succeeds: another worker has ejected it",
        ),
        (
            {"ejection_seconds": 5.0, "ejection_reason": SLOW, "failures": 1},
            State.EJECTED,
            f"ejected for 5 s: {SLOW}",
        ),
        (
            {**REFUSING, "draining": True},
            State.DRAINING,
            "its name does not lead there any more: calls in progress finish",
        ),
        (
            {**REFUSING, "drained": True, "ejection_seconds": 5.0},
            State.DRAINED,
            "taken out of use by an operator",
        ),
    ],
)
def test_endpoint_is_in_one_state_which_has_a_sentence(
    fields: dict[str, Any], state: State, sentence: str
) -> None:
    assert _state(**fields) == (state, sentence)


def test_what_fails_is_not_also_slow() -> None:
    assert _state(**REFUSING, slowness=SLOW)[0] is State.UNREACHABLE
    assert _state(recent=HALF, slowness=SLOW)[0] is State.FAILING


def test_success_at_any_worker_ends_a_row_of_failures() -> None:
    after = RecentCalls(calls=50, failures=3, seconds=10, succeeded_at=101)
    assert _state(**REFUSING, recent=after)[0] is State.IN_USE
    before = replace(after, succeeded_at=99)
    assert _state(**REFUSING, recent=before)[0] is State.UNREACHABLE


@pytest.mark.parametrize(
    ("calls", "failures", "was_failing", "fails"),
    [
        (3, 3, False, True),
        (100, 20, False, True),
        (100, 9, True, False),
        (10, 1, True, True),
    ],
)
def test_large_share_of_failures_is_failing_until_it_is_small(
    calls: float, failures: float, was_failing: bool, fails: bool
) -> None:
    recent = RecentCalls(calls, failures, 10)
    before = State.FAILING if was_failing else State.IN_USE
    found = _state(before, recent=recent, last_error_at=1.0)[0]
    assert found is (State.FAILING if fails else State.IN_USE)


@pytest.mark.parametrize("before", [State.EJECTED, State.UNHEALTHY, State.UNREACHABLE])
def test_endpoint_that_recovers_is_not_failing_by_the_calls_of_before(before: State) -> None:
    recent = RecentCalls(calls=620, failures=403, seconds=10, succeeded_at=101, failed_at=99)
    assert _state(before, recent=recent)[0] is State.IN_USE
    assert _state(recent=recent, recovered_at=100.0)[0] is State.IN_USE
    fails_again = replace(recent, failed_at=100.0)
    assert _state(recent=fails_again, recovered_at=100.0)[0] is State.FAILING
    still_fails = _state(before, **REFUSING, recent=replace(recent, succeeded_at=98))
    assert still_fails[0] is State.UNREACHABLE
