from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest import mock

import pytest

from gateway.system.timeout_queue import TimeoutQueue
from tests.support.doubles.clock import Clock
from tests.support.gateway import until

TIME = 4.0


class LoggingEntry:
    """Logs its name, and runs the test's function, when it times out."""

    def __init__(self, name: str, late: list[str]) -> None:
        self._name = name
        self._late = late
        self.then: Callable[[], object] = lambda: None

    def on_timeout(self) -> None:
        self._late.append(self._name)
        self.then()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> TimeoutQueue:
    with mock.patch("asyncio.get_running_loop", return_value=clock):
        return TimeoutQueue(TIME)


@pytest.fixture
def late() -> list[str]:
    """The names of the entries that have timed out."""
    return []


@pytest.fixture
def entries(late: list[str]) -> list[LoggingEntry]:
    return [LoggingEntry(name, late) for name in ("one", "two", "three")]


def test_each_entry_times_out_once_when_its_time_is_over(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry], late: list[str]
) -> None:
    for entry in entries:
        watch.add(entry)
        clock.advance(0.5)
        assert len(clock.pending) == 1
    clock.advance(TIME - 1.75)
    assert late == []
    clock.advance(0.25)
    assert late == ["one"]
    clock.advance(0.25)
    assert late == ["one"]
    clock.advance(0.25)
    assert late == ["one", "two"]
    clock.advance(0.5)
    assert late == ["one", "two", "three"]
    clock.advance(5 * TIME)
    assert late == ["one", "two", "three"]
    assert clock.pending == []


def test_delayed_timer_times_out_all_due_entries_in_order(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry], late: list[str]
) -> None:
    for entry in entries:
        watch.add(entry)
        clock.now += 0.25
    clock.advance(TIME - 0.25)
    assert late == ["one", "two", "three"]
    assert clock.pending == []


def test_entry_added_again_has_its_full_time(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry], late: list[str]
) -> None:
    watch.add(entries[0])
    clock.advance(TIME - 0.25)
    watch.remove(entries[0])
    watch.add(entries[0])
    clock.advance(TIME - 0.25)
    assert late == []
    clock.advance(0.25)
    assert late == ["one"]


def test_entry_added_during_a_timeout_shares_the_timer(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry], late: list[str]
) -> None:
    """The response to one timeout may start the next request."""
    entries[0].then = lambda: watch.add(entries[2])
    watch.add(entries[0])
    clock.advance(0.5)
    watch.add(entries[1])
    for seconds, count in ((TIME - 0.5, 1), (0.5, 2), (TIME - 0.5, 3)):
        clock.advance(seconds)
        assert late == ["one", "two", "three"][:count]
        assert len(clock.pending) == (count < 3)


def test_removed_entry_does_not_time_out(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry], late: list[str]
) -> None:
    watch.add(entries[0])
    clock.advance(1)
    for entry in entries[1:]:
        watch.add(entry)
    watch.remove(entries[0])
    watch.remove(entries[2])
    clock.advance(TIME - 0.25)
    assert late == []
    clock.advance(0.25)
    assert late == ["two"]


def test_entry_removed_during_a_timeout_does_not_time_out(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry], late: list[str]
) -> None:
    taken: list[float] = []
    entries[0].then = lambda: taken.extend(map(watch.remove, entries[:2]))
    for entry in entries:
        watch.add(entry)
    clock.advance(TIME)
    assert late == ["one", "three"]
    assert taken == [0, TIME]  # the first one has left the queue


def test_timer_of_an_empty_queue_does_nothing(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry], late: list[str]
) -> None:
    watch.add(entries[0])
    watch.remove(entries[0])
    clock.advance(TIME)
    assert (late, clock.pending) == ([], [])
    watch.add(entries[0])
    clock.advance(TIME)
    assert late == ["one"]


def test_remove_returns_the_elapsed_seconds(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry]
) -> None:
    one, two, unknown = entries
    watch.add(one)
    clock.advance(0.125)
    watch.add(two)
    clock.advance(0.25)
    assert [watch.remove(each) for each in (two, one, unknown)] == [0.25, 0.375, 0]
    watch.add(one)
    clock.advance(TIME)
    assert watch.remove(one) == 0


def test_closed_queue_times_out_nothing(
    watch: TimeoutQueue, clock: Clock, entries: list[LoggingEntry], late: list[str]
) -> None:
    watch.close()
    assert clock.timers == []
    for entry in entries:
        watch.add(entry)
    for _ in range(2):
        watch.close()
        assert clock.pending == []
    clock.advance(TIME)
    assert late == []


async def test_entries_keep_their_real_timer_after_an_error() -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: errors.append(context["exception"])
    )
    queue, late = TimeoutQueue(0.02), list[str]()
    failing, other = LoggingEntry("failing", late), LoggingEntry("other", late)
    failing.then = lambda: 1 // 0
    queue.add(failing)
    queue.add(other)
    await until(lambda: len(late) == 2)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    queue.add(other)
    await until(lambda: late == ["failing", "other", "other"])
    queue.close()
