from __future__ import annotations

from gateway.http2.flood_limits import RateLimit
from tests.support.doubles.clock import Clock


def count(limit: RateLimit) -> int:
    """Return how many events are allowed now."""
    found = 0
    while limit.spend():
        found += 1
        assert found < 10_000
    return found


def test_events_are_allowed_at_once_and_in_time_but_never_more_than_the_most() -> None:
    clock = Clock()
    assert count(RateLimit(5, 2, clock.time)) == 5
    limit = RateLimit(5, 2, clock.time)
    for _ in range(5):
        assert limit.spend()
    clock.now += 1.5
    assert count(limit) == 3
    clock.now += 1000
    assert count(limit) == 5


def test_limit_tells_when_it_is_kept_again() -> None:
    clock = Clock()
    limit = RateLimit(5, 2, clock.time)
    for _ in range(5):
        assert limit.spend()
    assert limit.excess() == 0.0
    for _ in range(3):
        assert not limit.spend()
    assert limit.excess() == 1.5
    clock.now += 1.0
    assert limit.excess() == 0.5
    clock.now += 10.0
    assert limit.excess() == 0.0


def test_events_can_be_earned() -> None:
    limit = RateLimit(5, 2, Clock().time)
    limit.earn(100)  # it has all
    for _ in range(5):
        assert limit.spend()
    limit.earn(1.5)
    limit.earn(1.5)
    assert count(limit) == 3
