"""Deadlines, concurrency limits, the memory budget and time slices of calls."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import pytest

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.proxy.admission.concurrency_limit import (
    ConcurrencyLimit,
    acquire_all,
    release_all,
    try_acquire_all,
)
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline, request_timeout_text
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.system.buffers import MIN_STREAM_BYTES, STALLED_ALONE, BufferShare
from gateway.system.sockets.body_stream import RelaySteps
from tests.support.checks.refused import refused_with
from tests.support.doubles.clock import Clock
from tests.support.gateway import until
from tests.system.arriving_body import ArrivingBody, client_share, ended

SHORT = 0.02
LONG = 60.0
FOR_THE_ANSWER = 5.0
URL = "http://server:8000"
SERVER = ServerName(URL, "upstream 'servers'")
SPENT = f"waiting for {URL}: not done in {LONG:g} s (limits.request_timeout)"


LIMITS = pytest.mark.parametrize(
    ("idle_timeout", "request_timeout", "limit"),
    [(SHORT, LONG, "limits.idle_timeout"), (LONG, SHORT, "limits.request_timeout")],
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


async def _waiting(
    note: Callable[[Deadline], object],
    idle_timeout: float = SHORT,
    request_timeout: float = LONG,
    spent: float = 0,
) -> GatewayError:
    """Set an expectation and wait; return the error that ends the wait."""

    async def run() -> None:
        with Deadline(idle_timeout, request_timeout, spent) as deadline:
            note(deadline)
            await asyncio.sleep(LONG)

    with pytest.raises(GatewayError) as caught:
        await asyncio.wait_for(run(), 5)
    return caught.value


def _expect_server(deadline: Deadline) -> None:
    deadline.expect_server(SERVER)


@LIMITS
@pytest.mark.parametrize(
    ("note", "kind", "whom"),
    [
        (bool, ErrorKind.CLIENT_TIMEOUT, "the client"),  # the client is expected first
        (_expect_server, ErrorKind.SERVER_TIMEOUT, URL),
    ],
)
async def test_timeout_names_the_expected_peer(
    note: Callable[[Deadline], object],
    kind: ErrorKind,
    whom: str,
    idle_timeout: float,
    request_timeout: float,
    limit: str,
) -> None:
    error = await _waiting(note, idle_timeout, request_timeout)
    assert error.kind is kind
    assert error.message.startswith(f"waiting for {whom}: ")
    assert f"{SHORT:g} s ({limit})" in error.message


async def test_expectation_after_the_timeout_changes_nothing() -> None:
    async def run() -> None:
        with Deadline(SHORT, LONG) as deadline:
            try:
                await asyncio.sleep(LONG)
            finally:
                deadline.expect_client()

    with pytest.raises(GatewayError, match=r"idle_timeout"):
        await run()


@pytest.mark.parametrize("parts", [False, True])
async def test_cancellation_is_not_a_timeout(parts: bool) -> None:
    async def run() -> None:
        deadline = Deadline(LONG, LONG)
        with deadline, deadline.suspended_for_parts() if parts else nullcontext():
            await asyncio.sleep(LONG)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_client_that_leaves_with_the_timeout_has_left(clock: Clock) -> None:
    async def run() -> None:
        with Deadline(LONG, LONG):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    clock.advance(LONG)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("spent", [LONG - SHORT, LONG, LONG + 1])
async def test_spent_time_counts_towards_the_request_timeout(spent: float) -> None:
    error = await _waiting(_expect_server, LONG, LONG, spent)
    assert error.kind is ErrorKind.SERVER_TIMEOUT
    assert error.message == SPENT


@pytest.mark.parametrize(
    ("grace", "pieces", "slow"),
    [
        (10.0, [(11.0, 100)], False),
        (10.0, [(0.0, 5000), (60.0, 1)], False),  # earlier bytes count
        (10.0, [(0.0, 5000), (61.0, 1)], True),
        (10.0, [(5.0, 10), (5.0, 10), (1.0, 10)], True),
        (0.0, [(1.0, 99)], True),
        (0.0, [(1.0, 100), (1.0, 0)], True),  # the end of the body came late
    ],
)
def test_body_below_the_minimum_rate_is_refused(
    grace: float, pieces: list[tuple[float, int]], slow: bool, clock: Clock
) -> None:
    deadline = Deadline(LONG, LONG, min_body_rate=100, min_body_rate_grace=grace)

    def receive() -> None:
        for seconds, size in pieces:
            deadline.expect_client()
            clock.advance(seconds)
            deadline.count_received(size)
            clock.advance(1000)  # time of the gateway or a server

    if not slow:
        receive()
        return
    with pytest.raises(
        GatewayError, match=r"too slowly.*limits\.min_body_rate: 100 bytes"
    ) as caught:
        receive()
    assert caught.value.kind is ErrorKind.CLIENT_TIMEOUT


class RelayedBody:
    """A body of a client whose pieces come after some seconds each, and are relayed or read."""

    def __init__(self, clock: Clock, *pieces: tuple[float, bytes]) -> None:
        self.left = list(pieces)
        self._clock = clock

    async def read(self) -> bytes:
        seconds, piece = self.left.pop(0)
        self._clock.advance(seconds)
        return piece

    async def relay(self, steps: RelaySteps) -> bytes | memoryview:
        while (piece := await self.read()) and all(step(piece) is not False for step in steps):
            pass
        return piece


def run_at_once(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that never waits, without an event loop."""
    with pytest.raises(StopIteration):
        work.send(None)


