from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.system.turns import TurnQueue, turn_queue
from tests.support.doubles.iterations import iterations


async def test_one_turn_is_taken_in_each_iteration() -> None:
    queue = TurnQueue(asyncio.get_running_loop())
    taken: list[str] = []
    for name in ("a", "b", "c"):
        queue.add(lambda name=name: taken.append(name))  # type: ignore[misc]
    for count in range(1, 4):
        await iterations(1)
        assert taken == ["a", "b", "c"][:count]
    queue.add(lambda: taken.append("later"))
    await iterations(1)
    assert taken[3:] == ["later"]


async def test_who_waits_again_is_the_last() -> None:
    queue = TurnQueue(asyncio.get_running_loop())
    taken: list[str] = []

    def take(name: str) -> Callable[[], None]:
        def turn() -> None:
            taken.append(name)
            queue.add(turn)

        return turn

    queue.add(take("a"))
    queue.add(take("b"))
    await iterations(5)
    assert taken == ["a", "b", "a", "b", "a"]


async def test_turn_that_fails_holds_up_nobody() -> None:
    loop = asyncio.get_running_loop()
    told: list[object] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    queue = TurnQueue(loop)
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
    assert turn_queue() is turn_queue()
    other = asyncio.new_event_loop()

    async def of_other() -> TurnQueue:
        return turn_queue()

    try:
        found = await asyncio.to_thread(other.run_until_complete, of_other())
        assert found is not turn_queue()
    finally:
        other.close()


def test_queue_needs_a_running_event_loop() -> None:
    with pytest.raises(RuntimeError):
        turn_queue()
