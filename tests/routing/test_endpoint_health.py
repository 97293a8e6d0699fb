from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.endpoint_health import (
    NOT_EJECTED,
    NOT_PROBED,
    EjectionState,
    HealthCheckPolicy,
    OutlierPolicy,
    record_failure,
    record_inconclusive,
    record_probe,
    record_remote_ejection,
    record_remote_recovery,
    record_request,
    record_success,
)

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