async def relay_and_read(
    deadline: Deadline, body: RelayedBody, *steps: Callable[[bytes | memoryview], bool]
) -> None:
    """Relay what comes to a server, which is expected after each piece, until all is read."""

    def expect_server(piece: bytes | memoryview) -> None:
        deadline.expect_server(SERVER)

    while body.left:
        await deadline.relay(body, (*steps, expect_server))
        if body.left:
            await deadline.receive(body)


@pytest.mark.parametrize("refuses", [False, True])
def test_relayed_body_below_the_minimum_rate_is_refused(refuses: bool, clock: Clock) -> None:
    deadline = Deadline(LONG, LONG, min_body_rate=100)
    body = RelayedBody(clock, (0.0, bytes(300)), (2.0, b"a"), (0.5, b"b"), (0.6, b"c"), (1, b"d"))
    with pytest.raises(GatewayError, match="too slowly: 303 bytes in 3 s"):
        run_at_once(relay_and_read(deadline, body, lambda piece: not refuses))
    assert [piece for _, piece in body.left] == [b"d"]


def test_piece_that_ends_a_wait_counts_whether_it_is_relayed_or_read(clock: Clock) -> None:
    """The relay of a body ends with its end, and what came with that is read."""
    deadline = Deadline(LONG, LONG, min_body_rate=100)
    run_at_once(relay_and_read(deadline, RelayedBody(clock, (3.0, b""), (0.0, bytes(300)))))
    assert deadline.received_bytes == 300
    late = RelayedBody(clock, (0.1, b""), (0.0, b"late"))
    with pytest.raises(GatewayError, match="too slowly: 304 bytes in 3 s"):
        run_at_once(relay_and_read(deadline, late))


# -------------------------------------------------------------------------------------------- parts


async def _part(deadline: Deadline, url: str, time: float) -> str:
    try:
        with deadline:
            deadline.expect_server(ServerName(url, "upstream 'u'"))
            await asyncio.sleep(time)
    except GatewayError as error:
        return error.message
    return "done"


@LIMITS
async def test_part_that_times_out_does_not_end_the_others(
    idle_timeout: float, request_timeout: float, limit: str
) -> None:
    with Deadline(idle_timeout, request_timeout) as deadline:
        with deadline.suspended_for_parts():
            ends = await asyncio.gather(
                _part(deadline.part(), URL, LONG), _part(deadline.part(), URL, 0)
            )
        assert ends[1] == "done"
        assert ends[0].startswith(f"waiting for {URL}: ")
        assert limit in ends[0]


