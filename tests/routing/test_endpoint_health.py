"""The health of an endpoint, and its state and sentence as an operator reads them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.endpoint_health import (
    NOT_EJECTED,
    NOT_PROBED,
    EjectionState,
    HealthCheckPolicy,
    OutlierPolicy,
    ProbeState,
    record_failure,
    record_inconclusive,
    record_probe,
    record_remote_ejection,
    record_remote_recovery,
    record_request,
    record_success,
)
from gateway.routing.endpoint_state import CallStats, EndpointRecord, RecentCalls, State

POLICY = OutlierPolicy(
    consecutive_failures=3, base_ejection_time=10, max_ejection_time=35, max_ejection_share=0.5
)
EJECTED = EjectionState(failures=3, ejections=1, until=110)
ON_TRIAL = replace(EJECTED, on_trial=True)


@pytest.mark.parametrize(
    ("before", "others", "after"),
    [
        (NOT_EJECTED, [NOT_EJECTED], EjectionState(1)),
        (EjectionState(2), [NOT_EJECTED], EjectionState(3, 1, 110)),
        # Not more than the share: 0 of 1, 1 of 2 or 3, 2 of 4.
        (EjectionState(2), [], EjectionState(3)),
        (EjectionState(2), [EJECTED, NOT_EJECTED], EjectionState(3)),
        (EjectionState(2), [EJECTED, NOT_EJECTED, NOT_EJECTED], EjectionState(3, 1, 110)),
        # A failed trial doubles the ejection, up to the maximum.
        (ON_TRIAL, [NOT_EJECTED], EjectionState(4, 2, 120)),
        (replace(ON_TRIAL, ejections=9999), [NOT_EJECTED], EjectionState(4, 10_000, 135)),
        (ON_TRIAL, [EJECTED], EjectionState(4)),
        # A call from before the ejection fails after it.
        (EJECTED, [NOT_EJECTED], replace(EJECTED, failures=4)),
    ],
)
def test_failures_in_a_row_eject_an_endpoint(
    before: EjectionState, others: list[EjectionState], after: EjectionState
) -> None:
    assert record_failure(before, others, 100, POLICY) == after


def test_threshold_of_0_turns_ejection_off() -> None:
    policy = replace(POLICY, consecutive_failures=0)
    state = NOT_EJECTED
    for _ in range(1000):
        state = record_failure(state, [NOT_EJECTED], 100, policy)
    assert state == EjectionState(1000)
    assert state.is_usable(100)


@pytest.mark.parametrize(
    ("state", "now", "usable"),
    [(NOT_EJECTED, 0, True), (EJECTED, 109.9, False), (EJECTED, 110, True), (ON_TRIAL, 110, False)],
)
def test_ejected_endpoint_gets_one_trial_request(
    state: EjectionState, now: float, usable: bool
) -> None:
    assert state.is_usable(now) is usable


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        (EjectionState(2), 110, EjectionState(2)),
        (EJECTED, 109.9, EJECTED),
        (EJECTED, 110, ON_TRIAL),
    ],
)
def test_first_request_after_an_ejection_is_a_trial(
    before: EjectionState, now: float, after: EjectionState
) -> None:
    assert record_request(before, now) == after
    assert record_inconclusive(after) == before


REMOTE = EjectionState(ejections=2, until=120)


@pytest.mark.parametrize(
    ("before", "remote", "others", "after"),
    [
        (NOT_EJECTED, REMOTE, [NOT_EJECTED], REMOTE),
        # Failures here still count.
        (EjectionState(2), REMOTE, [NOT_EJECTED], EjectionState(2, 2, 120)),
        # An ejection that is over is ignored.
        (NOT_EJECTED, replace(REMOTE, until=100), [NOT_EJECTED], NOT_EJECTED),
        # Not more than the share.
        (NOT_EJECTED, REMOTE, [EJECTED, NOT_EJECTED], NOT_EJECTED),
        (NOT_EJECTED, REMOTE, [EJECTED, NOT_EJECTED, NOT_EJECTED], REMOTE),
        # Ejected here, too: the later end and the higher number of ejections count.
        (EJECTED, REMOTE, [NOT_EJECTED], EjectionState(3, 2, 120)),
        (EJECTED, replace(REMOTE, until=109), [NOT_EJECTED], EJECTED),
        (replace(EJECTED, ejections=3), REMOTE, [NOT_EJECTED], EjectionState(3, 3, 120)),
        (replace(ON_TRIAL, until=99), REMOTE, [NOT_EJECTED], EjectionState(3, 2, 120)),
    ],
)
def test_ejection_by_another_worker_is_adopted(
    before: EjectionState, remote: EjectionState, others: list[EjectionState], after: EjectionState
) -> None:
    assert record_remote_ejection(before, remote, others, 100, POLICY) == after


def test_ejection_by_another_worker_is_ignored_if_ejection_is_off() -> None:
    policy = replace(POLICY, consecutive_failures=0)
    assert record_remote_ejection(NOT_EJECTED, REMOTE, [NOT_EJECTED], 100, policy) == NOT_EJECTED


def test_trial_that_fails_in_two_workers_counts_once() -> None:
    on_trial = replace(EJECTED, until=99, on_trial=True)
    heard = record_remote_ejection(on_trial, REMOTE, [NOT_EJECTED], 100, POLICY)
    assert record_failure(heard, [NOT_EJECTED], 101, POLICY) == EjectionState(4, 2, 120)


@pytest.mark.parametrize(
    ("before", "after"), [(EjectionState(2), EjectionState(2)), (EJECTED, NOT_EJECTED)]
)
def test_recovery_in_another_worker_ends_an_ejection(
    before: EjectionState, after: EjectionState
) -> None:
    assert record_remote_recovery(before) == after


@pytest.mark.parametrize("before", [EjectionState(2), ON_TRIAL])
def test_success_ends_an_ejection(before: EjectionState) -> None:
    assert record_success(before) == NOT_EJECTED


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=200))
def test_ejections_never_exceed_their_share(count: int, events: list[tuple[int, bool]]) -> None:
    states = [NOT_EJECTED] * count
    for now, (number, success) in enumerate(events):
        index = number % count
        if not states[index].is_usable(now):
            continue
        state = record_request(states[index], now)
        others = states[:index] + states[index + 1 :]
        states[index] = (
            record_success(state) if success else record_failure(state, others, now, POLICY)
        )
        ejected = sum(state.ejections > 0 for state in states)
        assert ejected <= count / 2


@pytest.mark.parametrize(
    ("policy", "probes", "states"),
    [
        # The first check decides alone.
        (HealthCheckPolicy(3, 3), "+", "+"),
        (HealthCheckPolicy(3, 3), "-", "-"),
        (HealthCheckPolicy(1, 2), "+-+-+--+", "++++++-+"),
        # A check that agrees ends the row of contrary ones.
        (HealthCheckPolicy(2, 3), "+--+---+-++", "++++++----+"),
        (HealthCheckPolicy(3, 1), "-++-+++", "------+"),
    ],
)
def test_health_checks_change_health_at_their_threshold(
    policy: HealthCheckPolicy, probes: str, states: str
) -> None:
    state, seen = NOT_PROBED, ""
    assert state.healthy is None
    for probe in probes:
        state = record_probe(state, probe == "+", policy)
        seen += "+" if state.healthy else "-"
    assert seen == states


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


def test_record_notes_since_when_its_state_holds_and_when_it_recovered() -> None:
    record = EndpointRecord(since=1.0)
    for _ in range(3):
        record.calls.record_failure(REFUSED, True)
    record.find_state(NOW)
    since = record.since
    assert (record.current, since > 1.0, record.recovered_at) == (State.UNREACHABLE, True, 0.0)
    record.find_state(NOW)
    assert record.since == since
    record.calls.record_failure("it returned 500", False)
    assert (record.calls.failures, record.calls.connect_failures) == (4, 0)
    record.calls.record_success()
    record.find_state(NOW)
    assert record.current is State.IN_USE
    assert record.recovered_at == record.since > since
