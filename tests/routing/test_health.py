from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.health import (
    NOT_EJECTED,
    NOT_PROBED,
    EjectionState,
    HealthCheckPolicy,
    OutlierPolicy,
    ProbeState,
    failed,
    left,
    probed,
    record_remote_ejection,
    record_remote_recovery,
    succeeded,
    taken,
)

POLICY = OutlierPolicy(failures=3, time=10, longest=35, most=0.5)
EJECTED = EjectionState(failures=3, ejections=1, until=110)
ON_TRIAL = replace(EJECTED, on_trial=True)


@pytest.mark.parametrize(
    ("before", "others", "after"),
    [
        (NOT_EJECTED, [NOT_EJECTED], EjectionState(1)),
        (EjectionState(1), [NOT_EJECTED], EjectionState(2)),
        (EjectionState(2), [NOT_EJECTED], EjectionState(3, 1, 110)),
        (EjectionState(2), [NOT_EJECTED] * 2, EjectionState(3, 1, 110)),
        (EjectionState(7), [NOT_EJECTED], EjectionState(8, 1, 110)),
        # Not more than the share: of one alone, none; of two or three, one; of four, two.
        (EjectionState(2), [], EjectionState(3)),
        (EjectionState(2), [EJECTED], EjectionState(3)),
        (EjectionState(2), [EJECTED, NOT_EJECTED], EjectionState(3)),
        (EjectionState(2), [EJECTED, NOT_EJECTED, NOT_EJECTED], EjectionState(3, 1, 110)),
        (EjectionState(2), [EJECTED, EJECTED, NOT_EJECTED], EjectionState(3)),
        # What fails on trial is ejected for twice as long, up to the longest time.
        (ON_TRIAL, [NOT_EJECTED], EjectionState(4, 2, 120)),
        (replace(ON_TRIAL, ejections=2), [NOT_EJECTED], EjectionState(4, 3, 135)),
        (replace(ON_TRIAL, ejections=9999), [NOT_EJECTED], EjectionState(4, 10_000, 135)),
        (ON_TRIAL, [EJECTED], EjectionState(4)),
        # An exchange that began before the ejection, and fails behind it.
        (EJECTED, [NOT_EJECTED], replace(EJECTED, failures=4)),
    ],
)
def test_failures(before: EjectionState, others: list[EjectionState], after: EjectionState) -> None:
    assert failed(before, others, 100, POLICY) == after


def test_nobody_is_ejected_where_that_is_off() -> None:
    policy = replace(POLICY, failures=0)
    health = NOT_EJECTED
    for _ in range(1000):
        health = failed(health, [NOT_EJECTED], 100, policy)
    assert health == EjectionState(1000)
    assert health.is_usable(100)


@pytest.mark.parametrize(("most", "ejected"), [(0.0, 0), (0.33, 1), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_how_many_may_be_ejected(most: float, ejected: int) -> None:
    policy = replace(POLICY, most=most)
    states = [EjectionState(2)] * 4
    for index, state in enumerate(states):
        others = states[:index] + states[index + 1 :]
        states[index] = failed(state, others, 100, policy)
    assert sum(state.ejections for state in states) == ejected


@pytest.mark.parametrize(
    ("health", "now", "usable"),
    [
        (NOT_EJECTED, 0, True),
        (EjectionState(99), 0, True),
        (EJECTED, 109.9, False),
        (EJECTED, 110, True),
        (ON_TRIAL, 110, False),
    ],
)
def test_which_are_used(health: EjectionState, now: float, usable: bool) -> None:
    assert health.is_usable(now) is usable


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        (NOT_EJECTED, 110, NOT_EJECTED),
        (EjectionState(2), 110, EjectionState(2)),
        (EJECTED, 109.9, EJECTED),
        (EJECTED, 110, ON_TRIAL),
    ],
)
def test_an_exchange_goes_there(before: EjectionState, now: float, after: EjectionState) -> None:
    assert taken(before, now) == after
    assert left(after) == before


def test_what_fails_during_an_ejection_is_no_trial() -> None:
    """Exchanges come all the same, where the other endpoints have failed them too."""
    health = EJECTED
    for now in range(100, 110):
        health = failed(taken(health, now), [NOT_EJECTED], now, POLICY)
    assert health == replace(EJECTED, failures=13)
    assert failed(taken(health, 110), [NOT_EJECTED], 110, POLICY) == EjectionState(14, 2, 130)


TOLD = EjectionState(ejections=2, until=120)