@pytest.mark.parametrize(
    ("taken", "left"),
    [(0, LONG), (LONG / 2, LONG / 2), (LONG - 1, FOR_THE_ANSWER), (2 * LONG, FOR_THE_ANSWER)],
)
async def test_client_has_time_for_the_response_after_slow_parts(
    taken: float, left: float, clock: Clock
) -> None:
    async def run() -> None:
        with Deadline(2 * LONG, LONG) as deadline:
            deadline.expect_server(SERVER)
            with deadline.suspended_for_parts():
                clock.advance(taken)
            clock.advance(left - 0.1)
            await asyncio.sleep(0)
            made.append("answer")
            clock.advance(0.1)
            await asyncio.sleep(0)
            made.append("too much")

    made: list[str] = []
    with pytest.raises(GatewayError) as caught:
        await run()
    assert made == ["answer"]
    assert caught.value.message == f"waiting for the client: {request_timeout_text(LONG)}"


async def test_server_has_no_extra_time_after_slow_parts(clock: Clock) -> None:
    async def run() -> None:
        with Deadline(LONG, LONG) as deadline:
            with deadline.suspended_for_parts():
                clock.advance(LONG)
            with deadline.suspended_for_parts(), deadline.part():
                clock.advance(0)
                await asyncio.sleep(0)

    with pytest.raises(GatewayError, match="request_timeout"):
        await run()


async def test_part_has_the_remaining_time() -> None:
    with Deadline(LONG, LONG, LONG - SHORT) as deadline, deadline.suspended_for_parts():
        end = await _part(deadline.part(), URL, LONG)
    assert end == SPENT


async def test_call_can_be_ended_with_an_error_of_its_own() -> None:
    ending = GatewayError(ErrorKind.NOT_READY, "the gateway is stopping")

    def end(deadline: Deadline) -> None:
        deadline.expect_server(SERVER)
        deadline.end(ending)
        deadline.end(GatewayError(ErrorKind.INTERNAL, "too late"))
        assert deadline.translate(asyncio.CancelledError()) is ending

    assert await _waiting(end) is ending


async def test_call_that_is_over_is_not_ended() -> None:
    with Deadline(LONG, LONG) as deadline:
        pass
    deadline.end(GatewayError(ErrorKind.INTERNAL, "too late"))
    await asyncio.sleep(0)


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


def test_all_calls_share_the_cap() -> None:
    budget = MemoryBudget(100)
    with budget.reserve() as one, budget.reserve() as other:
        one.resize(50)
        one.grow(10)
        other.grow(40)
        assert budget.total == 100
        with pytest.raises(GatewayError) as caught:
            one.resize(61)
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert caught.value.retry_after == 1
        assert "buffers 100 bytes" in caught.value.message
        assert (
            "at most 100 bytes may be buffered (limits.max_buffered_bytes)" in caught.value.message
        )
        other.resize(39)
        one.resize(61)
    assert budget.total == 0


def test_new_cap_counts_existing_reservations() -> None:
    budget = MemoryBudget(100)
    with budget.reserve() as one, budget.reserve() as other:
        one.resize(100)
        budget.set_limit(120)
        other.resize(20)
        budget.set_limit(50)
        for size in (90, 30):
            one.resize(size)
            with pytest.raises(GatewayError, match="at most 50 bytes may be buffered"):
                other.grow(1)
        one.resize(0)
        other.resize(50)
    assert budget.total == 0


