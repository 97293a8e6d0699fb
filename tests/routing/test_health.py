from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.health import (
    HEALTHY,
    UNKNOWN,
    EjectionPolicy,
    Health,
    Probed,
    ProbePolicy,
    failed,
    heard_ejected,
    heard_well,
    left,
    probed,
    succeeded,
    taken,
)

POLICY = EjectionPolicy(failures=3, time=10, longest=35, most=0.5)
EJECTED = Health(failures=3, ejections=1, until=110)
ON_TRIAL = replace(EJECTED, on_trial=True)


@pytest.mark.parametrize(
    ("before", "others", "after"),
    [
        (HEALTHY, [HEALTHY], Health(1)),
        (Health(1), [HEALTHY], Health(2)),
        (Health(2), [HEALTHY], Health(3, 1, 110)),
        (Health(2), [HEALTHY] * 2, Health(3, 1, 110)),
        (Health(7), [HEALTHY], Health(8, 1, 110)),
        # Not more than the share: of one alone, none; of two or three, one; of four, two.
        (Health(2), [], Health(3)),
        (Health(2), [EJECTED], Health(3)),
        (Health(2), [EJECTED, HEALTHY], Health(3)),
        (Health(2), [EJECTED, HEALTHY, HEALTHY], Health(3, 1, 110)),
        (Health(2), [EJECTED, EJECTED, HEALTHY], Health(3)),
        # What fails on trial is ejected for twice as long, up to the longest time.
        (ON_TRIAL, [HEALTHY], Health(4, 2, 120)),
        (replace(ON_TRIAL, ejections=2), [HEALTHY], Health(4, 3, 135)),
        (replace(ON_TRIAL, ejections=9999), [HEALTHY], Health(4, 10_000, 135)),
        (ON_TRIAL, [EJECTED], Health(4)),
        # An exchange that began before the ejection, and fails behind it.
        (EJECTED, [HEALTHY], replace(EJECTED, failures=4)),
    ],
)
def test_failures(before: Health, others: list[Health], after: Health) -> None:
    assert failed(before, others, 100, POLICY) == after


def test_nobody_is_ejected_where_that_is_off() -> None:
    policy = replace(POLICY, failures=0)
    health = HEALTHY
    for _ in range(1000):
        health = failed(health, [HEALTHY], 100, policy)
    assert health == Health(1000)
    assert health.is_usable(100)


@pytest.mark.parametrize(("most", "ejected"), [(0.0, 0), (0.33, 1), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_how_many_may_be_ejected(most: float, ejected: int) -> None:
    policy = replace(POLICY, most=most)
    states = [Health(2)] * 4
    for index, state in enumerate(states):
        others = states[:index] + states[index + 1 :]
        states[index] = failed(state, others, 100, policy)
    assert sum(state.ejections for state in states) == ejected


@pytest.mark.parametrize(
    ("health", "now", "usable"),
    [
        (HEALTHY, 0, True),
        (Health(99), 0, True),
        (EJECTED, 109.9, False),
        (EJECTED, 110, True),
        (ON_TRIAL, 110, False),
    ],
)
def test_which_are_used(health: Health, now: float, usable: bool) -> None:
    assert health.is_usable(now) is usable


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        (HEALTHY, 110, HEALTHY),
        (Health(2), 110, Health(2)),
        (EJECTED, 109.9, EJECTED),
        (EJECTED, 110, ON_TRIAL),
    ],
)
def test_an_exchange_goes_there(before: Health, now: float, after: Health) -> None:
    assert taken(before, now) == after
    assert left(after) == before


def test_what_fails_during_an_ejection_is_no_trial() -> None:
    """Exchanges come all the same, where the other endpoints have failed them too."""
    health = EJECTED
    for now in range(100, 110):
        health = failed(taken(health, now), [HEALTHY], now, POLICY)
    assert health == replace(EJECTED, failures=13)
    assert failed(taken(health, 110), [HEALTHY], 110, POLICY) == Health(14, 2, 130)


TOLD = Health(ejections=2, until=120)


