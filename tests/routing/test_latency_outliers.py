"""Endpoints that are slow beside their siblings, or beside their own last hour."""

from collections.abc import Sequence

import pytest

from gateway.routing.latency_outliers import (
    Latencies,
    Latency,
    ModelLatency,
    Outlier,
    Silence,
    SilentEndpoints,
    UsualLatency,
    find_outliers,
)


def _latency(median: float, calls: float = 100, seconds: float = 6.0) -> dict[str, ModelLatency]:
    return {"m": ModelLatency([Latency(calls, median, seconds)])}


def find_outlier(
    own: Latencies, siblings: Sequence[Latencies], was_slow: bool, is_alone: bool
) -> Outlier | None:
    """Return how the first of several endpoints is an outlier."""
    others = {f"http://h:{number}": each for number, each in enumerate(siblings)}
    slow = {"http://own": "m"} if was_slow else {}
    return find_outliers({"http://own": own, **others}, slow, is_alone).get("http://own")


@pytest.mark.parametrize(
    ("own", "calls", "siblings", "is_slow"),
    [
        (2.0, 3, [0.002], True),
        (2.0, 2, [0.002], False),
        (0.101, 19, [0.002], False),
        (0.103, 19, [0.002], True),
        (0.0219, 100, [0.002], False),
        (0.0221, 100, [0.002], True),
        # Of two siblings that differ, the faster one counts.
        (2.0, 100, [2.0, 0.1], True),
        (2.0, 100, [], False),
    ],
)
def test_endpoint_is_slow_if_its_calls_take_three_times_as_long_as_elsewhere(
    own: float, calls: float, siblings: list[float], is_slow: bool
) -> None:
    found = find_outlier(_latency(own, calls), [_latency(each) for each in siblings], False, False)
    assert (found is not None) is is_slow


def test_slow_endpoint_stays_slow_until_it_is_clearly_faster() -> None:
    for own, is_slow in ((0.241, True), (0.239, False)):
        found = find_outlier(_latency(own, 5), [_latency(0.1)], True, False)
        assert (found is not None) is is_slow


def test_each_model_is_compared_with_itself() -> None:
    fast, slow = _latency(0.002)["m"], _latency(2.0)["m"]
    assert find_outlier({"large": slow}, [{"small": fast}], False, False) is None
    own = {"small": slow, "large": slow}
    found = find_outlier(own, [{"small": fast, "large": slow}], False, False)
    assert str(found) == (
        "its calls of small take 2 s (median of the last 6 s), and 2 ms at the other endpoints"
    )


def test_model_that_was_named_is_named_as_long_as_it_is_slow() -> None:
    """Of several slow models, another one may be the slowest at each look."""

    def named(slow: dict[str, str], one: float, other: float) -> str:
        own = {"one": _latency(one)["m"], "other": _latency(other)["m"]}
        sibling = dict.fromkeys(own, _latency(0.002)["m"])
        found = find_outliers({"http://own": own, "http://sibling": sibling}, slow, False)
        return found["http://own"].model

    assert named({}, 2.0, 1.9) == "one"
    assert named({"http://own": "one"}, 1.9, 2.0) == "one"
    assert named({"http://own": "one"}, 0.002, 2.0) == "other"


def test_endpoints_are_compared_in_the_shortest_time_of_which_both_have_calls() -> None:
    own = {"m": ModelLatency([Latency(9, 2.0, 6.0), Latency(9, 3.0, 15.0), Latency(9, 4.0, 60.0)])}
    sibling = {"m": ModelLatency([Latency(9, 0.002, 15.0), Latency(9, 0.001, 60.0)])}
    found = find_outlier(own, [sibling], False, False)
    assert str(found) == (
        "its calls of m take 3 s (median of the last 15 s), and 2 ms at the other endpoints"
    )


def test_calls_of_now_are_not_compared_with_those_of_a_minute_ago() -> None:
    """The load may have been another one."""
    new = {"m": ModelLatency([Latency(100, 2.0), Latency(100, 2.0, seconds=60)])}
    old = _latency(0.002, seconds=60)
    assert find_outlier(new, [old], False, False) is None
    assert find_outlier(_latency(2.0, seconds=60), [old], False, False)


def test_single_endpoint_is_compared_with_its_last_hour() -> None:
    now = {"m": ModelLatency([Latency(100, 0.5)], hour=Latency(2000, 0.1, 3720))}
    found = find_outlier(now, [], False, True)
    assert str(found) == (
        "its calls of m take 500 ms (median of the last 6 s), and 100 ms in the last 62 min"
    )
    assert find_outlier(_latency(0.5), [], False, True) is None
    # The past of one of several is no measure: all may have become slow, by their load.
    assert find_outlier(now, [], False, False) is None


# Endpoints that respond to no call, though calls usually take much less time

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
