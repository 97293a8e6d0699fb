"""Endpoints that respond to no call, though calls usually take much less time."""

from __future__ import annotations

import pytest

from gateway.routing.silence import Silence, SilentEndpoints, UsualLatency

SERIES = ("u", "http://h:1", "m")
ENDPOINT = SERIES[:2]
FAST = UsualLatency(100, 0.002, 125.0)


class _Watched:
    """One endpoint, which is looked at every second."""

    def __init__(self, usual: UsualLatency | None = FAST) -> None:
        self.now = 1000.0
        self.responded_at = self.now
        self.usual = usual
        self._silent = SilentEndpoints()

    def look(self, waits_since: float | None) -> Silence | None:
        self.now += 1
        waiting = {} if waits_since is None else {SERIES: waits_since}
        responded = {ENDPOINT: self.responded_at}
        found = self._silent.find(self.now, waiting, responded, lambda *_: self.usual)
        return found.get(ENDPOINT)

    def respond(self) -> None:
        self.responded_at = self.now + 1


def test_endpoint_is_silent_when_its_oldest_call_has_waited_for_five_seconds() -> None:
    watched = _Watched()
    found = [watched.look(1001.0) for _ in range(7)]
    assert found[:5] == [None] * 5
    for seconds in (5, 6):
        assert str(found[seconds]) == (
            f"no response for {seconds} s to calls of m;"
            " 99 % of them took at most 2 ms in the 2 min before"
        )


@pytest.mark.parametrize(
    ("calls", "p99", "silent_after"),
    [(100, 1.0, 5), (100, 2.0, 6), (100, 10.0, 30), (19, 1.0, 10), (3, 0.4, 5)],
)
def test_calls_must_wait_three_times_as_long_as_usual_and_ten_times_if_few_are_known(
    calls: float, p99: float, silent_after: int
) -> None:
    watched = _Watched(UsualLatency(calls, p99, 600.0))
    found = [watched.look(1000.0) is not None for _ in range(40)]
    assert found.index(True) + 1 == silent_after
    assert all(found[silent_after - 1 :])


def test_endpoint_of_which_nothing_is_known_is_not_silent() -> None:
    watched = _Watched(usual=None)
    assert not any(watched.look(1000.0) for _ in range(100))


def test_any_response_ends_the_silence_and_the_wait_begins_anew() -> None:
    watched = _Watched()
    assert [watched.look(1000.0) for _ in range(6)][-1]
    watched.respond()
    assert not any(watched.look(1000.0) for _ in range(5))
    assert watched.look(1000.0)


def test_long_call_beside_calls_that_get_responses_is_no_silence() -> None:
    watched = _Watched()
    for _ in range(100):
        watched.respond()
        assert watched.look(1000.0) is None


def test_endpoint_whose_clients_give_up_early_is_silent() -> None:
    """They wait for three seconds each, and are seen in the last two of these."""
    watched = _Watched()
    found = []
    for call in range(1000, 1024, 3):
        found += [watched.look(None), watched.look(float(call)), watched.look(float(call))]
    assert [silence is not None for silence in found] == [False] * 4 + [True] * 20


def test_silence_goes_on_for_a_minute_without_calls() -> None:
    watched = _Watched()
    assert [watched.look(1000.0) for _ in range(6)][-1]
    found = [watched.look(None) for _ in range(60)]
    assert str(found[0]).startswith("no response for 7 s to calls of m;")
    assert all(found[:59])
    assert found[59] is None


def test_usual_latency_of_all_endpoints_is_named_as_such() -> None:
    """It may be that of a shorter time than the silence: others respond meanwhile."""
    watched = _Watched(UsualLatency(100, 0.002, 36.0, is_own=False))
    found = [watched.look(1000.0) for _ in range(6)][-1]
    assert str(found) == (
        "no response for 6 s to calls of m;"
        " 99 % of them took at most 2 ms in the last 36 s, at all endpoints together"
    )
