"""Endpoints that are slow beside their siblings, or beside their own last hour."""

from collections.abc import Sequence

import pytest

from gateway.routing.latency_outliers import (
    Latencies,
    Latency,
    ModelLatency,
    Outlier,
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
