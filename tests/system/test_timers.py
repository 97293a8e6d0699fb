"""Timeouts by a single timer, and time slices of the event loop."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from unittest import mock

import pytest

from gateway.system.time_slices import TimeSliceQueue, time_slice_queue
from gateway.system.timeout_queue import TimeoutQueue
from tests.support.doubles.clock import Clock
from tests.support.doubles.iterations import iterations
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


class Timed:
    """A queue on a clock of its own, three entries, and the names of those that have timed out."""

    def __init__(self) -> None:
        self.clock = Clock()
        with mock.patch("asyncio.get_running_loop", return_value=self.clock):
            self.watch = TimeoutQueue(TIME)
        self.late: list[str] = []
        self.entries = [LoggingEntry(name, self.late) for name in ("one", "two", "three")]


@pytest.fixture
def timed() -> Timed:
    return Timed()


def test_each_entry_times_out_once_when_its_time_is_over(timed: Timed) -> None:
    for entry in timed.entries:
        timed.watch.add(entry)
        timed.clock.advance(0.5)
        assert len(timed.clock.pending) == 1
    timed.clock.advance(TIME - 1.75)
    assert timed.late == []
    timed.clock.advance(0.25)
    assert timed.late == ["one"]
    timed.clock.advance(0.25)
    assert timed.late == ["one"]
    timed.clock.advance(0.25)
    assert timed.late == ["one", "two"]
    timed.clock.advance(0.5)
    assert timed.late == ["one", "two", "three"]
    timed.clock.advance(5 * TIME)
    assert timed.late == ["one", "two", "three"]
    assert timed.clock.pending == []


def test_delayed_timer_times_out_all_due_entries_in_order(timed: Timed) -> None:
    for entry in timed.entries:
        timed.watch.add(entry)
        timed.clock.now += 0.25
    timed.clock.advance(TIME - 0.25)
    assert timed.late == ["one", "two", "three"]
    assert timed.clock.pending == []


def test_entry_added_during_a_timeout_shares_the_timer(timed: Timed) -> None:
    """The response to one timeout may start the next request."""
    timed.entries[0].then = lambda: timed.watch.add(timed.entries[2])
    timed.watch.add(timed.entries[0])
    timed.clock.advance(0.5)
    timed.watch.add(timed.entries[1])
    for seconds, count in ((TIME - 0.5, 1), (0.5, 2), (TIME - 0.5, 3)):
        timed.clock.advance(seconds)
        assert timed.late == ["one", "two", "three"][:count]
        assert len(timed.clock.pending) == (count < 3)


def test_removed_entry_does_not_time_out(timed: Timed) -> None:
    timed.watch.add(timed.entries[0])
    timed.clock.advance(1)
    for entry in timed.entries[1:]:
        timed.watch.add(entry)
    timed.watch.remove(timed.entries[0])
    timed.watch.remove(timed.entries[2])
    timed.clock.advance(TIME - 0.25)
    assert timed.late == []
    timed.clock.advance(0.25)
    assert timed.late == ["two"]


def test_entry_removed_during_a_timeout_does_not_time_out(timed: Timed) -> None:
    taken: list[float] = []
    timed.entries[0].then = lambda: taken.extend(map(timed.watch.remove, timed.entries[:2]))
    for entry in timed.entries:
        timed.watch.add(entry)
    timed.clock.advance(TIME)
    assert timed.late == ["one", "three"]
    assert taken == [0, TIME]  # the first one has left the queue


def test_remove_returns_the_elapsed_seconds(timed: Timed) -> None:
    one, two, unknown = timed.entries
    timed.watch.add(one)
    timed.clock.advance(0.125)
    timed.watch.add(two)
    timed.clock.advance(0.25)
    assert [timed.watch.remove(each) for each in (two, one, unknown)] == [0.25, 0.375, 0]
    timed.watch.add(one)
    timed.clock.advance(TIME)
    assert timed.watch.remove(one) == 0


def test_closed_queue_times_out_nothing(timed: Timed) -> None:
    timed.watch.close()
    assert timed.clock.timers == []
    for entry in timed.entries:
        timed.watch.add(entry)
    for _ in range(2):
        timed.watch.close()
        assert timed.clock.pending == []
    timed.clock.advance(TIME)
    assert timed.late == []


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


async def test_one_turn_is_taken_in_each_iteration() -> None:
    queue = TimeSliceQueue()
    taken: list[str] = []
    for name in ("a", "b", "c"):
        queue.add(lambda name=name: taken.append(name))  # type: ignore[misc]
    for count in range(1, 4):
        await iterations(1)
        assert taken == ["a", "b", "c"][:count]
    queue.add(lambda: taken.append("later"))
    await iterations(1)
    assert taken[3:] == ["later"]


async def test_clients_take_turns_however_many_connections_they_have() -> None:
    queue = TimeSliceQueue()
    taken: list[str] = []
    for name in ("a1", "a2", "a3", "b1", "b2"):
        queue.add(lambda name=name: taken.append(name), name[0])  # type: ignore[misc]
    await iterations(5)
    assert taken == ["a1", "b1", "a2", "b2", "a3"]


async def test_turn_that_fails_holds_up_nobody() -> None:
    loop = asyncio.get_running_loop()
    told: list[object] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    queue = TimeSliceQueue()
    taken: list[str] = []
    error = ValueError()

    def fail() -> None:
        raise error

    queue.add(fail)
    queue.add(lambda: taken.append("b"))
    await iterations(2)
    queue.add(fail)
    await iterations(1)
    queue.add(lambda: taken.append("d"))
    await iterations(1)
    assert taken == ["b", "d"]
    assert told == [error, error]


async def test_connections_of_an_event_loop_share_a_queue() -> None:
    assert time_slice_queue() is time_slice_queue()
    other = asyncio.new_event_loop()

    async def of_other() -> TimeSliceQueue:
        return time_slice_queue()

    try:
        found = await asyncio.to_thread(other.run_until_complete, of_other())
        assert found is not time_slice_queue()
    finally:
        other.close()


def test_queue_is_forgotten_with_its_event_loop() -> None:
    async def take_time_slice() -> weakref.ref[asyncio.AbstractEventLoop]:
        await time_slice_queue().next_slice()
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(take_time_slice())
    gc.collect()
    assert loop() is None