@pytest.mark.parametrize(
    ("before", "told", "others", "after"),
    [
        (HEALTHY, TOLD, [HEALTHY], TOLD),
        # What failed here is still known.
        (Health(2), TOLD, [HEALTHY], Health(2, 2, 120)),
        # What is over is no news.
        (HEALTHY, replace(TOLD, until=100), [HEALTHY], HEALTHY),
        (ON_TRIAL, replace(TOLD, until=100), [HEALTHY], ON_TRIAL),
        # Not more than the share.
        (HEALTHY, TOLD, [], HEALTHY),
        (Health(2), TOLD, [EJECTED], Health(2)),
        (HEALTHY, TOLD, [EJECTED, HEALTHY], HEALTHY),
        (HEALTHY, TOLD, [EJECTED, HEALTHY, HEALTHY], TOLD),
        # One that is left out here too: what ends later holds, and never fewer ejections.
        (EJECTED, TOLD, [HEALTHY], Health(3, 2, 120)),
        (EJECTED, TOLD, [EJECTED], Health(3, 2, 120)),
        (EJECTED, replace(TOLD, until=110), [HEALTHY], EJECTED),
        (EJECTED, replace(TOLD, until=109), [HEALTHY], EJECTED),
        (replace(EJECTED, ejections=3), TOLD, [HEALTHY], Health(3, 3, 120)),
        (replace(ON_TRIAL, until=99), TOLD, [HEALTHY], Health(3, 2, 120)),
    ],
)
def test_another_process_has_ejected_it(
    before: Health, told: Health, others: list[Health], after: Health
) -> None:
    assert heard_ejected(before, told, others, 100, POLICY) == after


def test_nothing_is_ejected_on_hearsay_where_that_is_off() -> None:
    policy = replace(POLICY, failures=0)
    assert heard_ejected(HEALTHY, TOLD, [HEALTHY], 100, policy) == HEALTHY


def test_a_trial_that_fails_here_and_elsewhere_counts_once() -> None:
    on_trial = replace(EJECTED, until=99, on_trial=True)
    heard = heard_ejected(on_trial, TOLD, [HEALTHY], 100, POLICY)
    assert failed(heard, [HEALTHY], 101, POLICY) == Health(4, 2, 120)


@pytest.mark.parametrize(
    ("before", "after"),
    [(HEALTHY, HEALTHY), (Health(2), Health(2)), (EJECTED, HEALTHY), (ON_TRIAL, HEALTHY)],
)
def test_it_answers_another_process(before: Health, after: Health) -> None:
    assert heard_well(before) == after


@pytest.mark.parametrize("before", [HEALTHY, Health(2), EJECTED, ON_TRIAL])
def test_an_answer_makes_it_healthy(before: Health) -> None:
    assert succeeded(before) == HEALTHY


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=200))
def test_some_can_always_be_used(count: int, happenings: list[tuple[int, bool]]) -> None:
    states = [HEALTHY] * count
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
        (ProbePolicy(3, 3), "+", "+"),
        (ProbePolicy(3, 3), "-", "-"),
        (ProbePolicy(1, 2), "+-+-+--+", "++++++-+"),
        (ProbePolicy(1, 1), "+-+--+", "+-+--+"),
        # What speaks for it ends the row of those against.
        (ProbePolicy(2, 3), "+--+---+-++", "++++++----+"),
        (ProbePolicy(3, 1), "-++-+++", "------+"),
        (ProbePolicy(3, 1), "-++++-", "---++-"),
    ],
)
def test_probes(policy: ProbePolicy, probes: str, states: str) -> None:
    state, seen = UNKNOWN, ""
    assert state.healthy is None
    for probe in probes:
        state = probed(state, probe == "+", policy)
        seen += "+" if state.healthy else "-"
    assert seen == states


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.booleans(), max_size=50))
def test_probes_change_a_state_by_a_row_of_the_same(
    healthy: int, unhealthy: int, probes: list[bool]
) -> None:
    state = UNKNOWN
    for index, well in enumerate(probes):
        before, state = state, probed(state, well, ProbePolicy(healthy, unhealthy))
        if before.healthy not in (None, state.healthy):
            needed = healthy if state.healthy else unhealthy
            assert probes[: index + 1][-needed:] == [state.healthy] * needed
            assert state == Probed(state.healthy)