@pytest.mark.parametrize(
    ("before", "told", "others", "after"),
    [
        (NOT_EJECTED, TOLD, [NOT_EJECTED], TOLD),
        # What failed here is still known.
        (EjectionState(2), TOLD, [NOT_EJECTED], EjectionState(2, 2, 120)),
        # What is over is no news.
        (NOT_EJECTED, replace(TOLD, until=100), [NOT_EJECTED], NOT_EJECTED),
        (ON_TRIAL, replace(TOLD, until=100), [NOT_EJECTED], ON_TRIAL),
        # Not more than the share.
        (NOT_EJECTED, TOLD, [], NOT_EJECTED),
        (EjectionState(2), TOLD, [EJECTED], EjectionState(2)),
        (NOT_EJECTED, TOLD, [EJECTED, NOT_EJECTED], NOT_EJECTED),
        (NOT_EJECTED, TOLD, [EJECTED, NOT_EJECTED, NOT_EJECTED], TOLD),
        # One that is left out here too: what ends later holds, and never fewer ejections.
        (EJECTED, TOLD, [NOT_EJECTED], EjectionState(3, 2, 120)),
        (EJECTED, TOLD, [EJECTED], EjectionState(3, 2, 120)),
        (EJECTED, replace(TOLD, until=110), [NOT_EJECTED], EJECTED),
        (EJECTED, replace(TOLD, until=109), [NOT_EJECTED], EJECTED),
        (replace(EJECTED, ejections=3), TOLD, [NOT_EJECTED], EjectionState(3, 3, 120)),
        (replace(ON_TRIAL, until=99), TOLD, [NOT_EJECTED], EjectionState(3, 2, 120)),
    ],
)
def test_another_process_has_ejected_it(
    before: EjectionState, told: EjectionState, others: list[EjectionState], after: EjectionState
) -> None:
    assert record_remote_ejection(before, told, others, 100, POLICY) == after


def test_nothing_is_ejected_on_hearsay_where_that_is_off() -> None:
    policy = replace(POLICY, failures=0)
    assert record_remote_ejection(NOT_EJECTED, TOLD, [NOT_EJECTED], 100, policy) == NOT_EJECTED


def test_a_trial_that_fails_here_and_elsewhere_counts_once() -> None:
    on_trial = replace(EJECTED, until=99, on_trial=True)
    heard = record_remote_ejection(on_trial, TOLD, [NOT_EJECTED], 100, POLICY)
    assert failed(heard, [NOT_EJECTED], 101, POLICY) == EjectionState(4, 2, 120)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NOT_EJECTED, NOT_EJECTED),
        (EjectionState(2), EjectionState(2)),
        (EJECTED, NOT_EJECTED),
        (ON_TRIAL, NOT_EJECTED),
    ],
)
def test_it_answers_another_process(before: EjectionState, after: EjectionState) -> None:
    assert record_remote_recovery(before) == after


@pytest.mark.parametrize("before", [NOT_EJECTED, EjectionState(2), EJECTED, ON_TRIAL])
def test_an_answer_makes_it_healthy(before: EjectionState) -> None:
    assert succeeded(before) == NOT_EJECTED


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=200))
def test_some_can_always_be_used(count: int, happenings: list[tuple[int, bool]]) -> None:
    states = [NOT_EJECTED] * count
    for now, (number, well) in enumerate(happenings):
        index = number % count
        if not states[index].is_usable(now):
            continue
        state = taken(states[index], now)
        others = states[:index] + states[index + 1 :]
        states[index] = succeeded(state) if well else failed(state, others, now, POLICY)
        ejected = sum(state.ejections > 0 for state in states)
        assert ejected <= count / 2


@pytest.mark.parametrize(
    ("policy", "probes", "states"),
    [
        # The first one decides alone.
        (HealthCheckPolicy(3, 3), "+", "+"),
        (HealthCheckPolicy(3, 3), "-", "-"),
        (HealthCheckPolicy(1, 2), "+-+-+--+", "++++++-+"),
        (HealthCheckPolicy(1, 1), "+-+--+", "+-+--+"),
        # What speaks for it ends the row of those against.
        (HealthCheckPolicy(2, 3), "+--+---+-++", "++++++----+"),
        (HealthCheckPolicy(3, 1), "-++-+++", "------+"),
        (HealthCheckPolicy(3, 1), "-++++-", "---++-"),
    ],
)
def test_probes(policy: HealthCheckPolicy, probes: str, states: str) -> None:
    state, seen = NOT_PROBED, ""
    assert state.healthy is None
    for probe in probes:
        state = probed(state, probe == "+", policy)
        seen += "+" if state.healthy else "-"
    assert seen == states


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.booleans(), max_size=50))
def test_probes_change_a_state_by_a_row_of_the_same(
    healthy: int, unhealthy: int, probes: list[bool]
) -> None:
    state = NOT_PROBED
    for index, well in enumerate(probes):
        before, state = state, probed(state, well, HealthCheckPolicy(healthy, unhealthy))
        if before.healthy not in (None, state.healthy):
            needed = healthy if state.healthy else unhealthy
            assert probes[: index + 1][-needed:] == [state.healthy] * needed
            assert state == ProbeState(state.healthy)