async def test_as_many_streams_that_stall_end_as_a_call_needs() -> None:
    budget = MemoryBudget(10 * MIN_STREAM_BYTES)
    bodies = [ArrivingBody(client_share(budget.buffers), 2 * STALLED_ALONE) for _ in range(8)]
    moving = BufferShare(budget.buffers)
    moving.open_stream(ArrivingBody())
    with budget.reserve() as one:
        one.resize(MIN_STREAM_BYTES)
        budget.check_admission()
        assert len(await ended(bodies)) == 1
        budget.check_admission()
        assert len(await ended(bodies)) == 1
        one.resize(2 * MIN_STREAM_BYTES)
        budget.set_limit(9 * MIN_STREAM_BYTES)
        budget.check_admission()
        assert len(await ended(bodies)) == 3
        one.resize(2 * MIN_STREAM_BYTES + 1)
        budget.buffers.reserved += 6 * MIN_STREAM_BYTES
        with pytest.raises(GatewayError):
            budget.check_admission()
        assert len(await ended(bodies)) == 8
        budget.buffers.reserved -= 6 * MIN_STREAM_BYTES


async def test_call_is_refused_where_no_stream_stalls() -> None:
    budget = MemoryBudget(2 * MIN_STREAM_BYTES)
    bodies = [ArrivingBody(client_share(budget.buffers)) for _ in range(2)]
    with refused_with(ErrorKind.OVERLOADED):
        budget.check_admission()
    assert not await ended(bodies)


async def _convert(
    scheduler: ConversionScheduler, name: str, log: list[str], chunks: int, client: str = ""
) -> None:
    for _ in range(chunks):
        log.append(name)
        await scheduler.next_slice(client)


async def _laps(log: list[str]) -> None:
    """Log each time slice of a conversion."""
    while True:
        log.append("|")
        await asyncio.sleep(0)


async def test_conversions_share_the_time_slices() -> None:
    log: list[str] = []
    scheduler = ConversionScheduler()
    laps = asyncio.create_task(_laps(log))
    await asyncio.gather(*(_convert(scheduler, name, log, 10) for name in "abcd"))
    laps.cancel()
    later = "".join(log).strip("|").split("|")[3:]  # all start together
    assert max(map(len, later)) == 1
    assert [log.count(name) for name in "abcd"] == [10] * 4
    order = "".join(later)
    assert all(set(order[i : i + 4]) == set("abcd") for i in range(len(order) - 8))


async def test_clients_take_turns_however_many_calls_they_have() -> None:
    log: list[str] = []
    scheduler = ConversionScheduler()
    greedy = [_convert(scheduler, "g", log, 10, "greedy") for _ in range(100)]
    await asyncio.gather(*greedy, *(_convert(scheduler, name, log, 10, name) for name in "ab"))
    later = log[102:]  # all start together
    assert later[:35].count("a") == later[:35].count("b") == 9


async def test_cancelled_conversion_passes_its_time_slice_on() -> None:
    log: list[str] = []
    scheduler = ConversionScheduler()
    tasks = [asyncio.create_task(_convert(scheduler, name, log, 1000)) for name in "abcd"]
    for _ in range(20):
        await asyncio.sleep(0)
    for task in tasks[1:]:
        task.cancel()
    before = log.count("a")
    for _ in range(20):
        await asyncio.sleep(0)
    assert log.count("a") >= before + 10
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait_for(scheduler.next_slice(), 5)


async def test_free_time_slice_is_taken_at_once() -> None:
    scheduler = ConversionScheduler()
    assert scheduler.try_take_slice()
    assert not scheduler.try_take_slice()
    waiting = asyncio.create_task(scheduler.next_slice())
    await asyncio.sleep(0)
    assert not scheduler.try_take_slice()  # the waiting conversion has it
    await waiting
    await asyncio.sleep(0)
    assert scheduler.try_take_slice()


async def test_waiting_conversion_runs_before_a_new_one() -> None:
    scheduler = ConversionScheduler()
    log: list[str] = []
    tasks = [asyncio.create_task(_convert(scheduler, name, log, 10)) for name in "ab"]
    await asyncio.sleep(0)
    while not all(task.done() for task in tasks):
        if scheduler.try_take_slice():
            log.append("t")
        await asyncio.sleep(0)
    assert "".join(log).strip("t").count("t") <= 1
