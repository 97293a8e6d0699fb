import asyncio

import pytest

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.proxy.admission.concurrency_limit import (
    ConcurrencyLimit,
    acquire_all,
    release_all,
    try_acquire_all,
)
from gateway.proxy.admission.deadline import Deadline
from tests.support.gateway import until

LONG = 60.0


def _limit(
    max_requests: int = 1, max_queue: int = 9, queue_timeout: float = LONG
) -> ConcurrencyLimit:
    return ConcurrencyLimit("the server", max_requests, max_queue, queue_timeout)


async def _acquire(*limits: ConcurrencyLimit) -> None:
    with Deadline(LONG, LONG) as deadline:
        await acquire_all(limits, deadline)


async def test_queued_calls_are_admitted_in_order() -> None:
    limit = _limit()
    await _acquire(limit)
    admitted: list[int] = []

    async def come(number: int) -> None:
        await _acquire(limit)
        admitted.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(come(number))
            await asyncio.sleep(0)
        assert limit.queued == 3
        for number in range(3):
            assert admitted == list(range(number))
            limit.release()
            assert not limit.try_acquire()  # the slot goes to a queued call
            await until(lambda number=number: len(admitted) > number)  # type: ignore[misc]
    limit.release()
    assert (limit.active, limit.queued) == (0, 0)


async def test_calls_that_waited_for_different_times_have_one_cause() -> None:
    limit = _limit(queue_timeout=0.01)
    await _acquire(limit)
    errors = []
    for seconds in (1, 0.005):
        with Deadline(LONG, seconds) as deadline, pytest.raises(GatewayError) as caught:
            await limit.acquire(deadline)
        errors.append(caught.value)
    one, other = errors
    assert one.message.endswith("and none ended within 0.01 s")
    assert one.message != other.message
    assert one.cause == other.cause
    assert one.cause != one.message


async def test_call_cancelled_when_admitted_passes_its_slot_on() -> None:
    limit = _limit()
    await _acquire(limit)
    leaving, next_one = (asyncio.create_task(_acquire(limit)), asyncio.create_task(_acquire(limit)))
    await until(lambda: limit.queued == 2)
    limit.release()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await next_one
    assert (limit.active, limit.queued) == (1, 0)


@pytest.mark.parametrize(
    ("idle_timeout", "request_timeout", "spent"),
    [(0.01, LONG, 0), (LONG, 0.01, 0), (LONG, LONG, LONG + 1)],
    ids=["idle", "total", "nothing left"],
)
async def test_queued_call_is_refused_when_its_deadline_is_over(
    idle_timeout: float, request_timeout: float, spent: float
) -> None:
    """The error has a Retry-After, unlike other timeouts."""
    limit = _limit()
    await _acquire(limit)
    for _ in range(20):  # which of two clocks fires first is not defined
        with (
            pytest.raises(GatewayError, match=r"and none ended within 0(\.0\d+)? s") as caught,
            Deadline(idle_timeout, request_timeout, spent) as deadline,
        ):
            await limit.acquire(deadline)
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert caught.value.retry_after == 1
        assert (limit.active, limit.queued) == (1, 0)


async def test_idle_timeout_restarts_for_an_admitted_call() -> None:
    limit = _limit()
    await _acquire(limit)

    async def hang() -> None:
        with Deadline(LONG, 1) as deadline:
            await limit.acquire(deadline)
            deadline.expect_server(ServerName("http://x", "upstream 'x'"))
            await asyncio.Event().wait()

    asyncio.get_running_loop().call_soon(limit.release)
    with pytest.raises(GatewayError, match="waiting for http://x: not done"):
        await hang()
    assert (limit.active, limit.queued) == (1, 0)


async def test_higher_limit_admits_queued_calls() -> None:
    limit = _limit()
    await _acquire(limit)
    waiting = [asyncio.create_task(_acquire(limit)) for _ in range(3)]
    await until(lambda: limit.queued == 3)
    limit.reconfigure(3, 0, LONG)
    await asyncio.gather(*waiting[:2])
    assert (limit.active, limit.queued) == (3, 1)
    with pytest.raises(GatewayError) as caught:
        await _acquire(limit)
    assert (caught.value.kind, caught.value.retry_after) == (ErrorKind.OVERLOADED, 1)
    assert caught.value.message == "the server is busy: 3 calls in progress, and 0 more wait"
    limit.release()
    await waiting[2]
    assert (limit.active, limit.queued) == (3, 0)


async def test_lower_limit_holds_once_enough_calls_have_ended() -> None:
    limit = _limit(max_requests=3)
    for _ in range(3):
        await _acquire(limit)
    limit.reconfigure(1, 9, LONG)
    waiting = asyncio.create_task(_acquire(limit))
    await until(lambda: limit.queued == 1)
    for inside in (2, 1):
        limit.release()
        assert (limit.active, limit.queued) == (inside, 1)
        assert not limit.try_acquire()
    limit.release()
    await waiting
    assert (limit.active, limit.queued) == (1, 0)


async def test_several_limits_are_acquired_all_or_none() -> None:
    wide, narrow = _limit(max_requests=2), _limit(max_queue=0)
    assert try_acquire_all((wide, narrow))
    assert not try_acquire_all((wide, narrow))
    with pytest.raises(GatewayError):
        await _acquire(wide, narrow)
    assert (wide.active, narrow.active) == (1, 1)
    release_all((wide, narrow))
    assert (wide.active, narrow.active) == (0, 0)
