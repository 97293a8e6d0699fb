import asyncio

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.proxy.admission.concurrency_limit import Gate, enter, enter_at_once, leave
from gateway.proxy.admission.deadline import Deadline
from tests.support.gateway import until

LONG = 60.0


def _gate(most: int = 1, waiting: int = 9, patience: float = LONG) -> Gate:
    return Gate("the server", most, waiting, patience)


async def _enter(*gates: Gate) -> None:
    with Deadline(LONG, LONG) as deadline:
        await enter(gates, deadline)


def test_so_many_are_let_in() -> None:
    gate = _gate(most=2)
    assert [gate.enter_at_once() for _ in range(3)] == [True, True, False]
    gate.leave()
    assert gate.inside == 1
    assert gate.enter_at_once()


async def test_who_waits_is_let_in_in_order() -> None:
    gate = _gate()
    await _enter(gate)
    entered: list[int] = []

    async def come(number: int) -> None:
        await _enter(gate)
        entered.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(come(number))
            await asyncio.sleep(0)
        assert gate.waiting == 3
        for number in range(3):
            assert entered == list(range(number))
            gate.leave()
            assert not gate.enter_at_once()  # the place is given to who waits
            await until(lambda number=number: len(entered) > number)  # type: ignore[misc]
    gate.leave()
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_nobody_waits_where_nobody_may() -> None:
    gate = _gate(waiting=0)
    await _enter(gate)
    with pytest.raises(GatewayError) as caught:
        await _enter(gate)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after == 1
    expected = "the server is busy: 1 requests are under way, and 0 more wait"
    assert caught.value.message == expected


async def test_who_has_waited_too_long_is_turned_away() -> None:
    gate = _gate(patience=0.01)
    await _enter(gate)
    with pytest.raises(GatewayError, match=r"and none ended within 0.01 s") as caught:
        await _enter(gate)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert (gate.inside, gate.waiting) == (1, 0)


async def test_who_leaves_while_waiting_takes_no_place() -> None:
    gate = _gate()
    await _enter(gate)
    waiting = asyncio.create_task(_enter(gate))
    await until(lambda: gate.waiting == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.leave()
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_who_leaves_just_when_its_turn_comes_gives_it_to_the_next() -> None:
    gate = _gate()
    await _enter(gate)
    leaving, next_one = asyncio.create_task(_enter(gate)), asyncio.create_task(_enter(gate))
    await until(lambda: gate.waiting == 2)
    gate.leave()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await next_one
    assert (gate.inside, gate.waiting) == (1, 0)


@pytest.mark.parametrize(
    ("idle_time", "total_time", "spent"),
    [(0.01, LONG, 0), (LONG, 0.01, 0), (LONG, LONG, LONG - 0.01), (LONG, LONG, LONG + 1)],
    ids=["idle", "total", "what is left", "nothing left"],
)
async def test_who_has_less_time_is_turned_away_as_it_is_over(
    idle_time: float, total_time: float, spent: float
) -> None:
    """It is told when to try again, which no other end of the time tells."""
    gate = _gate()
    await _enter(gate)
    for _ in range(20):  # which of two clocks is first is nothing to go by
        with (
            pytest.raises(GatewayError, match=r"and none ended within 0(\.0\d+)? s") as caught,
            Deadline(idle_time, total_time, spent) as deadline,
        ):
            await gate.enter(deadline)
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert caught.value.retry_after == 1
        assert (gate.inside, gate.waiting) == (1, 0)


async def test_the_time_goes_on_for_who_was_let_in() -> None:
    gate = _gate()
    await _enter(gate)

    async def hang() -> None:
        with Deadline(LONG, 1) as deadline:
            await gate.enter(deadline)
            deadline.wait_for_server("http://x")
            await asyncio.Event().wait()

    asyncio.get_running_loop().call_soon(gate.leave)
    with pytest.raises(GatewayError, match="waiting for http://x: not done"):
        await hang()
    assert (gate.inside, gate.waiting) == (1, 0)


async def test_more_places_let_in_who_waits() -> None:
    gate = _gate()
    await _enter(gate)
    waiting = [asyncio.create_task(_enter(gate)) for _ in range(3)]
    await until(lambda: gate.waiting == 3)
    gate.change(3, 0, LONG)
    await asyncio.gather(*waiting[:2])
    assert (gate.inside, gate.waiting) == (3, 1)
    with pytest.raises(GatewayError, match="3 requests are under way, and 0 more wait"):
        await _enter(gate)
    gate.leave()
    await waiting[2]
    assert (gate.inside, gate.waiting) == (3, 0)


async def test_fewer_places_are_kept_to_once_enough_have_left() -> None:
    gate = _gate(most=3)
    for _ in range(3):
        await _enter(gate)
    gate.change(1, 9, LONG)
    waiting = asyncio.create_task(_enter(gate))
    await until(lambda: gate.waiting == 1)
    for inside in (2, 1):
        gate.leave()
        assert (gate.inside, gate.waiting) == (inside, 1)
        assert not gate.enter_at_once()
    gate.leave()
    await waiting
    assert (gate.inside, gate.waiting) == (1, 0)


async def test_several_are_entered_all_or_none() -> None:
    wide, narrow = _gate(most=2), _gate(waiting=0)
    assert enter_at_once((wide, narrow))
    assert not enter_at_once((wide, narrow))
    with pytest.raises(GatewayError):
        await _enter(wide, narrow)
    assert (wide.inside, narrow.inside) == (1, 1)
    leave((wide, narrow))
    assert (wide.inside, narrow.inside) == (0, 0)
