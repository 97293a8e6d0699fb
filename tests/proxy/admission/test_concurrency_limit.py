import asyncio

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit, enter, leave, try_acquire
from gateway.proxy.admission.deadline import Deadline
from tests.support.gateway import until

LONG = 60.0


def _gate(most: int = 1, waiting: int = 9, patience: float = LONG) -> ConcurrencyLimit:
    return ConcurrencyLimit("the server", most, waiting, patience)


async def _enter(*concurrency_limits: ConcurrencyLimit) -> None:
    with Deadline(LONG, LONG) as deadline:
        await enter(concurrency_limits, deadline)


def test_limit_admits_its_maximum() -> None:
    concurrency_limit = _gate(most=2)
    assert [concurrency_limit.try_acquire() for _ in range(3)] == [True, True, False]
    concurrency_limit.leave()
    assert concurrency_limit.active == 1
    assert concurrency_limit.try_acquire()


async def test_queued_calls_are_admitted_in_order() -> None:
    concurrency_limit = _gate()
    await _enter(concurrency_limit)
    entered: list[int] = []

    async def come(number: int) -> None:
        await _enter(concurrency_limit)
        entered.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(come(number))
            await asyncio.sleep(0)
        assert concurrency_limit.waiting == 3
        for number in range(3):
            assert entered == list(range(number))
            concurrency_limit.leave()
            assert not concurrency_limit.try_acquire()  # the place is given to who waits
            await until(lambda number=number: len(entered) > number)  # type: ignore[misc]
    concurrency_limit.leave()
    assert (concurrency_limit.active, concurrency_limit.waiting) == (0, 0)


async def test_call_is_refused_if_the_queue_has_no_room() -> None:
    concurrency_limit = _gate(waiting=0)
    await _enter(concurrency_limit)
    with pytest.raises(GatewayError) as caught:
        await _enter(concurrency_limit)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after == 1
    expected = "the server is busy: 1 requests are under way, and 0 more wait"
    assert caught.value.message == expected


async def test_queued_call_is_refused_after_the_queue_timeout() -> None:
    concurrency_limit = _gate(patience=0.01)
    await _enter(concurrency_limit)
    with pytest.raises(GatewayError, match=r"and none ended within 0.01 s") as caught:
        await _enter(concurrency_limit)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert (concurrency_limit.active, concurrency_limit.waiting) == (1, 0)


async def test_cancelled_call_in_the_queue_takes_no_slot() -> None:
    concurrency_limit = _gate()
    await _enter(concurrency_limit)
    waiting = asyncio.create_task(_enter(concurrency_limit))
    await until(lambda: concurrency_limit.waiting == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    concurrency_limit.leave()
    assert (concurrency_limit.active, concurrency_limit.waiting) == (0, 0)


async def test_call_cancelled_when_admitted_passes_its_slot_on() -> None:
    concurrency_limit = _gate()
    await _enter(concurrency_limit)
    leaving, next_one = (
        asyncio.create_task(_enter(concurrency_limit)),
        asyncio.create_task(_enter(concurrency_limit)),
    )
    await until(lambda: concurrency_limit.waiting == 2)
    concurrency_limit.leave()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await next_one
    assert (concurrency_limit.active, concurrency_limit.waiting) == (1, 0)


@pytest.mark.parametrize(
    ("idle_timeout", "request_timeout", "spent"),
    [(0.01, LONG, 0), (LONG, 0.01, 0), (LONG, LONG, LONG - 0.01), (LONG, LONG, LONG + 1)],
    ids=["idle", "total", "what is left", "nothing left"],
)
async def test_queued_call_is_refused_when_its_deadline_is_over(
    idle_timeout: float, request_timeout: float, spent: float
) -> None:
    """It is told when to try again, which no other end of the time tells."""
    concurrency_limit = _gate()
    await _enter(concurrency_limit)
    for _ in range(20):  # which of two clocks is first is nothing to go by
        with (
            pytest.raises(GatewayError, match=r"and none ended within 0(\.0\d+)? s") as caught,
            Deadline(idle_timeout, request_timeout, spent) as deadline,
        ):
            await concurrency_limit.enter(deadline)
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert caught.value.retry_after == 1
        assert (concurrency_limit.active, concurrency_limit.waiting) == (1, 0)


async def test_idle_timeout_restarts_for_an_admitted_call() -> None:
    concurrency_limit = _gate()
    await _enter(concurrency_limit)

    async def hang() -> None:
        with Deadline(LONG, 1) as deadline:
            await concurrency_limit.enter(deadline)
            deadline.expect_server("http://x")
            await asyncio.Event().wait()

    asyncio.get_running_loop().call_soon(concurrency_limit.leave)
    with pytest.raises(GatewayError, match="waiting for http://x: not done"):
        await hang()
    assert (concurrency_limit.active, concurrency_limit.waiting) == (1, 0)


async def test_higher_limit_admits_queued_calls() -> None:
    concurrency_limit = _gate()
    await _enter(concurrency_limit)
    waiting = [asyncio.create_task(_enter(concurrency_limit)) for _ in range(3)]
    await until(lambda: concurrency_limit.waiting == 3)
    concurrency_limit.change(3, 0, LONG)
    await asyncio.gather(*waiting[:2])
    assert (concurrency_limit.active, concurrency_limit.waiting) == (3, 1)
    with pytest.raises(GatewayError, match="3 requests are under way, and 0 more wait"):
        await _enter(concurrency_limit)
    concurrency_limit.leave()
    await waiting[2]
    assert (concurrency_limit.active, concurrency_limit.waiting) == (3, 0)


async def test_lower_limit_holds_once_enough_calls_have_ended() -> None:
    concurrency_limit = _gate(most=3)
    for _ in range(3):
        await _enter(concurrency_limit)
    concurrency_limit.change(1, 9, LONG)
    waiting = asyncio.create_task(_enter(concurrency_limit))
    await until(lambda: concurrency_limit.waiting == 1)
    for inside in (2, 1):
        concurrency_limit.leave()
        assert (concurrency_limit.active, concurrency_limit.waiting) == (inside, 1)
        assert not concurrency_limit.try_acquire()
    concurrency_limit.leave()
    await waiting
    assert (concurrency_limit.active, concurrency_limit.waiting) == (1, 0)


async def test_several_limits_are_acquired_all_or_none() -> None:
    wide, narrow = _gate(most=2), _gate(waiting=0)
    assert try_acquire((wide, narrow))
    assert not try_acquire((wide, narrow))
    with pytest.raises(GatewayError):
        await _enter(wide, narrow)
    assert (wide.active, narrow.active) == (1, 1)
    leave((wide, narrow))
    assert (wide.active, narrow.active) == (0, 0)
