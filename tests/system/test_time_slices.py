from __future__ import annotations

import asyncio

from gateway.system.time_slices import TimeSliceQueue, time_slice_queue
from tests.support.doubles.iterations import iterations


async def test_one_turn_is_taken_in_each_iteration() -> None:
    queue = TimeSliceQueue(asyncio.get_running_loop())
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
    queue = TimeSliceQueue(asyncio.get_running_loop())
    taken: list[str] = []
    for name in ("a1", "a2", "a3", "b1", "b2"):
        queue.add(lambda name=name: taken.append(name), name[0])  # type: ignore[misc]
    await iterations(5)
    assert taken == ["a1", "b1", "a2", "b2", "a3"]


async def test_turn_that_fails_holds_up_nobody() -> None:
    loop = asyncio.get_running_loop()
    told: list[object] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    queue = TimeSliceQueue(loop)
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
