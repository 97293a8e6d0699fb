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

    def __init__(
        self, name: str, late: list[str], then: Callable[[], object] = lambda: None
    ) -> None:
        self._name = name
        self._late = late
        self.then = then

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


def test_empty_queue_has_no_timer(watch: TimeoutQueue, clock: Clock) -> None:
    watch.close()
    assert clock.timers == []


def test_on_timeout_is_called_when_the_time_is_over(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    watch.add(LoggingEntry("one", late))
    clock.advance(TIME - 0.25)
    assert late == []
    clock.advance(0.25)
    assert late == ["one"]


def test_first_entry_times_out_first(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    for name in ("one", "two", "three"):
        watch.add(LoggingEntry(name, late))
        clock.advance(0.5)
    clock.advance(TIME - 1.5)
    assert late == ["one"]
    clock.advance(0.25)
    assert late == ["one"]
    clock.advance(0.25)
    assert late == ["one", "two"]
    clock.advance(0.5)
    assert late == ["one", "two", "three"]


def test_entries_due_together_time_out_in_order(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    for name in ("one", "two", "three"):
        watch.add(LoggingEntry(name, late))
    clock.advance(TIME)
    assert late == ["one", "two", "three"]


def test_delayed_timer_times_out_all_due_entries(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    for name in ("one", "two", "three"):
        watch.add(LoggingEntry(name, late))
        clock.now += 0.25
    clock.advance(TIME - 0.25)
    assert late == ["one", "two", "three"]
    assert clock.pending == []


def test_on_timeout_is_called_once(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    watch.add(LoggingEntry("one", late))
    for _ in range(5):
        clock.advance(TIME)
    assert late == ["one"]


def test_entry_added_again_has_its_full_time(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    one = LoggingEntry("one", late)
    watch.add(one)
    clock.advance(TIME - 0.25)
    watch.remove(one)
    watch.add(one)
    clock.advance(TIME - 0.25)
    assert late == []
    clock.advance(0.25)
    assert late == ["one"]


def test_all_entries_share_one_timer(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    for number in range(40):
        watch.add(LoggingEntry(str(number), late))
        clock.advance(TIME / 8)
        assert len(clock.pending) == 1
    clock.advance(TIME)
    assert late == [str(number) for number in range(40)]
    assert clock.pending == []


def test_entry_added_during_a_timeout_shares_the_timer(watch: TimeoutQueue, clock: Clock) -> None:
    """The response to one timeout may start the next request."""
    late: list[str] = []
    one, two, three = [LoggingEntry(name, late) for name in ("one", "two", "three")]
    one.then = lambda: watch.add(three)
    watch.add(one)
    clock.advance(0.5)
    watch.add(two)
    clock.advance(TIME - 0.5)
    assert late == ["one"]
    assert len(clock.pending) == 1
    clock.advance(0.5)
    assert late == ["one", "two"]
    assert len(clock.pending) == 1
    clock.advance(TIME - 0.5)
    assert late == ["one", "two", "three"]
    assert clock.pending == []


def test_removed_entry_does_not_time_out(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    one, two, three = [LoggingEntry(name, late) for name in ("one", "two", "three")]
    for each in (one, two, three):
        watch.add(each)
    watch.remove(one)
    watch.remove(three)
    clock.advance(TIME)
    assert late == ["two"]


def test_entry_removed_during_a_timeout_does_not_time_out(
    watch: TimeoutQueue, clock: Clock
) -> None:
    late: list[str] = []
    one, two, three = [LoggingEntry(name, late) for name in ("one", "two", "three")]
    one.then = lambda: watch.remove(two)
    for each in (one, two, three):
        watch.add(each)
    clock.advance(TIME)
    assert late == ["one", "three"]


def test_entries_time_out_on_time_after_the_first_was_removed(
    watch: TimeoutQueue, clock: Clock
) -> None:
    late: list[str] = []
    one, two = LoggingEntry("one", late), LoggingEntry("two", late)
    watch.add(one)
    clock.advance(1)
    watch.add(two)
    watch.remove(one)
    clock.advance(TIME - 0.25)
    assert late == []
    clock.advance(0.25)
    assert late == ["two"]


def test_timer_of_an_empty_queue_does_nothing(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    one = LoggingEntry("one", late)
    watch.add(one)
    watch.remove(one)
    clock.advance(TIME)
    assert late == []
    assert clock.pending == []
    watch.add(one)
    clock.advance(TIME)
    assert late == ["one"]


@pytest.mark.parametrize("seconds", [0, 0.25, TIME - 0.25])
def test_remove_returns_the_elapsed_seconds(
    watch: TimeoutQueue, clock: Clock, seconds: float
) -> None:
    one, two = LoggingEntry("one", []), LoggingEntry("two", [])
    watch.add(one)
    clock.advance(0.125)
    watch.add(two)
    clock.advance(seconds)
    assert watch.remove(two) == seconds
    assert watch.remove(one) == seconds + 0.125


def test_remove_of_an_unknown_entry_returns_zero(watch: TimeoutQueue, clock: Clock) -> None:
    one = LoggingEntry("one", [])
    assert watch.remove(one) == 0
    watch.add(one)
    clock.advance(TIME)
    assert watch.remove(one) == 0


def test_timed_out_entry_leaves_the_queue(watch: TimeoutQueue, clock: Clock) -> None:
    taken: list[float] = []
    one = LoggingEntry("one", [])
    one.then = lambda: taken.append(watch.remove(one))
    watch.add(one)
    clock.advance(TIME)
    assert taken == [0]


def test_closed_queue_times_out_nothing(watch: TimeoutQueue, clock: Clock) -> None:
    late: list[str] = []
    for name in ("one", "two"):
        watch.add(LoggingEntry(name, late))
        clock.advance(1)
    watch.close()
    assert clock.pending == []
    clock.advance(TIME)
    assert late == []


def test_queue_can_be_closed_twice(watch: TimeoutQueue, clock: Clock) -> None:
    watch.add(LoggingEntry("one", []))
    watch.close()
    watch.close()
    assert clock.pending == []


async def test_timeout_works_with_a_real_timer() -> None:
    late: list[str] = []
    watch = TimeoutQueue(0.01)
    for name in ("one", "two"):
        watch.add(LoggingEntry(name, late))
    await until(lambda: len(late) == 2)
    assert late == ["one", "two"]
    watch.close()


async def test_entries_keep_their_timer_after_an_error() -> None:
    loop = asyncio.get_running_loop()
    errors: list[object] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    queue, over = TimeoutQueue(0.02), asyncio.Event()
    failing, other = mock.Mock(), mock.Mock()
    failing.on_timeout.side_effect = ZeroDivisionError
    other.on_timeout.side_effect = over.set
    queue.add(failing)
    await asyncio.sleep(0.005)
    queue.add(other)
    async with asyncio.timeout(5):
        await over.wait()
    assert [type(error) for error in errors] == [ZeroDivisionError]
    queue.close()
    over.clear()
    queue.add(other)
    async with asyncio.timeout(5):
        await over.wait()
