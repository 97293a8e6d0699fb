"""What an operator reads of an endpoint: one state, and one sentence."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.routing.endpoint_health import EjectionState, ProbeState
from gateway.routing.endpoint_state import CallStats, EndpointRecord, RecentCalls, State

REFUSED = "cannot connect to http://h:1: Connection refused"
REFUSING = CallStats(3, 3, 3, REFUSED, 100.0)
REFUSING_ONCE = CallStats(1, 1, 1, REFUSED, 100.0)
SLOW = "its calls of m take 2 s (median of the last 6 s), and 2 ms at the other endpoints"
SILENT = "no response for 6 s to calls of m; 99 % of them took at most 2 ms in the 2 min before"
HALF = RecentCalls(calls=20, failures=10, seconds=10, succeeded_at=100)
NOW = 50.0


def _ejected(seconds: float) -> EjectionState:
    return EjectionState(ejections=1, until=NOW + seconds)


def _state(before: State = State.IN_USE, **fields: Any) -> tuple[State, str]:
    record = EndpointRecord(current=before, **fields)
    sentence = record.find_state(NOW)
    return record.current, sentence


@pytest.mark.parametrize(
    ("fields", "state", "sentence"),
    [
        ({}, State.IN_USE, ""),
        ({"calls": REFUSING_ONCE}, State.IN_USE, f"1 failure in a row: {REFUSED}"),
        ({"calls": REFUSING}, State.UNREACHABLE, f"3 failures in a row: {REFUSED}"),
        (
            {"calls": replace(REFUSING, connect_failures=2)},
            State.FAILING,
            f"3 failures in a row: {REFUSED}",
        ),
        (
            {"recent": HALF, "calls": CallStats(last_error="it returned 500")},
            State.FAILING,
            "10 of its 20 calls of the last 10 s failed; last error: it returned 500",
        ),
        ({"recent": replace(HALF, silence=SILENT), "outlier": SLOW}, State.FAILING, SILENT),
        ({"outlier": SLOW}, State.SLOW, SLOW),
        (
            {"probed": ProbeState(False), "reason": "GET / returned 503"},
            State.UNHEALTHY,
            "its health check fails: GET / returned 503",
        ),
        (
            {"calls": REFUSING, "ejection": _ejected(29.6)},
            State.EJECTED,
            f"ejected for 30 s: 3 failures in a row: {REFUSED}",
        ),
        (
            {"ejection": _ejected(-1)},
            State.EJECTED,
            "ejected until a trial call succeeds: another worker has ejected it",
        ),
        (
            {"ejection": _ejected(5), "ejection_reason": SLOW, "calls": REFUSING_ONCE},
            State.EJECTED,
            f"ejected for 5 s: {SLOW}",
        ),
        (
            {"calls": REFUSING, "leaving": True},
            State.DRAINING,
            "its name does not lead there any more: calls in progress finish",
        ),
        (
            {"calls": REFUSING, "drained": True, "ejection": _ejected(5)},
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
    assert _state(calls=REFUSING, outlier=SLOW)[0] is State.UNREACHABLE
    assert _state(recent=HALF, outlier=SLOW)[0] is State.FAILING


def test_success_at_any_worker_ends_a_row_of_failures() -> None:
    after = RecentCalls(calls=50, failures=3, seconds=10, succeeded_at=101)
    assert _state(calls=REFUSING, recent=after)[0] is State.IN_USE
    before = replace(after, succeeded_at=99)
    assert _state(calls=REFUSING, recent=before)[0] is State.UNREACHABLE


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
    found = _state(before, recent=recent)[0]
    assert found is (State.FAILING if fails else State.IN_USE)


@pytest.mark.parametrize("before", [State.EJECTED, State.UNHEALTHY, State.UNREACHABLE])
def test_endpoint_that_recovers_is_not_failing_by_the_calls_of_before(before: State) -> None:
    recent = RecentCalls(calls=620, failures=403, seconds=10, succeeded_at=101, failed_at=99)
    assert _state(before, recent=recent)[0] is State.IN_USE
    assert _state(recent=recent, recovered_at=100.0)[0] is State.IN_USE
    fails_again = replace(recent, failed_at=100.0)
    assert _state(recent=fails_again, recovered_at=100.0)[0] is State.FAILING
    still_fails = _state(before, calls=REFUSING, recent=replace(recent, succeeded_at=98))
    assert still_fails[0] is State.UNREACHABLE
